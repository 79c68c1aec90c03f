"""Data set on disk: folders of images and of videos, with a caption file next to each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ...common.progress import Interrupted
from ..captions.notes import variant_notes
from ..captions.options import CaptionOptions
from ..captions.variants import CaptionVariants
from ..media.clip_windows import Extraction
from ..media.images import EXTENSIONS, UNREAD_EXTENSIONS
from .captions import caption_file, check_captions_exist, checked_extension, scan_captions
from .class_words import check_class_captions, read_class_word
from .files import VIDEO_EXTENSIONS, file_state, files_in, image_files, list_files, relative_name
from .options import UNCHANGED, FolderOptions, folder_notes
from .pairing import match_controls, match_masks, separate_folders

UNREAD_VIDEO_EXTENSIONS = frozenset({".avi", ".wmv", ".flv", ".mpg", ".mpeg", ".m4v", ".ts", ".mts", ".ogv", ".3gp"})


@dataclass(frozen=True)
class ImageEntry:
    """One image file and its caption.

    path: image file.
    caption: its caption, the first of `variants`.
    repeats: showings per epoch.
    name: name in messages, its path below the chosen folder.
    controls: control images of an edit model, in their order.
    mask: image of the weights of its parts in the loss.
    options: options of its folder.
    variants: caption variants; None for a single caption.
    folder: index of its folder among the chained ones.
    """

    path: Path
    caption: str
    repeats: int
    name: str
    controls: tuple[Path, ...] = ()
    mask: Path | None = None
    options: FolderOptions = UNCHANGED
    variants: CaptionVariants | None = None
    folder: int = 0


@dataclass(frozen=True)
class VideoEntry:
    """One video file and its caption; it gives one or more clips.

    extraction: method by which clips are taken out of it.
    mask: mask image of all frames.

    The other fields are those of an ImageEntry.
    """

    path: Path
    caption: str
    repeats: int
    name: str
    extraction: Extraction
    mask: Path | None = None
    options: FolderOptions = UNCHANGED
    variants: CaptionVariants | None = None
    folder: int = 0


@dataclass(frozen=True)
class Dataset:
    """Image and video files in the order in which their folders were chained (TESSERA_DATASET).

    entries: the files.
    notes: hints to the user.
    folders: options of each folder, as plain values without the folder's name.
    """

    entries: tuple[ImageEntry | VideoEntry, ...]
    notes: tuple[str, ...] = ()
    folders: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)

    def __add__(self, other: "Dataset") -> "Dataset":
        first = max((entry.folder for entry in self.entries), default=-1) + 1
        entries = tuple(replace(entry, folder=first + entry.folder) for entry in other.entries)
        return Dataset(self.entries + entries, self.notes + other.notes, self.folders + other.folders)


@dataclass(frozen=True)
class FileKind:
    """Kind of files for which a folder is read.

    noun: one such file in messages.
    read: file extensions that are read.
    unread: known file extensions that are not.
    format: format in which the user should save unread files.
    """

    noun: str
    read: frozenset[str]
    unread: frozenset[str]
    format: str


IMAGES = FileKind("picture", EXTENSIONS, UNREAD_EXTENSIONS, "PNG or JPEG")
VIDEOS = FileKind("clip", VIDEO_EXTENSIONS, UNREAD_VIDEO_EXTENSIONS, "MP4 (H.264)")


def scan_images(
    folder: Path,
    *,
    caption_extension: str = ".txt",
    repeats: int = 1,
    trigger_words: str = "",
    control_folder: Path | None = None,
    mask_folder: Path | None = None,
    options: FolderOptions = UNCHANGED,
    captions: CaptionOptions | None = None,
    interrupted: Interrupted = lambda: None,
) -> Dataset:
    """Read a folder of images with its subfolders, sorted by name, without hidden files and folders.

    caption_extension: the caption of `a.jpg` is the text of `a.txt` (UTF-8).
    repeats: showings of each image per epoch.
    trigger_words: prepended to each caption, with a comma.
    control_folder: folder of control images, which may be within the folder, see `match_controls`.
    mask_folder: folder of masks, see `match_masks`.
    options: options of the folder.
    captions: caption options; with them a caption may have several variants.
    interrupted: called between captions; raises to stop.

    An empty caption file is an empty caption. Image files of formats that are not read are listed in a note.
    Raises ValueError if captions are missing, naming up to five images, and for contradicting options.
    """

    def make(path: Path, caption: str, name: str) -> ImageEntry:
        return ImageEntry(path, caption, repeats, name, options=options)

    excluded = separate_folders(folder, control_folder=control_folder, mask_folder=mask_folder)
    dataset = _scan(folder, IMAGES, make, caption_extension, repeats, trigger_words, captions, interrupted, excluded)
    dataset = _with_masks(_with_class(dataset, folder, options, trigger_words), mask_folder, options)
    if control_folder is not None:
        controls, notes = match_controls([entry.name for entry in dataset.entries], control_folder)
        pictures = [entry for entry in dataset.entries if isinstance(entry, ImageEntry)]
        with_controls = (replace(picture, controls=paths) for picture, paths in zip(pictures, controls, strict=True))
        dataset = Dataset(tuple(with_controls), dataset.notes + notes)
    extras = {"controls": control_folder is not None, "masks": mask_folder is not None}
    return _described(dataset, folder, repeats, trigger_words, options, captions, extras)


def scan_videos(
    folder: Path,
    extraction: Extraction,
    *,
    caption_extension: str = ".txt",
    repeats: int = 1,
    trigger_words: str = "",
    mask_folder: Path | None = None,
    options: FolderOptions = UNCHANGED,
    captions: CaptionOptions | None = None,
    interrupted: Interrupted = lambda: None,
) -> Dataset:
    """Read a folder of video files as `scan_images` reads one of images. A mask is an image, applied to all frames.

    extraction: method by which clips are taken out of the videos.
    """

    def make(path: Path, caption: str, name: str) -> VideoEntry:
        return VideoEntry(path, caption, repeats, name, extraction, options=options)

    dataset = _scan(folder, VIDEOS, make, caption_extension, repeats, trigger_words, captions, interrupted)
    extras = {"masks": mask_folder is not None, "extraction": asdict(extraction)}
    dataset = _with_masks(_with_class(dataset, folder, options, trigger_words), mask_folder, options)
    return _described(dataset, folder, repeats, trigger_words, options, captions, extras)


def _described(
    dataset: Dataset,
    folder: Path,
    repeats: int,
    trigger_words: str,
    options: FolderOptions,
    captions: CaptionOptions | None,
    extras: Mapping[str, Any],
) -> Dataset:
    """Add the folder's options as plain values, and notes on options without effect."""
    masked = extras["masks"] or options.alpha_mask
    notes = (*dataset.notes, *folder_notes(folder.name, options, trigger_words, masked))
    facts = {"files": len(dataset.entries), "repeats": repeats, "trigger_words": trigger_words, **extras}
    facts |= {"treatment": asdict(options), "captions": asdict(captions or CaptionOptions())}
    return replace(dataset, notes=notes, folders=(facts,))


