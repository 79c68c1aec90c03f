"""Archives of a data set: zip files, and tars in WebDataset's layout, unpacked once into a folder of the cache.

Only regular files of known endings are written, under names that stay below that folder. What a member claims about
itself is checked against the bytes that come out. Nothing of an archive is run or unpickled.
"""

import errno
import gzip
import hashlib
import io
import itertools
import os
import re
import shutil
import struct
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
from ...common.untrusted.budgets import ARCHIVE, UNPACKED, OverBudget, check_size
from ...common.untrusted.regular_files import open_regular
from ..media.images import EXTENSIONS, UNREAD_EXTENSIONS
from .companions import MASK_EXTENSION
from .files import VIDEO_EXTENSIONS, is_skipped

ARCHIVE_ENDINGS = (".zip", ".tar", ".tar.gz", ".tgz")
TEXTS = frozenset({".txt", ".caption", ".json", ".jsonl", ".csv", ".tsv"})
_UNPACKED = EXTENSIONS | UNREAD_EXTENSIONS | VIDEO_EXTENSIONS | TEXTS | {MASK_EXTENSION}
_PIECE = 1 << 20
_DAMAGED = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, struct.error, EOFError),
    *(NotImplementedError, RuntimeError, OverflowError, ValueError),
)
_COMPRESSIONS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
# A reader of an archive asks for no more at once: the table of a zip, or the long name of a tar's member.
_LARGEST_READ = {".zip": 64 << 20, ".tar": 2 << 20}
_DIGITS = re.compile(rb"[0-9]{200}")
_ZIP_ENTRY = b"PK\1\2"  # in the table, before each entry
_LARGE_ARCHIVE = 1_000_000_000  # bytes from which it may unpack to as much as ARCHIVE says
_LEFT_OUT = ".left_out"  # hidden file with the names of members that were not unpacked
_FREE_BYTES = 1 << 30  # left on the disk
_MOST_NAMED = 20  # members that a note may need


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
    """Move the unpacked files to their place, and remove those of older versions of the archive."""
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
    left_out, skipped = list[str](), 0
    budget = ARCHIVE if archive.stat().st_size >= _LARGE_ARCHIVE else UNPACKED
    byte_count = 0
    for name, member in _members(archive, interrupted):
        interrupted()
        place = safe_place(name)
        if place is None or place.suffix.lower() not in _UNPACKED or _is_taken(folder, place):
            skipped += 1
            left_out += [cut(name)] * (len(left_out) < _MOST_NAMED)
            continue
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file, member() as source:
            while piece := source.read(_PIECE):
                interrupted()
                byte_count += len(piece)
                check_size(budget, archive.name, bytes=byte_count)
                if byte_count % (64 * _PIECE) < len(piece) and shutil.disk_usage(folder).free < _FREE_BYTES:
                    raise OSError(errno.ENOSPC, "the disk of ComfyUI's user folder is full")
                file.write(piece)
    names = shortlist(left_out + [""] * (skipped - len(left_out)))
    (folder / _LEFT_OUT).write_text(names, encoding="utf-8", errors="replace")


def _is_taken(folder: Path, place: PurePosixPath) -> bool:
    """Return True if there is a file of this name, or one with the name of one of its folders."""
    return (folder / place).exists() or any((folder / parent).is_file() for parent in place.parents)


def safe_place(name: str) -> PurePosixPath | None:
    """Return the place of a member below the folder that it is unpacked into; None for one that is left out.

    Left out are absolute paths, drives, `..`, hidden files and folders, and those of the system.
    """
    parts = [part for part in name.replace("\\", "/").split("/") if part != "."]
    if not parts or name.startswith(("/", "\\")) or any(bad in name for bad in ':\0<>"|?*\n'):
        return None
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:  # no name of a file
        return None
    too_long = len(parts) > 20 or max(sizes) > 240 or sum(sizes) > 1000
    return PurePosixPath(*parts) if not too_long and all(map(_is_safe, parts)) else None


def _is_safe(part: str) -> bool:
    """Return True for a name of a file or folder that every system takes, and that is not hidden."""
    whole = bool(part) and part == part.rstrip(" .")  # which `..` is not
    return whole and not is_skipped(part) and part.split(".")[0].upper() not in _RESERVED


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


