"""Blocks of a dataset file as subsets: which field means what here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...common.progress import Interrupted
from ...common.text import quantity, quoted, shortlist, within
from ...common.untrusted.budgets import DATASET_PATH, FOLDER, check_size
from .caption_lists import CaptionRow, ListedCaptions, ListReader, match_lists
from .captions import CaptionFiles, CaptionSource, checked_extension
from .dataset_files import AI_TOOLKIT, KOHYA, DatasetBlock, DatasetFile, missing_place, resolve_place, unused_note
from .files import all_files, has_ending, relative_name
from .folder_names import MOST_REPEATS
from .kinds import VIDEOS, FileKind
from .pairing import optional_controls, optional_masks
from .subsets import Example, Subset

# The field of FolderOptions or CaptionOptions that a field of another trainer sets.
_SWITCHES = {
    "is_reg": "regularisation",
    "alpha_mask": "alpha_mask",
    "shuffle_caption": "shuffle_tags",
    "shuffle_tokens": "shuffle_tags",
    "enable_wildcard": "wildcards",
}
_NUMBERS = {
    "keep_tokens": "keep_tokens",
    "caption_dropout_rate": "caption_dropout",
    "caption_tag_dropout_rate": "tag_dropout",
    "token_dropout_rate": "tag_dropout",
    "loss_multiplier": "loss_weight",
    "mask_min_value": "unmasked_weight",
    "frame_stride": "frame_stride",
    "frame_sample": "frame_sample",
    "max_frames": "max_frames",
}
_TREATMENT = frozenset({"regularisation", "alpha_mask", "flip", "loss_weight", "unmasked_weight"})
_EXTRACTION = frozenset({"frame_stride", "frame_sample", "max_frames", "target_frames", "method"})
_WHOLE = frozenset({"keep_tokens", "frame_stride", "frame_sample", "max_frames"})
_LARGEST = 1e9  # number in a dataset file
_PLACES = ("image_dir", "image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file", "folder_path")


@dataclass(frozen=True)
class BlockRequest:
    """Request to read the blocks of a dataset file.

    file: the dataset file.
    root: the chosen folder, below which examples are named.
    kind: kind of files that are read; blocks of the other kind are left out, with a note.
    extension: of captions where a block names none.
    may_read: predicate for places outside of the file's folder.
    interrupted: called between files; raises to stop.
    """

    file: DatasetFile
    root: Path
    kind: FileKind
    extension: str
    may_read: Callable[[Path], bool]
    interrupted: Interrupted = lambda: None


class _Reader:
    """Reader of blocks. Several may name the same folder or list, which is read once."""

    def __init__(self, request: BlockRequest) -> None:
        self.request = request
        self.lists = ListReader(request.interrupted)
        self.examples = 0
        self._folders: dict[Path, list[Path]] = {}

    def files(self, folder: Path) -> list[Path]:
        """List the files of a folder and its subfolders. Raises OverBudget past that of one folder for all together."""
        if folder not in self._folders:
            self._folders[folder] = all_files(folder, (), self.request.interrupted)
            check_size(FOLDER, f"The folders of {self.name}", items=sum(map(len, self._folders.values())))
        return self._folders[folder]

    def count(self, examples: int) -> None:
        """Count the examples of a block. Raises OverBudget past those of a folder for all blocks together."""
        self.examples += examples
        check_size(FOLDER, f"The folders of {self.name}", items=self.examples)

    @property
    def name(self) -> str:
        return repr(self.request.file.path.name)


@dataclass
class _Words:
    """Fields of a block, with a record of those that were understood.

    block: the block; `narrow` leaves one of several values in it.
    used: meaning of each understood field in words, by its name.
    """

    block: DatasetBlock
    used: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, meaning: str) -> Any:
        """Return the value of a field, None without it, and note that it is used."""
        value = self.block.values.get(name)
        if value not in (None, ""):
            self.used[name] = meaning
        return value if value != "" else None

    def narrow(self, name: str, value: Any) -> None:
        """Read only this one of a field's several values from now on."""
        self.block = DatasetBlock(self.block.trainer, {**self.block.values, name: value})


