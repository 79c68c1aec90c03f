"""Data set on disk: folders of images and of videos, with a caption to each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ...common.progress import Interrupted
from ..captions.notes import variant_notes
from ..captions.options import CaptionOptions
from ..captions.variants import CaptionVariants
from ..layouts.archives import Unpacked
from ..layouts.files import file_state, has_ending, image_files, list_files, relative_name, same_folder
from ..layouts.kinds import IMAGES, VIDEOS, FileKind
from ..layouts.layout import AUTO, FolderLayout, LayoutRequest, read_layout
from ..layouts.pairing import match_controls, match_masks, separate_folders
from ..layouts.subsets import Example, Subset
from ..media.clip_windows import Extraction, parse_target_frames
from ..media.images import HEIF_EXTENSIONS
from .captions import check_captions_exist, make_variants, read_captions
from .class_words import check_class_captions, read_class_word
from .exclusions import without
from .options import UNCHANGED, FolderOptions, folder_notes


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

    path: video file.
    caption: its caption, the first of `variants`.
    repeats: showings per epoch.
    name: name in messages, its path below the chosen folder.
    extraction: method by which clips are taken out of it.
    mask: mask image of all frames.
    options: options of its folder.
    variants: caption variants; None for a single caption.
    folder: index of its folder among the chained ones.
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
class Places:
    """Places that a folder's files may come from.

    layout: one of LAYOUTS, see `read_layout`.
    may_read: predicate for places outside of the folder that a dataset file names.
    open_archive: gives the files of an archive in the folder.
    """

    layout: str = AUTO
    may_read: Callable[[Path], bool] = lambda path: False
    open_archive: Callable[[Path], Unpacked | None] = lambda path: None

    def request(
        self,
        folder: Path,
        kind: FileKind,
        extension: str,
        excluded: Sequence[Path] = (),
        interrupted: Interrupted = lambda: None,
    ) -> LayoutRequest:
        """Make the request that `read_layout` answers."""
        return LayoutRequest(
            folder,
            kind,
            self.layout,
            extension,
            tuple(excluded),
            self.may_read,
            self.open_archive,
            interrupted,
        )


@dataclass(frozen=True)
class _Options:
    """Options of a folder node.

    repeats: showings of each file per epoch.
    trigger_words: prepended to each caption.
    treatment: options of the files.
    captions: options of their captions.
    extraction: method for clips; None for images.
    """

    repeats: int
    trigger_words: str
    treatment: FolderOptions
    captions: CaptionOptions
    extraction: Extraction | None = None

    def subset_options(self, subset: Subset) -> "_Options":
        """Combine them with what the layout says of a subset, which wins; repeats multiply.

        Regularisation of a layout takes no trigger words, no class word and no preservation, and shows all its files.
        """
        treatment = dict(subset.treatment)
        words = self.trigger_words
        if treatment.get("regularisation") and not self.treatment.regularisation:
            treatment |= {"class_word": "", "blank_prompt_preservation": False, "sample_ratio": 1.0}
            words = ""
        extraction = self.extraction
        if extraction is not None and subset.extraction:
            changes = dict(subset.extraction)
            if "target_frames" in changes:
                changes["target_frames"] = parse_target_frames(changes["target_frames"])[0]
            extraction = replace(extraction, **changes)
        return _Options(
            self.repeats * subset.repeats,
            words,
            replace(self.treatment, **treatment),
            replace(self.captions, **subset.captions),
            extraction,
        )


def scan_images(  # noqa: PLR0913
    folder: Path,
    *,
    caption_extension: str = ".txt",
    repeats: int = 1,
    trigger_words: str = "",
    control_folder: Path | None = None,
    mask_folder: Path | None = None,
    options: FolderOptions = UNCHANGED,
    captions: CaptionOptions | None = None,
    places: Places | None = None,
    leave_out: str = "",
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
    places: layout of the folder, and the folders that it may read besides.
    leave_out: images that are not read, by their name below the folder, one in a line.
    interrupted: called between captions; raises to stop.

    An empty caption file is an empty caption. Files that are not read are listed in notes.
    Raises ValueError if captions are missing, naming up to five images, and for contradicting options.
    """
    excluded = separate_folders(folder, control_folder=control_folder, mask_folder=mask_folder)
    node_options = _Options(repeats, trigger_words, options, captions or CaptionOptions())
    request = (places or Places()).request(folder, IMAGES, caption_extension, excluded, interrupted)
    dataset = _scan(request, node_options, mask_folder, control_folder is not None, interrupted, leave_out)
    if control_folder is not None:
        controls, notes = match_controls([entry.name for entry in dataset.entries], control_folder)
        pictures = [entry for entry in dataset.entries if isinstance(entry, ImageEntry)]
        with_controls = (replace(picture, controls=paths) for picture, paths in zip(pictures, controls, strict=True))
        dataset = replace(dataset, entries=tuple(with_controls), notes=dataset.notes + notes)
    return _described(dataset, folder, node_options, mask_folder is not None)


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
    places: Places | None = None,
    interrupted: Interrupted = lambda: None,
) -> Dataset:
    """Read a folder of video files as `scan_images` reads one of images. A mask is an image, applied to all frames.

    extraction: method by which clips are taken out of the videos.
    """
    node_options = _Options(repeats, trigger_words, options, captions or CaptionOptions(), extraction)
    excluded = () if mask_folder is None or same_folder(folder, mask_folder) else (mask_folder,)
    request = (places or Places()).request(folder, VIDEOS, caption_extension, excluded, interrupted)
    dataset = _scan(request, node_options, mask_folder, False, interrupted)
    return _described(dataset, folder, node_options, mask_folder is not None)


