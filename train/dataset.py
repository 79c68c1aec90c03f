"""A data set as the user keeps it: folders of pictures and of clips, with a caption file beside each."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .extraction import Extraction
from .fingerprint import fingerprint
from .pictures import EXTENSIONS, UNREAD_EXTENSIONS

VIDEO_EXTENSIONS = frozenset({".mp4", ".webm", ".mkv", ".mov", ".gif"})
UNREAD_VIDEO_EXTENSIONS = frozenset({".avi", ".wmv", ".flv", ".mpg", ".mpeg", ".m4v", ".ts", ".mts", ".ogv", ".3gp"})

_NAMED = 5  # how many files a message lists before it only counts the rest


@dataclass(frozen=True)
class Picture:
    """One picture file and its caption.

    repeats: how often an epoch shows it.
    name: what messages call it, its path below the chosen folder.
    controls: the control pictures of an edit model, in their order.
    """

    path: Path
    caption: str
    repeats: int
    name: str
    controls: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Film:
    """One video file and its caption, which gives one clip or several; repeats and name as of a picture."""

    path: Path
    caption: str
    repeats: int
    name: str
    extraction: Extraction


@dataclass(frozen=True)
class Dataset:
    """Pictures and films in the order in which their folders were chained (TESSERA_DATASET). notes: what was left
    out."""

    entries: tuple[Picture | Film, ...]
    notes: tuple[str, ...] = ()

    def __add__(self, other: "Dataset") -> "Dataset":
        return Dataset(self.entries + other.entries, self.notes + other.notes)


@dataclass(frozen=True)
class Kind:
    """What a folder is read for. noun: what messages call one of its files. read, unread: endings; format: what
    unread files are to be saved as."""

    noun: str
    read: frozenset[str]
    unread: frozenset[str]
    format: str


PICTURES = Kind("picture", EXTENSIONS, UNREAD_EXTENSIONS, "PNG or JPEG")
CLIPS = Kind("clip", VIDEO_EXTENSIONS, UNREAD_VIDEO_EXTENSIONS, "MP4 (H.264)")


def scan_folder(
    folder: Path,
    *,
    caption_extension: str = ".txt",
    repeats: int = 1,
    trigger_words: str = "",
    control_folder: Path | None = None,
) -> Dataset:
    """Read a folder of pictures with its subfolders; hidden files and folders are passed over, the order is by name.

    The caption of `a.jpg` is the text of `a.txt` (UTF-8), with `trigger_words` and a comma before it. An empty
    caption file is an empty caption, a missing one is an error: ValueError names up to five such pictures. A note
    names files that look like pictures of kinds that are not read. With a `control_folder`, which may lie in the
    folder, each picture takes its control pictures from there (`match_controls`).
    """

    def make(path: Path, caption: str, name: str) -> Picture:
        return Picture(path, caption, repeats, name)

    if control_folder is not None and _same(folder, control_folder):
        raise ValueError(
            f"control_folder is {folder.name!r}, the folder of the pictures themselves; put the control pictures into "
            f"a folder of their own."
        )
    found = _scan(folder, PICTURES, make, caption_extension, repeats, trigger_words, without=control_folder)
    if control_folder is None:
        return found
    controls, notes = match_controls([entry.name for entry in found.entries], control_folder)
    pictures = [entry for entry in found.entries if isinstance(entry, Picture)]
    with_controls = (replace(picture, controls=of) for picture, of in zip(pictures, controls, strict=True))
    return Dataset(tuple(with_controls), found.notes + notes)


def scan_films(
    folder: Path,
    extraction: Extraction,
    *,
    caption_extension: str = ".txt",
    repeats: int = 1,
    trigger_words: str = "",
) -> Dataset:
    """Read a folder of video files as `scan_folder` reads one of pictures."""

    def make(path: Path, caption: str, name: str) -> Film:
        return Film(path, caption, repeats, name, extraction)

    return _scan(folder, CLIPS, make, caption_extension, repeats, trigger_words)


def match_controls(names: Sequence[str], folder: Path) -> tuple[list[tuple[Path, ...]], tuple[str, ...]]:
    """The control pictures of each picture, and a note on those that belong to none.

    names: of pictures, as paths below their folder. `sub/a.jpg` takes `sub/a.png` in the control folder, whatever its
    ending, then `sub/a_0.png`, `sub/a_1.png`, … in the order of their numbers, as musubi-tuner names them; a file that
    has the whole name of another picture is that one's. ValueError names up to five pictures that have none.
    """
    stems = [_stem(name) for name in names]
    files: dict[str, Path] = {}
    for file in picture_files(folder):
        stem = _stem(_name(folder, file))
        if stem in files:
            raise ValueError(
                f"The control folder {folder.name!r} holds {files[stem].name!r} and {file.name!r}, which are one "
                f"control picture by their names; remove one."
            )
        files[stem] = file
    numbered: dict[str, list[tuple[int, str]]] = {}
    for stem in files.keys() - set(stems):
        if match := re.fullmatch(r"(.*)_(\d+)", stem, re.DOTALL):
            numbered.setdefault(match[1], []).append((int(match[2]), stem))
    matched = [[stem] * (stem in files) + [other for _, other in sorted(numbered.get(stem, []))] for stem in stems]
    missing = [name for name, of in zip(names, matched, strict=True) if not of]
    if missing:
        stem = _stem(missing[0])
        raise ValueError(
            f"{len(missing)} of {len(names)} pictures have no control picture in {folder.name!r}: "
            f"{shortlist(missing)}; put one of the same name there, such as {stem + '.png'!r} or {stem + '_0.png'!r} "
            f"for {missing[0]!r}, or take the picture out of its folder."
        )
    spare = sorted(files.keys() - {stem for of in matched for stem in of})
    notes = (f"Control pictures that belong to no picture: {_listed(folder, [files[s] for s in spare])}.",)
    return [tuple(files[stem] for stem in of) for of in matched], notes if spare else ()


def picture_files(folder: Path) -> list[Path]:
    """The picture files in a folder and its subfolders, without hidden ones, sorted by their path below it."""
    return _files(folder, EXTENSIONS)


def is_picture(name: str) -> bool:
    """Whether a file of this name belongs to a data set of pictures."""
    return _has_ending(name, EXTENSIONS)


def is_film(name: str) -> bool:
    """Whether a file of this name belongs to a data set of clips."""
    return _has_ending(name, VIDEO_EXTENSIONS)


def caption_file(picture: Path, extension: str) -> Path:
    """Where the caption of a picture is looked for."""
    return picture.with_name(picture.stem + extension)


def folder_fingerprint(
    folder: Path, caption_extension: str, kind: Kind = PICTURES, control_folder: Path | None = None
) -> str:
    """Changes when a file of this kind, a caption or a control picture is added, removed, renamed or written to.

    Files of kinds that are not read count by their names, as a note lists them.
    """
    extension = _checked_extension(caption_extension)
    entries: list[tuple[str, str]] = []
    for picture in _files(folder, kind.read, control_folder):
        for file in (picture, caption_file(picture, extension)):
            entries.append((_name(folder, file), _state(file)))
    entries += [(_name(folder, file), "unread") for file in _files(folder, kind.unread, control_folder)]
    if control_folder is not None:
        entries += [(f"control {_name(control_folder, f)}", _state(f)) for f in picture_files(control_folder)]
    return fingerprint(entries)


def shortlist(names: Sequence[str]) -> str:
    """Up to five names for a message, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _scan(
    folder: Path,
    kind: Kind,
    make: Callable[[Path, str, str], Picture | Film],
    caption_extension: str,
    repeats: int,
    trigger_words: str,
    without: Path | None = None,
) -> Dataset:
    extension = _checked_extension(caption_extension)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; set it to 1 or more.")
    files, unread = _files(folder, kind.read, without), _files(folder, kind.unread, without)
    if not files:
        kinds = ", ".join(sorted(kind.read))
        there = f" that can be read (there is {_listed(folder, unread)})" if unread else ""
        raise ValueError(
            f"The folder {folder.name!r} holds no {kind.noun}s{there}; put {kind.noun}s ({kinds}) into it."
        )
    missing = [file for file in files if not caption_file(file, extension).is_file()]
    if missing:
        raise ValueError(_missing_captions(folder, files, missing, extension, kind.noun))
    words = trigger_words.strip().rstrip(",").rstrip()
    captions = [", ".join(filter(None, (words, _read_caption(file, extension)))) for file in files]
    entries = (make(file, caption, _name(folder, file)) for file, caption in zip(files, captions, strict=True))
    left_out = f"Left out, being of kinds that are not read: {_listed(folder, unread)}; save them as {kind.format}."
    return Dataset(tuple(entries), (left_out,) if unread else ())