def read_blocks(request: BlockRequest) -> tuple[tuple[Subset, ...], tuple[str, ...], tuple[Path, ...]]:
    """Make the subsets of a dataset file; returns them, notes, and the files that they depend on.

    Raises ValueError for a place that can't be read, and for values that mean nothing here.
    """
    file = request.file
    kind = request.kind
    reader = _Reader(request)
    subsets = []
    used = dict[str, str]()
    unused = dict[str, None]()
    rest = 0
    unrepeated: list[str] = []
    sources: list[Path] = [file.path]
    for block in file.blocks:
        request.interrupted()
        words = _Words(block)
        if _repeats(reader, words) < 1:
            unrepeated.append(next(filter(None, map(block.text, _PLACES)), "metadata_file"))
            continue
        subset, files = _subset(reader, words)
        sources += files
        if subset is None:
            rest += 1
            continue
        subsets.append(subset)
        used |= words.used
        unused |= dict.fromkeys(name for name in block.values if name not in words.used)
    notes = [unused_note(file, used, [name for name in unused if name not in used])] if subsets else []
    if rest:
        place, nothing = f"of {file.path.name!r}", f"no {kind.noun}s"
        count = quantity(rest, f"folder {place} holds {nothing} and is", f"folders {place} hold {nothing} and are")
        notes.append(f"{count} left out; chain {kind.node} for {'it' if rest == 1 else 'them'}.")
    if unrepeated:
        notes.append(f"Left out, because num_repeats is 0 in {file.path.name!r}: {shortlist(unrepeated)}.")
    return tuple(subsets), tuple(notes), tuple(sources)


def has_place(file: DatasetFile, block: DatasetBlock, may_read: Callable[[Path], bool]) -> bool:
    """Return True if the folder or the list of a block is here."""
    names = _PLACES + ("dataset_path", "metadata_file")
    places = (resolve_place(block.text(name), file.path.parent, may_read) for name in names if block.text(name))
    return any(place is not None for place in places)


def _subset(reader: _Reader, words: _Words) -> tuple[Subset | None, list[Path]]:
    file = reader.request.file
    kind = reader.request.kind
    may_read = reader.request.may_read
    block, base = words.block, file.path.parent

    def place(name: str, meaning: str) -> Path | None:
        text = words.take(name, meaning)
        if text is None:
            return None
        path = resolve_place(text, base, may_read) if isinstance(text, str) else None
        if path is None:
            raise missing_place(file, name, str(text))
        return path

    if any(name.startswith("image_" if kind is VIDEOS else "video_") for name in block.values if name in _PLACES[1:5]):
        return None, []
    lists = [place(name, "captions") for name in ("image_jsonl_file", "video_jsonl_file", "metadata_file")]
    folder = next(
        (
            location
            for name in (*_PLACES[:3], *_PLACES[5:], "dataset_path")
            if (location := place(name, "folder")) is not None
        ),
        None,
    )
    own_extension = words.take("caption_extension", "caption_extension") or words.take(
        "caption_ext", "caption_extension"
    )
    extension = checked_extension(str(own_extension)) if own_extension else reader.request.extension
    everything, files = _files(reader, folder, block.trainer == AI_TOOLKIT)
    captions = CaptionFiles(everything, extension)
    default = str(words.take("class_tokens", "caption where there is none") or "")
    default = default or str(words.take("default_caption", "caption where there is none") or "")
    listed = ListedCaptions()
    used_lists = [entry for entry in lists if entry is not None]
    if used_lists:
        files, listed = _listed(reader, used_lists, files)
    if not files and block.trainer == AI_TOOLKIT:
        return None, [*([folder] if folder else []), *used_lists]
    controls = [location for name in ("control_directory", "control_path") for location in _places(place, words, name)]
    # In the training of a LoRA, sd-scripts reads this folder for masked loss.
    masks = [location for name in ("mask_path", "conditioning_data_dir") for location in _places(place, words, name)]
    if words.take("invert_mask", "masks"):
        raise ValueError(
            f"{file.path.name!r} has invert_mask on, and masks are never inverted here; invert the pictures of the "
            "masks, and take invert_mask out."
        )
    top = folder or base
    reader.count(len(files))
    examples = _examples(reader, top, files, captions, listed, default)
    examples = _with_companions(reader, examples, top, masks, controls, listed)
    subset = Subset(
        top.name,
        examples,
        repeats=_repeats(reader, words),
        trigger=str(words.take("trigger_word", "trigger word") or ""),
        prefix=str(words.take("caption_prefix", "before captions") or ""),
        suffix=str(words.take("caption_suffix", "after captions") or ""),
        **_options(words, kind),
    )
    return subset, [*used_lists, *(e.caption.file for e in examples if e.caption is not None and e.caption.file)]


