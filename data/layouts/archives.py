"""Archives of a data set: zip files, and tars in WebDataset's layout, unpacked once into a folder of the cache.

Only regular files of known endings are written, under names that stay below that folder. What a member claims about
itself is checked against the bytes that come out. Nothing of an archive is run or unpickled.
"""

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Literal

from ...common.progress import Interrupted
from ...common.text import cut, shortlist
from ...common.untrusted.budgets import ARCHIVE, OverBudget, check_size
from ...common.untrusted.regular_files import open_regular
from ..media.images import EXTENSIONS, UNREAD_EXTENSIONS
from .companions import MASK_EXTENSION
from .files import VIDEO_EXTENSIONS, is_skipped

ARCHIVE_ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
_TEXTS = frozenset({".txt", ".caption", ".json", ".jsonl", ".csv", ".tsv"})
_UNPACKED = EXTENSIONS | UNREAD_EXTENSIONS | VIDEO_EXTENSIONS | _TEXTS | {MASK_EXTENSION}
_PIECE = 1 << 20
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError, RuntimeError),
)
_COMPRESSIONS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
# A reader of an archive asks for no more at once: the table of a zip, or the long name of a tar's member.
_LARGEST_READ = 256 << 20
_LEFT_OUT = ".left_out"  # hidden file with the names of members that were not unpacked
_FREE_BYTES = 1 << 30  # left on the disk


@dataclass(frozen=True)
class Unpacked:
    """An archive's files in a folder.

    archive: the archive.
    folder: the folder with its files.
    left_out: names of members that were not unpacked, at most twenty, and how many more there are.
    """

    archive: Path
    folder: Path
    left_out: str


def is_archive(name: str) -> bool:
    """Return True for the name of an archive that is read."""
    return not name.startswith(".") and name.lower().endswith(ARCHIVE_ENDINGS)


def unpacked_folder(archive: Path, cache: Path) -> Path:
    """Return the folder of an archive's files, which exists once it was unpacked as it is now."""
    status = archive.stat()
    place = hashlib.blake2b(os.fsencode(os.path.realpath(archive)), digest_size=12).hexdigest()
    name = archive.name.lower()
    ending = next(ending for ending in ARCHIVE_ENDINGS if name.endswith(ending))
    return cache / place / f"{status.st_size:x}_{status.st_mtime_ns:x}" / archive.name[: -len(ending)]


def opened(archive: Path, cache: Path) -> Unpacked | None:
    """Return an archive's files if it was unpacked as it is now, else None."""
    try:
        folder = unpacked_folder(archive, cache)
        return Unpacked(archive, folder, (folder / _LEFT_OUT).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def unpack(archive: Path, cache: Path, interrupted: Interrupted) -> Unpacked:
    """Unpack an archive below `cache`, unless it already is there as it is now.

    interrupted: called between pieces; raises to stop, and nothing is left then.
    Raises ValueError for what isn't an archive, is encrypted, past its budget, or too large for the disk.
    """
    try:
        folder = unpacked_folder(archive, cache)
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parents[1], prefix=".new_") as scratch:
                _write_all(archive, Path(scratch, "files"), interrupted)
                _replace_others(folder, Path(scratch, "files"))
        left_out = (folder / _LEFT_OUT).read_text(encoding="utf-8", errors="replace")
    except OverBudget:
        raise
    except _DAMAGED as error:
        encrypted = "encrypted" in str(error) or "password" in str(error)
        cause = "it is encrypted" if encrypted else "it's damaged, or not an archive of that kind"
        raise ValueError(
            f"The archive {archive.name!r} can't be read, because {cause}; unpack it yourself into a folder."
        ) from error
    except OSError as error:
        raise ValueError(
            f"The archive {archive.name!r} can't be unpacked ({error.strerror or error}); unpack it yourself into a "
            "folder."
        ) from error
    return Unpacked(archive, folder, left_out)


def _replace_others(folder: Path, new: Path) -> None:
    """Move what was unpacked to its place, and remove what older versions of the archive left there."""
    try:
        os.rename(new, folder)
    except OSError:
        if not folder.is_dir():  # another process was first
            raise
    for other in folder.parents[1].iterdir():
        if other != folder.parent and not other.name.startswith("."):
            shutil.rmtree(other, ignore_errors=True)


