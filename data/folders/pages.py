"""Pages of a folder's files with their captions, for review before training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..layouts.files import list_files
from ..layouts.layout import LayoutRequest, read_layout
from ..layouts.subsets import Example, Subset

PER_PAGE = 24
MOST_CAPTION = 2000  # characters of a caption that are shown


@dataclass(frozen=True)
class PageEntry:
    """One file on a page.

    path: the file.
    name: its path below the folder.
    caption: its caption as the file has it, cut if it is very long; None if there is none or it can't be read.
    problem: reason why the caption can't be read; empty if it can, or if there is no caption file.
    masked: whether a mask is beside it.
    """

    path: Path
    name: str
    caption: str | None
    problem: str = ""
    masked: bool = False


@dataclass(frozen=True)
class FolderPage:
    """One page of the files of a folder.

    count: files in the folder.
    missing: those of them without a caption file.
    unread: names of files of kinds that are not read, as text; empty without any.
    page: index of this page.
    pages: number of pages.
    entries: files on this page.
    notes: kind of the folder, and the files that are not read.
    waiting: files whose caption waits for review.
    """

    count: int
    missing: int
    unread: str
    page: int
    pages: int
    entries: tuple[PageEntry, ...]
    notes: tuple[str, ...] = ()
    waiting: int = 0


def read_page(
    request: LayoutRequest,
    page: int,
    *,
    missing_only: bool = False,
    may_read: Callable[[Path], bool],
    waits: Callable[[Path], bool] = lambda path: False,
) -> FolderPage:
    """Read a page of the files that the scan of the folder lists, in its order; the last page if `page` is beyond it.

    Captions are read for this page only.

    missing_only: list only files without a caption.
    may_read: predicate for files that may be read, as links may lead anywhere.
    waits: predicate for pictures whose caption waits for review.
    Raises ValueError as `read_layout` does.
    """
    layout = read_layout(request)
    examples = [(subset, example) for subset in layout.subsets for example in subset.examples]
    missing = [(subset, example) for subset, example in examples if example.caption is None]
    listed = missing if missing_only else examples
    pages = max(1, -(-len(listed) // PER_PAGE))
    page = min(max(page, 0), pages - 1)
    page_examples = listed[page * PER_PAGE : (page + 1) * PER_PAGE]
    entries = tuple(
        replace(_entry(subset, example, may_read), masked=example.mask is not None) for subset, example in page_examples
    )
    unread = list_files(request.folder, [file for file in layout.unread if file.is_relative_to(request.folder)])
    waiting = sum(waits(example.path) for _, example in examples)
    return FolderPage(len(examples), len(missing), unread, page, pages, entries, layout.notes, waiting)


def _entry(subset: Subset, example: Example, may_read: Callable[[Path], bool]) -> PageEntry:
    caption = example.caption
    if caption is None:
        return PageEntry(example.path, example.name, None)
    if caption.file is not None and not may_read(caption.file):
        problem = f"The caption file {caption.file.name!r} is a link to a place outside the allowed folders."
        return PageEntry(example.path, example.name, None, problem)
    try:
        text = subset.caption_text(caption.read()).strip()
    except ValueError as error:
        return PageEntry(example.path, example.name, None, str(error))
    cut_caption = text if len(text) <= MOST_CAPTION else f"{text[:MOST_CAPTION]}…"
    return PageEntry(example.path, example.name, cut_caption)
