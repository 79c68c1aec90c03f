"""Opening of files that strangers may have put there: regular files only, never a pipe, a device or a folder."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from .budgets import Budget, check_size


def open_regular(path: Path, follow_links: bool = True) -> BinaryIO:
    """Open a regular file to read. Never waits: a pipe without a writer would block for ever.

    Raises OSError for anything else than a regular file, and without `follow_links` for a link.
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


def read_regular(path: Path, budget: Budget) -> bytes:
    """Read a regular file whole. Raises OverBudget for a larger one, OSError as `open_regular`."""
    with open_regular(path) as file:
        check_size(budget, path.name, bytes=os.fstat(file.fileno()).st_size)
        data = file.read(budget.bytes + 1)
    check_size(budget, path.name, bytes=len(data))  # it may have grown
    return data


def is_regular(path: Path) -> bool:
    """Test for a regular file, links followed."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return False


def check_regular(status: os.stat_result, path: Path) -> None:
    """Raise OSError unless `status` is that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path.name} is no regular file; remove it.")
