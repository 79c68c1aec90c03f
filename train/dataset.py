"""A data set as the user keeps it: folders of pictures with a caption file beside each."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .fingerprint import fingerprint
from .pictures import EXTENSIONS, UNREAD_EXTENSIONS

_NAMED = 5  # how many files a message lists before it only counts the rest


@dataclass(frozen=True)
class Picture:
    """One picture file and its caption.

    repeats: how often an epoch shows it.
    name: what messages call it, its path below the chosen folder.
    """

    path: Path
    caption: str
    repeats: int
    name: str


@dataclass(frozen=True)
class Dataset:
    """Pictures in the order in which their folders were chained (TESSERA_DATASET). notes: what was left out."""

    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Dataset") -> "Dataset":
        return Dataset(self.pictures + other.pictures, self.notes + other.notes)


def scan_folder(folder: Path, *, caption_extension: str = ".txt", repeats: int = 1, trigger_words: str = "") -> Dataset:
    """Read a folder with its subfolders; hidden files and folders are passed over, the order is by name.

    The caption of `a.jpg` is the text of `a.txt` (UTF-8), with `trigger_words` and a comma before it. An empty
    caption file is an empty caption, a missing one is an error: ValueError names up to five such pictures. A note
    names files that look like pictures of kinds that are not read.
    """
    extension = _checked_extension(caption_extension)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; set it to 1 or more.")
    files, unread = picture_files(folder), unread_files(folder)
    if not files:
        kinds = ", ".join(sorted(EXTENSIONS))
        there = f" that can be read (there is {_listed(folder, unread)})" if unread else ""
        raise ValueError(f"The folder {folder.name!r} holds no pictures{there}; put pictures ({kinds}) into it.")
    missing = [file for file in files if not caption_file(file, extension).is_file()]
    if missing:
        raise ValueError(_missing_captions(folder, files, missing, extension))
    words = trigger_words.strip().rstrip(",").rstrip()
    return Dataset(
        tuple(
            Picture(
                file, ", ".join(filter(None, (words, _read_caption(file, extension)))), repeats, _name(folder, file)
            )
            for file in files
        ),
        (f"Left out, being of kinds that are not read: {_listed(folder, unread)}; save them as PNG or JPEG.",)
        if unread
        else (),
    )


def picture_files(folder: Path) -> list[Path]:
    """The picture files in a folder and its subfolders, without hidden ones, sorted by their path below it."""
    return _files(folder, EXTENSIONS)


def unread_files(folder: Path) -> list[Path]:
    """The files that `picture_files` passes over although they are pictures, by their endings, in the same order."""
    return _files(folder, UNREAD_EXTENSIONS)


def is_picture(name: str) -> bool:
    """Whether a file of this name belongs to a data set."""
    return _has_ending(name, EXTENSIONS)


def _has_ending(name: str, endings: frozenset[str]) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in endings


def _files(folder: Path, endings: frozenset[str]) -> list[Path]:
    found = []
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if _has_ending(name, endings)]
    return sorted(found, key=lambda path: _name(folder, path))


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _listed(folder: Path, files: list[Path]) -> str:
    return shortlist([_name(folder, file) for file in files])


def caption_file(picture: Path, extension: str) -> Path:
    """Where the caption of a picture is looked for."""
    return picture.with_name(picture.stem + extension)


def folder_fingerprint(folder: Path, caption_extension: str) -> str:
    """Changes when a picture or caption file is added, removed, renamed or written to.

    Pictures of kinds that are not read count by their names, as a note lists them.
    """
    extension = _checked_extension(caption_extension)
    entries: list[tuple[str, str]] = []
    for picture in picture_files(folder):
        for file in (picture, caption_file(picture, extension)):
            try:
                stat = file.stat()
                state = f"{stat.st_size} {stat.st_mtime_ns}"
            except OSError:
                state = "missing"
            entries.append((_name(folder, file), state))
    entries += [(_name(folder, file), "unread") for file in unread_files(folder)]
    return fingerprint(entries)


def shortlist(names: Sequence[str]) -> str:
    """Up to five names for a message, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _checked_extension(extension: str) -> str:
    normal = "." + extension.strip().lstrip(".")
    if not re.fullmatch(r"\.[\w.-]+", normal) or normal.lower() in EXTENSIONS:
        raise ValueError(f"caption_extension is {extension!r}; set it to how caption files end, such as .txt.")
    return normal


def _read_caption(picture: Path, extension: str) -> str:
    file = caption_file(picture, extension)
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"The caption file {file.name!r} is not UTF-8 text; save it as UTF-8.") from error
    except OSError as error:
        fix = "check its access rights"
        raise ValueError(f"The caption file {file.name!r} can't be read ({error.strerror}); {fix}.") from error


def _missing_captions(folder: Path, files: list[Path], missing: list[Path], extension: str) -> str:
    example = f"such as {caption_file(missing[0], extension).name!r} for {missing[0].name!r}"
    if len(missing) == len(files):
        return (
            f"The folder {folder.name!r} holds pictures ({len(files)}) but no {extension} caption files; put a text "
            f"file of the same name beside each picture, {example} (an empty file is an empty caption)."
        )
    return (
        f"{len(missing)} of {len(files)} pictures in {folder.name!r} have no {extension} caption file: "
        f"{_listed(folder, missing)}; add one beside each, {example} (an empty file is an empty "
        f"caption), or take the picture out of the folder."
    )