def folder_fingerprint(
    folder: Path,
    caption_extension: str,
    kind: FileKind = IMAGES,
    control_folder: Path | None = None,
    mask_folder: Path | None = None,
) -> str:
    """Fingerprint a folder by the state of its files.

    It changes when a file of this kind, a caption, a control image or a mask is added, removed, renamed or written to.
    Files of unread formats count by name, because a note lists them.
    """
    extension = checked_extension(caption_extension)
    entries: list[tuple[str, str]] = []
    excluded = tuple(other for other in (control_folder, mask_folder) if other is not None)
    for picture in files_in(folder, kind.read, excluded):
        for file in (picture, caption_file(picture, extension)):
            entries.append((relative_name(folder, file), file_state(file)))
    entries += [(relative_name(folder, file), "unread") for file in files_in(folder, kind.unread, excluded)]
    for role, other in (("control", control_folder), ("mask", mask_folder)):
        if other is not None:
            entries += [(f"{role} {relative_name(other, file)}", file_state(file)) for file in image_files(other)]
    return fingerprint(entries)


def _with_class(dataset: Dataset, folder: Path, options: FolderOptions, trigger_words: str) -> Dataset:
    """Add class captions if class_word is set, or empty ones for blank prompt preservation."""
    if options.blank_prompt_preservation:
        return replace(dataset, entries=tuple(_with_blank(entry) for entry in dataset.entries))
    if not options.class_word.strip():
        return dataset
    rule = read_class_word(options.class_word, trigger_words)
    entries, unmatched = [], []
    for entry in dataset.entries:
        variants = entry.variants or CaptionVariants((entry.caption,))
        class_texts = tuple(map(rule.caption, variants.texts))
        unmatched += [] if any(class_texts) else [entry.name]
        entries.append(
            replace(entry, variants=replace(variants, class_texts=class_texts)) if any(class_texts) else entry
        )
    notes = check_class_captions(rule, folder.name, len(entries) - len(unmatched), unmatched)
    return Dataset(tuple(entries), dataset.notes + notes)