def _has_ending(name: str, endings: frozenset[str]) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in endings


def _files(folder: Path, endings: frozenset[str], without: Path | None = None) -> list[Path]:
    found = []
    for parent, subfolders, names in os.walk(folder):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".") and (without is None or not _same(Path(parent, name), without))
        ]
        found += [Path(parent, name) for name in names if _has_ending(name, endings)]
    return sorted(found, key=lambda path: _name(folder, path))


def _same(folder: Path, other: Path) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _listed(folder: Path, files: list[Path]) -> str:
    return shortlist([_name(folder, file) for file in files])


def _state(file: Path) -> str:
    try:
        stat = file.stat()
    except OSError:
        return "missing"
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _checked_extension(extension: str) -> str:
    normal = "." + extension.strip().lstrip(".")
    if not re.fullmatch(r"\.[\w.-]+", normal) or normal.lower() in EXTENSIONS | VIDEO_EXTENSIONS:
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


def _missing_captions(folder: Path, files: list[Path], missing: list[Path], extension: str, noun: str) -> str:
    example = f"such as {caption_file(missing[0], extension).name!r} for {missing[0].name!r}"
    if len(missing) == len(files):
        return (
            f"The folder {folder.name!r} holds {noun}s ({len(files)}) but no {extension} caption files; put a text "
            f"file of the same name beside each {noun}, {example} (an empty file is an empty caption)."
        )
    return (
        f"{len(missing)} of {len(files)} {noun}s in {folder.name!r} have no {extension} caption file: "
        f"{_listed(folder, missing)}; add one beside each, {example} (an empty file is an empty "
        f"caption), or take the {noun} out of the folder."
    )
