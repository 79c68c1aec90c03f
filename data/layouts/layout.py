"""Layout of a folder: the trainer that it was made for, and the files that are read of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...common.progress import Interrupted
from ...common.text import cut, quantity
from .archives import Unpacked, is_archive
from .blocks import BlockRequest, has_place, read_blocks
from .caption_lists import CaptionList, ListedCaptions, ListReader, is_list, list_notes, match_lists
from .captions import CaptionFiles, CaptionSource, checked_extension, text_files
from .companions import Sorted, sort_companions
from .dataset_files import find_dataset_files
from .files import all_files, has_ending, relative_name, stem_of
from .folder_names import split_by_names
from .kinds import FileKind
from .subsets import Example, Pictures, Subset, own_captions

AUTO = "auto"
PLAIN = "plain"
FOLDER_NAMES = "kohya folders"
DATASET_FILE = "dataset file"
CAPTION_LIST = "captions file"
ARCHIVES = "archives"
LAYOUTS = (AUTO, PLAIN, FOLDER_NAMES, DATASET_FILE, CAPTION_LIST, ARCHIVES)
_MOST_NAMED = 20  # files that a note lists
# Files that systems and authors leave beside pictures, which nobody expects to be read.
_IGNORED = frozenset({"thumbs.db", "desktop.ini", "license", "readme"})


@dataclass(frozen=True)
class LayoutRequest:
    """Request to read the layout of a folder.

    folder: the chosen folder.
    kind: kind of files that are read.
    choice: one of LAYOUTS.
    extension: extension of captions.
    excluded: folders of masks and control images that the user chose; they are left out.
    may_read: predicate for places outside of the folder that a dataset file names.
    open_archive: gives an archive's files; None for one that isn't unpacked.
    interrupted: called between files; raises to stop.
    """

    folder: Path
    kind: FileKind
    choice: str = AUTO
    extension: str = ".txt"
    excluded: tuple[Path, ...] = ()
    may_read: Callable[[Path], bool] = lambda path: False
    open_archive: Callable[[Path], Unpacked | None] = lambda path: None
    interrupted: Interrupted = lambda: None


@dataclass(frozen=True)
class FolderLayout:
    """Result of reading the layout of a folder.

    subsets: parts that are read alike; those without files are left out.
    notes: kind of the folder, and the files that are not read.
    sources: files that this depends on, besides examples and their captions.
    unread: files of the kind in formats that are not read.
    rest: other files that are not read.
    """

    subsets: tuple[Subset, ...]
    notes: tuple[str, ...] = ()
    sources: tuple[Path, ...] = ()
    unread: tuple[Path, ...] = ()
    rest: tuple[Path, ...] = ()


def read_layout(request: LayoutRequest) -> FolderLayout:
    """Find out what a folder holds and how it is to be read.

    `auto` takes a folder of pictures with a caption beside each as such. It unpacks archives, follows a dataset file of
    kohya's scripts, musubi-tuner or ai-toolkit, takes captions that are missing from lists and from the names of
    folders, repeats from `10_name`, and masks and control images from the names that other trainers give them.
    Raises ValueError for a layout that isn't there, and as its readers do.
    """
    if request.choice not in LAYOUTS:
        raise ValueError(f"layout is {cut(request.choice)!r}; choose one of {', '.join(LAYOUTS)}.")
    request = replace(request, extension=checked_extension(request.extension))
    everything = all_files(request.folder, request.excluded, request.interrupted)
    archives = [file for file in everything if is_archive(file.name)] if request.choice in (AUTO, ARCHIVES) else []
    packed = [_read_archive(request, archive) for archive in archives]
    if request.choice == ARCHIVES:
        if not archives:
            raise _absent(request, "holds no archive (.zip, .tar, .tar.gz)")
        return _joined(packed)
    if request.choice in (AUTO, DATASET_FILE):
        layout = _by_dataset_file(request, everything)
        if layout is not None:
            return _joined([layout, *packed])
    in_archives = set(archives)
    return _joined([_read_folder(request, [f for f in everything if f not in in_archives]), *packed])


def _joined(layouts: Sequence[FolderLayout]) -> FolderLayout:
    return FolderLayout(
        tuple(subset for layout in layouts for subset in layout.subsets if subset.examples),
        tuple(note for layout in layouts for note in layout.notes),
        tuple(file for layout in layouts for file in layout.sources),
        tuple(file for layout in layouts for file in layout.unread),
        tuple(file for layout in layouts for file in layout.rest),
    )


def _absent(request: LayoutRequest, cause: str) -> ValueError:
    return ValueError(
        f"layout is {request.choice!r}, but the folder {request.folder.name!r} {cause}; set layout to auto."
    )


def _read_archive(request: LayoutRequest, archive: Path) -> FolderLayout:
    """Read an archive as a folder of its own."""
    unpacked = request.open_archive(archive)
    if unpacked is None:
        return FolderLayout((), (), (archive,))
    inner = read_layout(
        replace(request, folder=unpacked.folder, choice=AUTO, excluded=(), open_archive=lambda path: None)
    )
    name = relative_name(request.folder, archive)
    subsets = tuple(
        replace(subset, examples=tuple(replace(e, name=f"{name}/{e.name}") for e in subset.examples))
        for subset in inner.subsets
    )
    left_out = f" Left out of it: {unpacked.left_out}." if unpacked.left_out else ""
    count = quantity(sum(len(s.examples) for s in subsets), "file")
    note = f"The archive {name!r} was unpacked into the cache, {count}.{left_out}"
    return FolderLayout(subsets, (note, *inner.notes), (archive,), inner.unread, inner.rest)


def _by_dataset_file(request: LayoutRequest, everything: Sequence[Path]) -> FolderLayout | None:
    """Read the folder as a dataset file in it says; None without one."""
    files = find_dataset_files(request.folder, everything)
    forced = request.choice == DATASET_FILE
    if len(files) != 1:
        if forced:
            cause = f"holds {len(files)} of them" if files else "holds no dataset file (.toml, .yaml) that is known"
            raise _absent(request, cause)
        return None
    if not forced and not any(has_place(files[0], block, request.may_read) for block in files[0].blocks):
        return None  # of another machine; it is listed as not used
    block_request = BlockRequest(
        files[0], request.folder, request.kind, request.extension, request.may_read, request.interrupted
    )
    subsets, notes, sources = read_blocks(block_request)
    return FolderLayout(subsets, notes, sources) if subsets or forced else None


def _read_folder(request: LayoutRequest, everything: Sequence[Path]) -> FolderLayout:
    """Read a folder without dataset file and archives."""
    folder = request.folder
    kind = request.kind
    choice = request.choice
    captions = CaptionFiles(everything, request.extension)
    files = [file for file in everything if has_ending(file.name, kind.read)]
    beside = {}
    for file in files:
        request.interrupted()
        if (source := captions.find(file)) is not None:
            beside[file] = source
    if choice == PLAIN:
        subset = Subset(folder.name, Pictures(tuple(files)).examples(folder, beside.get))
        return _with_rest(request, everything, (subset,), (), [], Sorted(Pictures(())))
    lists, texts = _lists(request, everything, files, beside)
    sorted_files = sort_companions(
        folder,
        files,
        everything,
        lambda file: (captions.find(file) or texts.texts.get(file)) is not None,
        request.interrupted,
    )
    pictures = sorted_files.pictures
    subsets, note = split_by_names(folder, pictures, captions) if choice != CAPTION_LIST else ((), "")
    if choice == FOLDER_NAMES and not subsets:
        raise _absent(request, "holds no folder with a name such as 10_fox")
    if not subsets:
        subsets = (Subset(folder.name, pictures.examples(folder, own_captions(captions))),)
    subsets = tuple(_with_texts(subset, texts, choice == CAPTION_LIST) for subset in subsets)
    notes = (*list_notes(lists, texts), *filter(None, [note]), *_companion_notes(pictures))
    return _with_rest(request, everything, subsets, notes, lists, sorted_files)


def _lists(
    request: LayoutRequest, everything: Sequence[Path], files: Sequence[Path], beside: dict[Path, CaptionSource]
) -> tuple[list[CaptionList], ListedCaptions]:
    """Read the lists of captions in a folder, for files without a caption of their own; all files if it is chosen."""
    forced = request.choice == CAPTION_LIST
    needy = set(files) if forced else {file for file in files if file not in beside}
    caption_files = {source.file for source in beside.values()}
    paths = [file for file in everything if is_list(file.name) and file not in caption_files]
    if forced and not paths:
        raise _absent(request, "holds no list such as metadata.jsonl, metadata.csv or captions.txt")
    reader = ListReader(request.interrupted)
    lists = [reader.read(path) for path in paths] if needy else []
    listed = match_lists(lists, files, request.interrupted)
    names = {name for file in files for name in (file.name, file.stem)}
    texts = {file: source for file, source in listed.texts.items() if file in needy}
    missing = [row for row in listed.missing if row.replace("\\", "/").rsplit("/", 1)[-1] not in names]
    return lists, replace(listed, texts=texts, missing=missing)


def _with_texts(subset: Subset, listed: ListedCaptions, forced: bool) -> Subset:
    """Give the captions of lists to the files that have none of their own, or to all."""
    examples = []
    for example in subset.examples:
        text = listed.texts.get(example.path)
        has_file = example.caption is not None and example.caption.file is not None
        examples.append(replace(example, caption=text) if text is not None and (forced or not has_file) else example)
    return replace(subset, examples=tuple(examples))


def _companion_notes(pictures: Pictures) -> Iterator[str]:
    masks, total = list(pictures.masks.values()), len(pictures.files)
    controls = [file for files in pictures.controls.values() for file in files]
    for noun, count, files in (("masks", len(masks), masks), ("control pictures", len(pictures.controls), controls)):
        if files:
            yield (
                f"{quantity(count, f'of {total} has', f'of {total} have')} {noun} beside "
                f"{'it' if count == 1 else 'them'} by name, such as {files[0].name!r}; set layout to plain if these "
                "are to be learnt."
            )


def _with_rest(
    request: LayoutRequest,
    everything: Sequence[Path],
    subsets: tuple[Subset, ...],
    notes: tuple[str, ...],
    lists: Sequence[CaptionList],
    sorted_files: Sorted,
) -> FolderLayout:
    """Add the files of a folder that are not read, by name."""
    examples = [example for subset in subsets for example in subset.examples]
    captions = [(example.path, file) for example in examples if (file := _caption_file(example)) is not None]
    used = {example.path for example in examples} | {caption_list.path for caption_list in lists}
    used |= {file for _, file in captions}
    used |= {file for example in examples for file in (example.mask, *example.controls) if file is not None}
    loose = [file for file in everything if file not in used and not _is_ignored(file)]
    rest = _sort_rest(request, loose, {stem_of(str(example.path)) for example in examples}, sorted_files.spare)
    names = _namer(request.folder)
    usual = CaptionFiles((), request.extension).usual
    unusual = [file for picture, file in captions if not usual(picture, file)]
    messages = [
        (unusual, f"Captions are read from other files than {request.extension}: {{}}."),
        (rest.other, f"Not read here: {{}}; {request.kind.node} reads them."),
        (sorted_files.spare, "These masks and control pictures belong to no picture and are ignored: {}."),
        (rest.captions, f"These captions belong to no {request.kind.noun}: {{}}."),
        (rest.unknown, "Not used, as nothing here reads them: {}."),
    ]
    file_notes = tuple(text.format(names(files)) for files, text in messages if files)
    return FolderLayout(
        subsets,
        notes + file_notes,
        tuple(caption_list.path for caption_list in lists),
        tuple(rest.unread),
        (*rest.other, *rest.captions, *rest.unknown),
    )


def _caption_file(example: Example) -> Path | None:
    return None if example.caption is None else example.caption.file


@dataclass(frozen=True)
class _Rest:
    """Files of a folder that belong to no example.

    unread: of the kind, in a format that is not read.
    other: of the other kind: videos for pictures, pictures for videos.
    captions: of no picture.
    unknown: everything else.
    """

    unread: list[Path]
    other: list[Path]
    captions: list[Path]
    unknown: list[Path]


def _sort_rest(request: LayoutRequest, loose: Sequence[Path], stems: set[str], spare: Sequence[Path]) -> _Rest:
    """Sort the files that are not used. stems: of the examples. spare: masks and control images of none of them."""
    spare_files = set(spare)
    unread = [file for file in loose if has_ending(file.name, request.kind.unread)]
    other = [
        file
        for file in loose
        if has_ending(file.name, request.kind.other)
        and file not in spare_files
        and stem_of(str(file)) not in stems  # the mask or the first frame of a clip
    ]
    other_stems = {stem_of(str(file)) for file in (*unread, *other)}
    known_stems = stems | other_stems
    captions = [file for file in text_files(loose, request.extension) if stem_of(str(file)) not in known_stems]
    known_files = {*unread, *other, *captions, *spare_files}
    unknown = [file for file in loose if file not in known_files and stem_of(str(file)) not in other_stems]
    return _Rest(unread, other, captions, unknown)


def _is_ignored(file: Path) -> bool:
    return file.name.lower() in _IGNORED or file.stem.lower() in _IGNORED or file.suffix.lower() == ".md"


def _namer(folder: Path) -> Callable[[Sequence[Path]], str]:
    def names(files: Sequence[Path]) -> str:
        rest = len(files) - _MOST_NAMED
        listed = ", ".join(cut(relative_name(folder, file)) for file in files[:_MOST_NAMED])
        return listed + (f" and {rest} more" if rest > 0 else "")

    return names
