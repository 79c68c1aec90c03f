"""Files that are either the old one or the whole new one, whatever happens while they are written."""

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and try again",
    errno.EDQUOT: "the disk quota is used up; free some space and try again",
    errno.EFBIG: "the file is larger than this disk or user may hold; free some space or save elsewhere",
    errno.EACCES: "the folder may not be written to; change its permissions or save elsewhere",
    errno.EPERM: "the folder may not be written to; change its permissions or save elsewhere",
    errno.EROFS: "the disk is read-only; save elsewhere",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` on a new file beside `path`, brings it to the disk and renames it to `path`.

    A file that is already at `path` stays as it was until the new one is whole. Raises OSError with one sentence
    that names the file, the cause and the fix; the unfinished file is removed.
    """
    beside = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
        ordinary = beside.stat().st_mode
        write(beside)
        # safetensors makes files that only their owner may read; other users of the output folder need them too.
        beside.chmod(ordinary)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        code = _error_number(error)
        reason = _REASONS.get(code) or f"{os.strerror(code) if code else error}; save elsewhere"
        raise OSError(code, f"{path.name} could not be saved: {reason} (nothing was overwritten).") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _error_number(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    # safetensors writes in Rust and gives the system's error as text.
    found = re.search(r"os error (\d+)", str(error))
    return int(found.group(1)) if found else 0


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut, where the system can open a folder (Windows can't)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