def _repeats(reader: _Reader, words: _Words) -> int:
    """Take the repeats of a block; with 0, sd-scripts leaves it out (library/train_util.py, DreamBoothDataset)."""
    repeats = _number(words, "num_repeats", "repeats")
    if repeats is None:
        return 1
    within(f"num_repeats in {reader.name}", repeats, 0, MOST_REPEATS)
    return int(repeats)


def _places(place: Callable[[str, str], Path | None], words: _Words, name: str) -> list[Path]:
    """Resolve the one or several folders of a field."""
    value = words.block.values.get(name)
    if not isinstance(value, list):
        single = place(name, "mask_folder" if name in ("mask_path", "conditioning_data_dir") else "control_folder")
        return [single] if single is not None else []
    inner = []
    check_size(DATASET_PATH, f"{name} in a dataset file", items=len(value))
    for text in value:
        words.narrow(name, text)
        inner += _places(place, words, name)
    return inner


def _number(words: _Words, name: str, meaning: str) -> int | float | None:
    """Take a field that is a number; None without it. Raises ValueError for a vast one, and for NaN."""
    value = words.block.values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    words.take(name, meaning)
    if not abs(value) <= _LARGEST:
        raise ValueError(f"A dataset file has {quoted(value)} as {name}; write a number that a trainer knows.")
    return value


def _files(reader: _Reader, folder: Path | None, recursive: bool) -> tuple[list[Path], list[Path]]:
    """List all files of a block's folder, and those of the kind. recursive: with its subfolders."""
    if folder is None or not folder.is_dir():
        return [], []
    everything = reader.files(folder)
    if not recursive:
        everything = [file for file in everything if file.parent == folder]
    return everything, [file for file in everything if has_ending(file.name, reader.request.kind.read)]


def _listed(reader: _Reader, lists: Sequence[Path], files: Sequence[Path]) -> tuple[list[Path], ListedCaptions]:
    """Read the captions of lists; without a folder of its own, a block has the files that the lists name."""
    request = reader.request
    read = [reader.lists.read(path) for path in lists]
    if not files:
        pictures = []
        for caption_list in read:
            for row in caption_list.rows:
                request.interrupted()
                picture = resolve_place(row.file, caption_list.path.parent, request.may_read)
                if picture is None or not picture.is_file():
                    raise missing_place(request.file, f"a file of {caption_list.path.name!r}", row.file)
                pictures.append(picture)
        files = list(dict.fromkeys(pictures))
        read = [_renamed(caption_list, pictures) for caption_list in read] if len(read) == 1 else read
    return list(files), match_lists(read, files, request.interrupted)


def _renamed(caption_list: Any, files: Sequence[Path]) -> Any:
    """Put the files that were found in place of the paths that a list has."""
    rows = tuple(
        CaptionRow(str(file), row.text, row.controls) for row, file in zip(caption_list.rows, files, strict=True)
    )
    return type(caption_list)(caption_list.path, rows, caption_list.text, caption_list.unused)