def _write_all(archive: Path, folder: Path, interrupted: Interrupted) -> None:
    """Write the files of an archive into a new folder, and the names of others into _LEFT_OUT."""
    folder.mkdir()
    byte_count, left_out = 0, list[str]()
    for count, (name, member) in enumerate(_members(archive), 1):
        interrupted()
        check_size(ARCHIVE, archive.name, items=count)
        place = safe_place(name)
        if place is None or place.suffix.lower() not in _UNPACKED:
            left_out.append(name)
            continue
        target = folder / place
        if target.exists() or _blocked(folder, place):
            left_out.append(name)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file, member() as source:
            while piece := source.read(_PIECE):
                interrupted()
                byte_count += len(piece)
                check_size(ARCHIVE, archive.name, bytes=byte_count)
                if byte_count % (64 * _PIECE) < len(piece) and shutil.disk_usage(folder).free < _FREE_BYTES:
                    raise ValueError(
                        f"The archive {archive.name!r} is too large for the disk of ComfyUI's user folder; free some "
                        "space, or unpack it yourself into a folder."
                    )
                file.write(piece)
    (folder / _LEFT_OUT).write_text(shortlist(left_out), encoding="utf-8", errors="replace")


def _blocked(folder: Path, place: PurePosixPath) -> bool:
    """Return True if a file has the name of one of the folders of a member."""
    return any((folder / parent).is_file() for parent in place.parents)


def safe_place(name: str) -> PurePosixPath | None:
    """Return the place of a member below the folder that it is unpacked into; None for one that is left out.

    Left out are absolute paths, drives, `..`, hidden files and folders, and those of the system.
    """
    parts = [part for part in name.replace("\\", "/").split("/") if part != "."]
    if not parts or name.startswith(("/", "\\")) or any(bad in part for part in parts for bad in ':\0<>"|?*\n'):
        return None
    unsafe = any(not part or part == ".." or is_skipped(part) or part != part.rstrip(" .") for part in parts)
    too_long = len(parts) > 20 or any(len(os.fsencode(part)) > 240 for part in parts)
    reserved = any(part.split(".")[0].upper() in _RESERVED for part in parts)
    return None if unsafe or too_long or reserved else PurePosixPath(*parts)


# Devices of Windows, under any extension.
_RESERVED = frozenset({"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(1, 10))})


class _Member:
    """A member of an archive, opened when it is called."""

    def __init__(self, archive: zipfile.ZipFile | tarfile.TarFile, info: zipfile.ZipInfo | tarfile.TarInfo) -> None:
        self.archive, self.info = archive, info

    @contextmanager
    def __call__(self) -> Iterator[IO[bytes]]:
        if isinstance(self.archive, zipfile.ZipFile):
            assert isinstance(self.info, zipfile.ZipInfo)
            with self.archive.open(self.info) as source:
                yield source
            return
        assert isinstance(self.info, tarfile.TarInfo)
        source_or_none = self.archive.extractfile(self.info)
        assert source_or_none is not None
        with source_or_none as source:
            yield source


def _members(archive: Path) -> Iterator[tuple[str, _Member]]:
    """Yield the regular files of an archive by name, in its order. Links, devices and folders are skipped."""
    with open_regular(archive) as raw:
        if archive.name.lower().endswith(".zip"):
            with zipfile.ZipFile(_Bounded(raw)) as packed:
                for entry in packed.infolist():
                    if entry.compress_type not in _COMPRESSIONS:
                        raise NotImplementedError("another compression")
                    if not entry.is_dir():
                        yield entry.filename, _Member(packed, entry)
            return
        is_packed = archive.name.lower().endswith("gz")
        plain: BinaryIO = gzip.GzipFile(fileobj=raw) if is_packed else raw  # type: ignore[assignment]
        with tarfile.open(fileobj=_Bounded(plain), mode="r:") as tar:
            for member in tar:
                if member.isreg():
                    yield member.name, _Member(tar, member)


class _Bounded(io.RawIOBase):
    """File of which no more than _LARGEST_READ bytes are read at once."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def readable(self) -> Literal[True]:
        return True

    def seekable(self) -> Literal[True]:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LARGEST_READ:
            rest = self.file.read(_LARGEST_READ + 1)
            if len(rest) > _LARGEST_READ:
                raise tarfile.ReadError(f"a part of more than {cut(str(_LARGEST_READ))} bytes")
            return rest
        return self.file.read(size)