def _described(dataset: Dataset, folder: Path, node_options: _Options, masked: bool) -> Dataset:
    """Add notes on the options of the node."""
    masked = masked or node_options.treatment.alpha_mask
    notes = folder_notes(folder.name, node_options.treatment, node_options.trigger_words, masked)
    return replace(dataset, notes=(*dataset.notes, *notes))


def folder_fingerprint(
    folder: Path,
    caption_extension: str,
    kind: FileKind = IMAGES,
    control_folder: Path | None = None,
    mask_folder: Path | None = None,
    places: Places | None = None,
    interrupted: Interrupted = lambda: None,
) -> str:
    """Fingerprint a folder by the state of its files.

    It changes when a file of this kind, a caption, a list of captions, a dataset file, an archive, a control image or a
    mask is added, removed, renamed or written to. Files that are not read count by name, because notes list them.
    interrupted: called between files; raises to stop.
    Raises ValueError as `read_layout` does.
    """
    companions = (other for other in (control_folder, mask_folder) if other is not None)
    excluded = tuple(other for other in companions if not same_folder(folder, other))
    request = (places or Places()).request(folder, kind, caption_extension, excluded, interrupted)
    layout = read_layout(request)
    entries: list[tuple[str, str]] = []
    for example in (example for subset in layout.subsets for example in subset.examples):
        interrupted()
        caption = example.caption
        files = [example.path, *[example.mask] * (example.mask is not None), *example.controls]
        files += [caption.file] if caption is not None and caption.file is not None else []
        entries += [(f"{example.name} {file.name}", file_state(file)) for file in files if file is not None]
        entries += [(example.name, "without a caption")] * (caption is None)
    entries += [(file.name, file_state(file)) for file in layout.sources]
    entries += [(str(file), "unread") for file in (*layout.unread, *layout.rest)]
    for role, other in (("control", control_folder), ("mask", mask_folder)):
        if other is not None:
            entries += [
                (f"{role} {relative_name(other, file)}", file_state(file)) for file in image_files(other, interrupted)
            ]
    return fingerprint(entries)


def _with_class(
    dataset: Dataset, folder: Path, options: FolderOptions, trigger_words: str, interrupted: Interrupted
) -> Dataset:
    """Add class captions if class_word is set, or empty ones for blank prompt preservation."""
    if options.blank_prompt_preservation:
        blank = (_with_blank(e) if e.options.blank_prompt_preservation else e for e in dataset.entries)
        return replace(dataset, entries=tuple(blank))
    if not options.class_word.strip():
        return dataset
    rule = read_class_word(options.class_word, trigger_words)
    entries: list[ImageEntry | VideoEntry] = []
    unmatched: list[str] = []
    for entry in dataset.entries:
        interrupted()
        if not entry.options.class_word.strip():  # regularisation of the layout
            entries.append(entry)
            continue
        variants = entry.variants or CaptionVariants((entry.caption,))
        class_texts = tuple(map(rule.caption, variants.texts))
        unmatched += [] if any(class_texts) else [entry.name]
        entries.append(
            replace(entry, variants=replace(variants, class_texts=class_texts)) if any(class_texts) else entry
        )
    notes = check_class_captions(rule, folder.name, len(entries) - len(unmatched), unmatched)
    return replace(dataset, entries=tuple(entries), notes=dataset.notes + notes)


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
    return replace(dataset, entries=tuple(entries), notes=dataset.notes + notes)