def _examples(
    reader: _Reader,
    top: Path,
    files: Iterable[Path],
    captions: CaptionFiles,
    listed: ListedCaptions,
    default: str,
) -> tuple[Example, ...]:
    root, fallback = reader.request.root, CaptionSource(text=default) if default else None
    examples = []
    for file in files:
        reader.request.interrupted()
        caption = listed.texts.get(file) or captions.find(file) or fallback
        examples.append(Example(file, _name(root, top, file), caption))
    return tuple(examples)


def _name(root: Path, top: Path, file: Path) -> str:
    """Name a file in messages: below the chosen folder, or else with its own."""
    for base in (root, top.parent):
        if file.is_relative_to(base):
            return relative_name(base, file)
    return f"{file.parent.name}/{file.name}"


def _with_companions(
    reader: _Reader,
    examples: tuple[Example, ...],
    top: Path,
    masks: Sequence[Path],
    controls: Sequence[Path],
    listed: ListedCaptions,
) -> tuple[Example, ...]:
    """Add masks and control images: a picture of several control folders takes one of each."""
    file = reader.request.file
    interrupted = reader.request.interrupted
    names = [relative_name(top, e.path) if e.path.is_relative_to(top) else e.path.name for e in examples]
    found_masks = [optional_masks(names, folder, interrupted) for folder in masks]
    found_controls = [optional_controls(names, folder, interrupted) for folder in controls]
    result = []
    for index, example in enumerate(examples):
        mask = next((companions[index] for companions in found_masks if companions[index] is not None), None)
        control_paths = tuple(path for companions in found_controls for path in companions[index])
        for text in listed.controls.get(example.path, ()):
            interrupted()
            place = resolve_place(text, file.path.parent, reader.request.may_read)
            if place is None or not place.is_file():
                raise missing_place(file, "control_path", text)
            control_paths += (place,)
        result.append(Example(example.path, example.name, example.caption, mask, control_paths))
    return tuple(result)


def _options(words: _Words, kind: FileKind) -> dict[str, Mapping[str, Any]]:
    """Map the options of a block to fields of FolderOptions, CaptionOptions and Extraction."""
    values = _switches(words) | _numbers(words)
    for name in ("flip_aug", "flip_x"):
        if words.take(name, "flip") is True:
            values["flip"] = "horizontal"
    if isinstance(separator := words.take("keep_tokens_separator", "keep_tokens_separator"), str):
        values["keep_tokens_separator"] = separator
    if kind is VIDEOS:
        values |= _extraction(words)
    return {
        "treatment": {name: value for name, value in values.items() if name in _TREATMENT},
        "captions": {name: value for name, value in values.items() if name not in _TREATMENT | _EXTRACTION},
        "extraction": {name: value for name, value in values.items() if name in _EXTRACTION and kind is VIDEOS},
    }


def _switches(words: _Words) -> dict[str, Any]:
    values = words.block.values
    switches = {
        option: words.take(name, option) for name, option in _SWITCHES.items() if isinstance(values.get(name), bool)
    }
    if values.get("enable_wildcard") is True and words.block.trainer == KOHYA:
        switches["caption_per_line"] = True  # sd-scripts has one switch for both
    return switches


def _numbers(words: _Words) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name, option in _NUMBERS.items():
        if (number := _number(words, name, option)) is not None:
            numbers[option] = int(number) if option in _WHOLE else float(number)
    return numbers


def _extraction(words: _Words) -> dict[str, Any]:
    """Return the options by which clips are taken out of videos, but for numbers."""
    options = {}
    frames = words.take("target_frames", "target_frames")
    if isinstance(frames, list) and frames and all(isinstance(n, int) and n > 0 for n in frames):
        options["target_frames"] = ", ".join(map(str, frames))
    method = words.take("frame_extraction", "extraction")
    if isinstance(method, str):
        options["method"] = method
    return options
