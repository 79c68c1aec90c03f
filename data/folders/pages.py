"""Pages of a folder's files with their captions, for review before training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .captions import caption_file, checked_extension, read_caption
from .dataset import FileKind
from .files import files_in, has_ending, list_files, relative_name

PER_PAGE = 24
MOST_CAPTION = 2000  # characters of a caption that are shown


@dataclass(frozen=True)
class PageEntry:
    """One file on a page.

    path: the file.
    name: its path below the folder.
    caption: its caption as the file has it, cut if it is very long; None if there is none or it can't be read.
    problem: reason why the caption can't be read; empty if it can, or if there is no caption file.
    """

    path: Path
    name: str
    caption: str | None
    problem: str = ""


@dataclass(frozen=True)
class FolderPage:
    """One page of the files of a folder.

    count: files in the folder.
    missing: those of them without a caption file.
    unread: names of files of kinds that are not read, as text; empty without any.
    page, pages: index of this page, and number of pages.
    entries: files on this page.
    """

    count: int
    missing: int
    unread: str
    page: int
    pages: int
    entries: tuple[PageEntry, ...]


def read_page(
    folder: Path,
    kind: FileKind,
    caption_extension: str,
    page: int,
    *,
    excluded: Sequence[Path] = (),
    missing_only: bool = False,
    may_read: Callable[[Path], bool],
) -> FolderPage:
    """Read a page of the files that the scan of the folder lists, in its order; the last page if `page` is beyond it.

    Captions are read for this page only.

    excluded: companion folders, which are left out.
    missing_only: list only files without a caption file.
    may_read: predicate for files that may be read, as links may lead anywhere.
    Raises ValueError for an invalid caption extension.
    """
    extension = checked_extension(caption_extension)
    all_files = files_in(folder, kind.read | kind.unread, excluded)
    files = [file for file in all_files if has_ending(file.name, kind.read)]
    unread = [file for file in all_files if not has_ending(file.name, kind.read)]
    missing = [file for file in files if not caption_file(file, extension).is_file()]
    listed = missing if missing_only else files
    pages = max(1, -(-len(listed) // PER_PAGE))
    page = min(max(page, 0), pages - 1)
    entries = (_entry(folder, file, extension, may_read) for file in listed[page * PER_PAGE : (page + 1) * PER_PAGE])
    return FolderPage(
        len(files), len(missing), list_files(folder, unread) if unread else "", page, pages, tuple(entries)
    )


def _entry(folder: Path, file: Path, extension: str, may_read: Callable[[Path], bool]) -> PageEntry:
    name, caption = relative_name(folder, file), caption_file(file, extension)
    if not caption.is_file():
        return PageEntry(file, name, None)
    if not may_read(caption):
        return PageEntry(
            file, name, None, f"The caption file {caption.name!r} is a link to a place outside the allowed folders."
        )
    try:
        text = read_caption(file, extension).strip()
    except ValueError as error:
        return PageEntry(file, name, None, str(error))
    return PageEntry(file, name, text if len(text) <= MOST_CAPTION else f"{text[:MOST_CAPTION]}…")
