"""Folders with every path component checked at use: no link below a root is followed.

A path checked before use is open to a race: a folder can be swapped for a link in between. If the system supports it,
each component is opened from its parent without following links, and files are moved between open folders.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

_FROM_FOLDER = {os.open, os.mkdir, os.rename, os.unlink, os.rmdir, os.stat} <= os.supports_dir_fd


@dataclass(frozen=True)
class OpenFolder:
    """A folder below a root.

    path: its path.
    handle: its file descriptor, from which names are looked up; None if the system has none for folders.
    """

    path: Path
    handle: int | None

    def _name(self, name: str) -> str | Path:
        return name if self.handle is not None else self.path / name

    def contains(self, name: str) -> bool:
        """Return whether there is an entry of this name; a link counts, even a broken one."""
        try:
            os.stat(self._name(name), dir_fd=self.handle, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def unlink(self, name: str) -> None:
        """Remove a file, or a link but not its target."""
        os.unlink(self._name(name), dir_fd=self.handle)

    def rmdir(self, name: str) -> None:
        """Remove an empty folder."""
        os.rmdir(self._name(name), dir_fd=self.handle)

    def move(self, name: str, target: "OpenFolder") -> None:
        """Move a file to another folder, which must have none of this name.

        On OSError the file stays in place, and nothing of it is left in the other folder.
        """
        if target.contains(name):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target.path / name))
        try:
            os.rename(self._name(name), target._name(name), src_dir_fd=self.handle, dst_dir_fd=target.handle)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy(name, target)
            self.unlink(name)

    def _copy(self, name: str, target: "OpenFolder") -> None:
        """Copy a file to a folder on another disk, with its times."""
        flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        with os.fdopen(os.open(self._name(name), os.O_RDONLY | flags, dir_fd=self.handle), "rb") as source:
            status = os.fstat(source.fileno())
            create_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags
            try:
                with os.fdopen(
                    os.open(target._name(name), create_flags, status.st_mode & 0o777, dir_fd=target.handle), "wb"
                ) as destination:
                    shutil.copyfileobj(source, destination)
                    destination.flush()
                    os.fsync(destination.fileno())
                    if os.utime in os.supports_fd:
                        os.utime(destination.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
            except OSError:
                with contextlib.suppress(OSError):
                    target.unlink(name)
                raise


@contextmanager
def folder_below(root: Path, place: PurePath, make: bool = False) -> Iterator[OpenFolder]:
    """Open the folder at `place` below `root`, with no link among the components below the root.

    make: create missing components, and the root.
    Raises OSError: NotADirectoryError, or ELOOP, for a link or a file on the way.
    """
    assert not place.is_absolute() and ".." not in place.parts
    if make:
        root.mkdir(parents=True, exist_ok=True)
    if not _FROM_FOLDER:
        yield _checked(root, place, make)
        return
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in place.parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield OpenFolder(root / place, handle)
    finally:
        os.close(handle)


def _checked(root: Path, place: PurePath, make: bool) -> OpenFolder:
    """Check each component by its path, as needed on Windows; a junction counts as a link."""
    real = path = Path(os.path.realpath(root))
    for part in place.parts:
        path = path / part
        if make:
            path.mkdir(exist_ok=True)
        if Path(os.path.realpath(path)) != path or not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return OpenFolder(real / place, None)
