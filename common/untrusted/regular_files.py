"""Opening of untrusted files: regular files only, never a pipe, a device or a folder."""

import os
import stat
from pathlib import Path
from typing import BinaryIO, TextIO

from .budgets import Budget, check_size


def open_regular(path: Path, follow_links: bool = True) -> BinaryIO:
    """Open a regular file to read. Never blocks, as opening a pipe without a writer would.

    Raises OSError for anything but a regular file, and for a link unless `follow_links`.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags)
    try:
        check_regular(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def append_regular(path: Path) -> TextIO:
    """Open a regular file to append text to it, or make it. Never blocks, and writes through no link.

    Raises OSError for anything but a regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    handle = os.open(path, flags, 0o666)
    try:
        check_regular(os.fstat(handle), path)
        return os.fdopen(handle, "a", encoding="utf-8")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, budget: Budget) -> bytes:
    """Read a whole regular file. Raises OverBudget if it is too large, OSError as `open_regular`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(budget, path.name, bytes=size)
        data = file.read(size + 1)  # a read of more allocates all that was asked for
        if len(data) > size:  # it has grown
            data += file.read(budget.bytes + 1 - len(data))
    check_size(budget, path.name, bytes=len(data))
    return data


def is_regular(path: Path) -> bool:
    """Return whether the path is a regular file; links are followed."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False


def file_state(path: Path) -> tuple[int, int, int, int]:
    """Return (size, modification time, change time, inode) of a file; one of them differs once it was written or
    replaced, by `rsync -t` too, which sets the modification time. On Windows, whose change time is that of creation, a
    file that was moved over another differs by its inode.

    An equal file may have another state: network and FAT file systems renumber their files. So a state only says
    what to read again; the hash of the bytes decides whether anything changed. Raises OSError.
    """
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def check_regular(status: os.stat_result, path: Path) -> None:
    """Raise OSError unless `status` is that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path.name} is no regular file; remove it.")
