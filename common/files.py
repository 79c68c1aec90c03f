"""Atomic file writes, and safetensors reads that return copies which autograd accepts."""

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from .untrusted.tensor_files import open_tensors

if TYPE_CHECKING:
    from torch import Tensor

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space and try again",
    errno.EDQUOT: "your disk quota is used up; free some space and try again",
    errno.EFBIG: "the file is larger than this disk or your quota allows; free some space or save elsewhere",
    errno.EACCES: "the folder may not be written to; change its permissions or save elsewhere",
    errno.EPERM: "the folder may not be written to; change its permissions or save elsewhere",
    errno.EROFS: "the disk is read-only; save elsewhere",
    errno.ENAMETOOLONG: "the name is too long; choose a shorter one",
}


# Part of the name of an unfinished file, which shows whether its process still runs.
def _processes() -> str:
    """Return the PID namespace, as containers may share everything else with their host."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


# Id of this machine, for files that several machines may write to.
MACHINE = hashlib.blake2b(f"{platform.node()} {uuid.getnode()} {_processes()}".encode(), digest_size=4).hexdigest()
_SESSION = uuid.uuid4().hex[:8]
_OWNER = f"-{MACHINE}-{os.getpid()}-{_SESSION}"
_ABANDONED = 24 * 60 * 60  # seconds
_UNUSED = 7 * _ABANDONED
_LOCK = re.compile(r"tessera-[0-9a-f]{16}\.lock")
_OF_A_DEVICE = re.compile(r"tessera-device-(\d{1,10})-\w{1,20}")
# Pattern of the name of an unfinished file: machine, process and session.
UNFINISHED = r"\.[0-9a-f]{32}-([0-9a-f]{8})-(\d+)-([0-9a-f]{8})\.part"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Call `write` on a new file next to `path`, flush it to the disk and rename it to `path`.

    An existing file at `path` stays unchanged until the new one is complete. The unfinished file is removed on failure.
    Raises OSError with one sentence that names the file, the cause and the fix.
    """
    unfinished = path.with_name(f".{uuid.uuid4().hex}{_OWNER}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        ordinary = unfinished.stat().st_mode
        write(unfinished)
        # safetensors makes files that only their owner may read; other users of the output folder need them too.
        unfinished.chmod(ordinary)
        with open(unfinished, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_folder(path.parent)
    except (OSError, SafetensorError) as error:
        code = _error_number(error)
        reason = _REASONS.get(code) or f"{os.strerror(code) if code else error}; save elsewhere"
        raise OSError(code, f"{path.name} could not be saved: {reason} (nothing was overwritten).") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def sweep_unfinished(folder: Path) -> None:
    """Delete unfinished files of `write_atomically` left by killed processes, in a folder and all below it.

    A file is deleted once its process on this machine has ended. One of another machine is deleted
    after a day without a write: a live server on a shared disk may still be writing it.
    """
    for unfinished in folder.rglob(".*.part"):
        with contextlib.suppress(OSError):  # gone meanwhile, or held open
            if _is_left(unfinished):
                unfinished.unlink()


def _is_left(unfinished: Path) -> bool:
    match = re.fullmatch(UNFINISHED, unfinished.name)
    if match and match[1] == MACHINE and int(match[2]) == os.getpid():
        return match[3] != _SESSION  # from an earlier process with this PID, as in a restarted container
    if match and match[1] == MACHINE and not psutil.pid_exists(int(match[2])):
        return True
    return time.time() - unfinished.stat().st_mtime > _ABANDONED


def read_tensors(path: Path) -> tuple[dict[str, "Tensor"], dict[str, str]]:
    """Read a safetensors file: its tensors on the host, in their saved dtypes, and its metadata.

    Raises OSError or SafetensorError if there is no complete file.
    """
    import torch  # imported here, as writing files needs no torch

    # ComfyUI runs nodes in inference mode, whose tensors autograd refuses. Tensors are cloned because safetensors
    # returns views of the mapped file, which Windows can neither replace nor delete while it is mapped.
    with torch.inference_mode(False), open_tensors(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})


def _error_number(error: Exception) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    # safetensors writes in Rust and reports the system's error as text.
    match = re.search(r"os error (\d+)", str(error))
    return int(match.group(1)) if match else 0


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, if the system can open a folder (Windows can't)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def lock_of(name: str) -> FileLock:
    """Make the lock of this name (16 hexadecimal digits), held by at most one process of this machine; others fail.

    Its file stays after release: removing it then could leave two processes with a lock each.
    """
    return FileLock(Path(tempfile.gettempdir()) / f"tessera-{name}.lock", timeout=0, mode=0o666)


def sweep_temporary() -> None:
    """Remove locks unused for a week, and day-old folders of processes that have ended. Raises nothing."""
    root, current_time = Path(tempfile.gettempdir()), time.time()
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            with contextlib.suppress(OSError, Timeout):  # gone meanwhile, held, or another user's
                _sweep(entry, current_time - entry.stat(follow_symlinks=False).st_mtime)


def _sweep(entry: os.DirEntry[str], age: float) -> None:
    device = _OF_A_DEVICE.fullmatch(entry.name)
    if device and age > _ABANDONED and entry.is_dir(follow_symlinks=False) and not psutil.pid_exists(int(device[1])):
        shutil.rmtree(entry.path, ignore_errors=True)
    elif _LOCK.fullmatch(entry.name) and age > _UNUSED and entry.is_file(follow_symlinks=False):
        with FileLock(entry.path, timeout=0):
            Path(entry.path).unlink()