def _with_blank(entry: ImageEntry | VideoEntry) -> ImageEntry | VideoEntry:
    """Add the empty prompt as the class caption of each variant."""
    variants = entry.variants or CaptionVariants((entry.caption,))
    return replace(entry, variants=replace(variants, class_texts=("",) * len(variants.texts)))


def _with_masks(dataset: Dataset, mask_folder: Path | None, options: FolderOptions) -> Dataset:
    """Add the masks of the mask folder; raises ValueError if alpha_mask is on as well."""
    if mask_folder is None:
        return dataset
    if options.alpha_mask:
        raise ValueError(
            "mask_folder is set and alpha_mask is on, but a picture can have only one mask; use one of the two."
        )
    masks, notes = match_masks([entry.name for entry in dataset.entries], mask_folder)
    entries = (replace(entry, mask=mask) for entry, mask in zip(dataset.entries, masks, strict=True))
    return Dataset(tuple(entries), dataset.notes + notes)


def _scan(
    folder: Path,
    kind: FileKind,
    make: Callable[[Path, str, str], ImageEntry | VideoEntry],
    caption_extension: str,
    repeats: int,
    trigger_words: str,
    caption_options: CaptionOptions | None,
    interrupted: Interrupted,
    excluded: Sequence[Path] = (),
) -> Dataset:
    """List the entries of a folder with their captions."""
    extension = checked_extension(caption_extension)
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; set it to 1 or more.")
    files, unread = files_in(folder, kind.read, excluded), files_in(folder, kind.unread, excluded)
    if not files:
        kinds = ", ".join(sorted(kind.read))
        unread_hint = f" that can be read (there is {list_files(folder, unread)})" if unread else ""
        raise ValueError(
            f"The folder {folder.name!r} holds no {kind.noun}s{unread_hint}; put {kind.noun}s ({kinds}) into it."
        )
    caption_options = caption_options or CaptionOptions()
    check_captions_exist(folder, files, extension, kind.noun)
    texts, variants = scan_captions(folder, files, extension, caption_options, trigger_words, interrupted)
    entries = (
        replace(make(file, caption_variants.texts[0], name), variants=caption_variants)
        for file, (name, caption_variants) in zip(files, variants.items(), strict=True)
    )
    left_out = (
        f"Left out, because these file types can't be read: {list_files(folder, unread)}; save them as {kind.format}."
    )
    return Dataset(
        tuple(entries), (*[left_out] * bool(unread), *variant_notes(caption_options, folder.name, texts, variants))
    )