def _members(archive: Path, interrupted: Interrupted) -> Iterator[tuple[str, _Member]]:
    """Yield the regular files of an archive by name, in its order. Links, devices and folders are skipped, but count.

    Raises OverBudget for more members than an archive may have.
    """
    with open_regular(archive) as raw:
        if archive.name.lower().endswith(".zip"):
            with zipfile.ZipFile(_ZipFile(raw, archive.name)) as packed:
                check_size(ARCHIVE, archive.name, items=len(packed.infolist()))
                for entry in packed.infolist():
                    if entry.compress_type not in _COMPRESSIONS:
                        raise NotImplementedError("another compression")
                    if not entry.filename.endswith("/"):
                        yield entry.filename, _Member(packed, entry)
            return
        packed_with_gzip = archive.name.lower().endswith("gz")
        plain = _Unpacking(raw, archive.name, interrupted) if packed_with_gzip else _Bounded(raw)
        with plain.in_header():  # of the first member
            tar = tarfile.open(fileobj=plain, mode="r:")
        with tar:
            for count in itertools.count(1):
                with plain.in_header():
                    member = tar.next()
                if member is None:
                    return
                interrupted()
                check_size(ARCHIVE, archive.name, items=count)
                tar.members.clear()  # type: ignore[attr-defined]  # it keeps them all, to find one by name
                if member.isreg() and not member.issparse():
                    yield member.name, _Member(tar, member)


class _Bounded(io.RawIOBase):
    """File of which no more than `largest` bytes are read at once, nor in the header of one member."""

    largest = _LARGEST_READ[".tar"]

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._header = -1  # bytes; -1 outside of headers

    @contextmanager
    def in_header(self) -> Iterator[None]:
        """Read the header of a member of a tar."""
        self._header = 0
        try:
            yield
        finally:
            self._header = -1

    def readable(self) -> Literal[True]:
        return True

    def seekable(self) -> Literal[True]:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def read(self, size: int | None = -1, /) -> bytes:
        is_usual = size is not None and 0 <= size <= self.largest
        data = self.file.read(size if size is not None and is_usual else self.largest + 1)
        if self._header >= 0:
            self._header += len(data)
            # `tarfile` looks for a field after a number, in time quadratic in its digits.
            if _DIGITS.search(data):
                raise tarfile.ReadError("a number of hundreds of digits")
        if max(len(data), self._header) > self.largest:
            raise tarfile.ReadError(f"a part of more than {self.largest} bytes")
        return data


class _ZipFile(_Bounded):
    """Zip file whose entries are counted before `zipfile` makes an object of each."""

    largest = _LARGEST_READ[".zip"]

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(file)
        self.name = name

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if len(data) > _PIECE:  # files are read in pieces, so this is the table
            check_size(ARCHIVE, self.name, items=data.count(_ZIP_ENTRY))
        return data


class _Unpacking(_Bounded):
    """Content of a gzip file, which is only read forward: to go back would unpack it from its start."""

    def __init__(self, file: BinaryIO, name: str, interrupted: Interrupted) -> None:
        """interrupted: called between pieces; raises to stop."""
        super().__init__(gzip.GzipFile(fileobj=file))  # type: ignore[arg-type]
        self.name = name
        self._interrupted = interrupted
        self._position = 0  # bytes read of it
        self._last = b""  # the last of them
        self._again = b""  # bytes to be read once more

    def tell(self) -> int:
        return self._position - len(self._again)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes. Raises OverBudget past the bytes that an archive may unpack to."""
        self._interrupted()
        again, self._again = self._again, b""
        if again and size is not None and 0 <= size <= len(again):
            self._again = again[size:]
            return again[:size]
        data = super().read(size if size is None or size < 0 else size - len(again))
        self._position += len(data)
        self._last = data[-1:] or self._last
        check_size(ARCHIVE, self.name, bytes=self._position)
        return again + data

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go forward, or back by one byte, as `tarfile` does at the end of a member."""
        if whence != os.SEEK_SET or offset < self._position - 1:
            raise tarfile.ReadError("a part that lies before another one")
        if offset == self._position - 1 and self._last:
            self._again = self._last
        elif offset >= self._position:
            self._again = b""
            header = self._header
            self._header = -1
            while (rest := offset - self._position) and self.read(min(rest, _PIECE)):
                pass
            self._header = header
        return self.tell()