def _scan(
    request: LayoutRequest,
    node_options: _Options,
    mask_folder: Path | None,
    has_controls: bool,
    interrupted: Interrupted,
    leave_out: str = "",
) -> Dataset:
    """List the entries of a folder with their captions, class captions and masks, and the options of each part."""
    folder, kind = request.folder, request.kind
    if node_options.repeats < 1:
        raise ValueError(f"repeats is {node_options.repeats}; set it to 1 or more.")
    layout = read_layout(request)
    if not layout.subsets:
        raise _no_files(request, layout)
    layout = without(layout, leave_out, folder.name, kind.noun)
    examples = [example for subset in layout.subsets for example in subset.examples]
    check_captions_exist(folder, examples, request.extension, kind.noun)
    texts = read_captions(layout.subsets, interrupted)
    parts = [
        _entries(subset, node_options.subset_options(subset), texts, mask_folder, has_controls, interrupted)
        for subset in layout.subsets
    ]
    dataset = parts[0]
    for part in parts[1:]:
        dataset += part
    notes = list(layout.notes)
    if layout.unread:
        heic = ", or install pillow-heif" if any(has_ending(f.name, HEIF_EXTENSIONS) for f in layout.unread) else ""
        notes.append(
            f"Left out, because these file types can't be read: {_names(folder, layout.unread)}; save them as "
            f"{kind.format}{heic}."
        )
    dataset = replace(dataset, notes=(*notes, *dataset.notes))
    dataset = _with_class(dataset, folder, node_options.treatment, node_options.trigger_words, interrupted)
    return _with_masks(dataset, mask_folder, node_options.treatment)


def _no_files(request: LayoutRequest, layout: FolderLayout) -> ValueError:
    kind, kinds = request.kind, ", ".join(sorted(request.kind.read))
    hint = f" that can be read (there is {_names(request.folder, layout.unread)})" if layout.unread else ""
    return ValueError(
        f"The folder {request.folder.name!r} holds no {kind.noun}s{hint}; put {kind.noun}s ({kinds}) into it."
    )


def _names(folder: Path, files: Sequence[Path]) -> str:
    """Name up to five files; those of an archive by their own name."""
    inside = all(file.is_relative_to(folder) for file in files)
    return list_files(folder, files) if inside else list_files(Path(), [Path(file.name) for file in files])


def _entries(
    subset: Subset,
    options: _Options,
    texts: Mapping[Path, str],
    mask_folder: Path | None,
    has_controls: bool,
    interrupted: Interrupted,
) -> Dataset:
    """Make the entries of a subset, with notes on its captions and its options as plain values."""
    variants = make_variants(subset, texts, options.captions, options.trigger_words, interrupted)
    entries = [_entry(example, variants[example.name], options) for example in subset.examples]
    if mask_folder is not None or options.treatment.alpha_mask:  # the user's choice comes first
        entries = [replace(entry, mask=None) for entry in entries]
    masked = mask_folder is not None or any(entry.mask is not None for entry in entries)
    controlled = has_controls or any(isinstance(entry, ImageEntry) and entry.controls for entry in entries)
    extras: dict[str, Any] = {"controls": controlled, "masks": masked}
    if options.extraction is not None:
        extras = {"masks": masked, "extraction": asdict(options.extraction)}
    facts = {"files": len(entries), "repeats": options.repeats, "trigger_words": options.trigger_words, **extras}
    facts |= {"treatment": asdict(options.treatment), "captions": asdict(options.captions)}
    read = [texts[example.path] for example in subset.examples]
    notes = variant_notes(options.captions, subset.name, read, variants)
    return Dataset(tuple(entries), notes, (facts,))


def _entry(example: Example, variants: CaptionVariants, options: _Options) -> ImageEntry | VideoEntry:
    text = variants.texts[0]
    if options.extraction is None:
        return ImageEntry(
            *(example.path, text, options.repeats, example.name, example.controls, example.mask),
            options=options.treatment,
            variants=variants,
        )
    return VideoEntry(
        *(example.path, text, options.repeats, example.name, options.extraction, example.mask),
        options=options.treatment,
        variants=variants,
    )
