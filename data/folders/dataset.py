"""A data set as the user keeps it: folders of pictures and of clips, with a caption file beside each."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ..captions.notes import form_notes
from ..captions.options import CaptionOptions
from ..captions.variants import CaptionForms, caption_forms
from ..media.clip_windows import Extraction
from ..media.images import EXTENSIONS, UNREAD_EXTENSIONS
from .class_words import check_class_captions, read_class_word
from .files import VIDEO_EXTENSIONS, files_in, listed, name_below, picture_files, state_of
from .options import AS_IT_IS, Treatment, extraction_notes, folder_notes
from .pairing import apart, match_controls, match_masks

UNREAD_VIDEO_EXTENSIONS = frozenset({".avi", ".wmv", ".flv", ".mpg", ".mpeg", ".m4v", ".ts", ".mts", ".ogv", ".3gp"})


@dataclass(frozen=True)
class Picture:
    """One picture file and its caption.

    caption: its caption, where it has several forms the first of `forms`.
    repeats: how often an epoch shows it.
    name: what messages call it, its path below the chosen folder.
    controls: the control pictures of an edit model, in their order.
    mask: the picture that says what of it counts.
    """

    path: Path
    caption: str
    repeats: int
    name: str
    controls: tuple[Path, ...] = ()
    mask: Path | None = None
    treatment: Treatment = AS_IT_IS
    forms: CaptionForms | None = None


@dataclass(frozen=True)
class Film:
    """One video file and its caption, which gives one clip or several; all else as of a picture. mask: of each
    frame."""

    path: Path
    caption: str
    repeats: int
    name: str
    extraction: Extraction
    mask: Path | None = None
    treatment: Treatment = AS_IT_IS
    forms: CaptionForms | None = None


@dataclass(frozen=True)
class Dataset:
    """Pictures and films in the order in which their folders were chained (TESSERA_DATASET). notes: what was left
    out; folders: what was set for each folder, as plain values without its name."""

    entries: tuple[Picture | Film, ...]
    notes: tuple[str, ...] = ()
    folders: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)

    def __add__(self, other: "Dataset") -> "Dataset":
        return Dataset(self.entries + other.entries, self.notes + other.notes, self.folders + other.folders)


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
    mask_folder: Path | None = None,
    treatment: Treatment = AS_IT_IS,
    captions: CaptionOptions | None = None,
) -> Dataset:
    """Read a folder of pictures with its subfolders; hidden files and folders are passed over, the order is by name.

    The caption of `a.jpg` is the text of `a.txt` (UTF-8), with `trigger_words` and a comma before it; `captions` may
    give it several forms. An empty caption file is an empty caption, a missing one is an error: ValueError names up to
    five such pictures. A note names files that look like pictures of kinds that are not read. With a
    `control_folder`, which may lie in the folder, each picture takes its control pictures from there
    (`match_controls`), and with a `mask_folder` its mask (`match_masks`).
    """

    def make(path: Path, caption: str, name: str) -> Picture:
        return Picture(path, caption, repeats, name, treatment=treatment)

    without = apart(folder, control_folder=control_folder, mask_folder=mask_folder)
    found = _scan(folder, PICTURES, make, caption_extension, repeats, trigger_words, captions, without)
    found = _with_masks(_with_class(found, folder, treatment, trigger_words), mask_folder, treatment)
    if control_folder is not None:
        controls, notes = match_controls([entry.name for entry in found.entries], control_folder)
        pictures = [entry for entry in found.entries if isinstance(entry, Picture)]
        with_controls = (replace(picture, controls=of) for picture, of in zip(pictures, controls, strict=True))
        found = Dataset(tuple(with_controls), found.notes + notes)
    others = {"controls": control_folder is not None, "masks": mask_folder is not None}
    return _described(found, folder, repeats, trigger_words, treatment, captions, others)


def scan_films(
    folder: Path,
    extraction: Extraction,
    *,
    caption_extension: str = ".txt",
    repeats: int = 1,
    trigger_words: str = "",
    mask_folder: Path | None = None,
    treatment: Treatment = AS_IT_IS,
    captions: CaptionOptions | None = None,
) -> Dataset:
    """Read a folder of video files as `scan_folder` reads one of pictures. A mask is a picture, for all frames."""

    def make(path: Path, caption: str, name: str) -> Film:
        return Film(path, caption, repeats, name, extraction, treatment=treatment)

    found = _scan(folder, CLIPS, make, caption_extension, repeats, trigger_words, captions)
    others = {"masks": mask_folder is not None, "extraction": asdict(extraction)}
    found = _with_masks(_with_class(found, folder, treatment, trigger_words), mask_folder, treatment)
    found = replace(found, notes=(*found.notes, *extraction_notes(extraction)))
    return _described(found, folder, repeats, trigger_words, treatment, captions, others)


def _described(
    found: Dataset,
    folder: Path,
    repeats: int,
    trigger_words: str,
    treatment: Treatment,
    captions: CaptionOptions | None,
    others: Mapping[str, Any],
) -> Dataset:
    """With what was set for the folder, and what of it has no effect."""
    masked = others["masks"] or treatment.alpha_mask
    notes = (*found.notes, *folder_notes(folder.name, treatment, trigger_words, masked))
    said = {"files": len(found.entries), "repeats": repeats, "trigger_words": trigger_words, **others}
    said |= {"treatment": asdict(treatment), "captions": asdict(captions or CaptionOptions())}
    return replace(found, notes=notes, folders=(said,))


def caption_file(picture: Path, extension: str) -> Path:
    """Where the caption of a picture is looked for."""
    return picture.with_name(picture.stem + extension)


def folder_fingerprint(
    folder: Path,
    caption_extension: str,
    kind: Kind = PICTURES,
    control_folder: Path | None = None,
    mask_folder: Path | None = None,
) -> str:
    """Changes when a file of this kind, a caption, a control picture or a mask is added, removed, renamed or written
    to.

    Files of kinds that are not read count by their names, as a note lists them.
    """
    extension = _checked_extension(caption_extension)
    entries: list[tuple[str, str]] = []
    without = tuple(other for other in (control_folder, mask_folder) if other is not None)
    for picture in files_in(folder, kind.read, without):
        for file in (picture, caption_file(picture, extension)):
            entries.append((name_below(folder, file), state_of(file)))
    entries += [(name_below(folder, file), "unread") for file in files_in(folder, kind.unread, without)]
    for what, other in (("control", control_folder), ("mask", mask_folder)):
        if other is not None:
            entries += [(f"{what} {name_below(other, file)}", state_of(file)) for file in picture_files(other)]
    return fingerprint(entries)


def _with_class(found: Dataset, folder: Path, treatment: Treatment, trigger_words: str) -> Dataset:
    """With a class caption for each that holds the word which class_word stands for, or the empty prompt for all."""
    if treatment.blank_prompt_preservation:
        return replace(found, entries=tuple(_with_blank(entry) for entry in found.entries))
    if not treatment.class_word.strip():
        return found
    rule = read_class_word(treatment.class_word, trigger_words)
    entries, without = [], []
    for entry in found.entries:
        forms = entry.forms or CaptionForms((entry.caption,))
        of_class = tuple(map(rule.caption, forms.texts))
        without += [] if any(of_class) else [entry.name]
        entries.append(replace(entry, forms=replace(forms, of_class=of_class)) if any(of_class) else entry)
    notes = check_class_captions(rule, folder.name, len(entries) - len(without), without)
    return Dataset(tuple(entries), found.notes + notes)


def _with_blank(entry: Picture | Film) -> Picture | Film:
    forms = entry.forms or CaptionForms((entry.caption,))
    return replace(entry, forms=replace(forms, of_class=("",) * len(forms.texts)))


def _with_masks(found: Dataset, mask_folder: Path | None, treatment: Treatment) -> Dataset:
    if mask_folder is None:
        unread = treatment.unmasked_weight > 0 and not treatment.alpha_mask
        note = "unmasked_weight has no effect, as there are no masks; set mask_folder or alpha_mask to give some."
        return replace(found, notes=(*found.notes, note)) if unread else found
    if treatment.alpha_mask:
        raise ValueError("mask_folder is set and alpha_mask is on; a picture takes one mask: set one of them only.")
    masks, notes = match_masks([entry.name for entry in found.entries], mask_folder)
    entries = (replace(entry, mask=mask) for entry, mask in zip(found.entries, masks, strict=True))
    return Dataset(tuple(entries), found.notes + notes)


def _scan(
    folder: Path,
    kind: Kind,
    make: Callable[[Path, str, str], Picture | Film],
    caption_extension: str,
    repeats: int,
    trigger_words: str,
    options: CaptionOptions | None,
    without: Sequence[Path] = (),
) -> Dataset:
    extension = _checked_extension(caption_extension)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; set it to 1 or more.")
    files, unread = files_in(folder, kind.read, without), files_in(folder, kind.unread, without)
    if not files:
        kinds = ", ".join(sorted(kind.read))
        there = f" that can be read (there is {listed(folder, unread)})" if unread else ""
        raise ValueError(
            f"The folder {folder.name!r} holds no {kind.noun}s{there}; put {kind.noun}s ({kinds}) into it."
        )
    missing = [file for file in files if not caption_file(file, extension).is_file()]
    if missing:
        raise ValueError(_missing_captions(folder, files, missing, extension, kind.noun))
    options = options or CaptionOptions()
    texts = [_read_caption(file, extension) for file in files]
    forms: dict[str, CaptionForms] = {}
    for file, text in zip(files, texts, strict=True):
        caption_name = name_below(folder, caption_file(file, extension))
        forms[name_below(folder, file)] = caption_forms(text, options, trigger_words, caption_name)
    entries = (
        replace(make(file, of.texts[0], name), forms=of) for file, (name, of) in zip(files, forms.items(), strict=True)
    )
    left_out = f"Left out, being of kinds that are not read: {listed(folder, unread)}; save them as {kind.format}."
    return Dataset(tuple(entries), (*[left_out] * bool(unread), *form_notes(options, folder.name, texts, forms)))


def _checked_extension(extension: str) -> str:
    normal = "." + extension.strip().lstrip(".")
    if not re.fullmatch(r"\.[\w.-]+", normal) or normal.lower() in EXTENSIONS | VIDEO_EXTENSIONS:
        raise ValueError(f"caption_extension is {extension!r}; set it to how caption files end, such as .txt.")
    return normal


def _read_caption(picture: Path, extension: str) -> str:
    file = caption_file(picture, extension)
    try:
        return file.read_text(encoding="utf-8-sig")
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
        f"{listed(folder, missing)}; add one beside each, {example} (an empty file is an empty "
        f"caption), or take the {noun} out of the folder."
    )
