"""Editing of captions: which can be written, a caption at a time, search and replace over a folder, and undo."""

import contextlib
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ...common.files import write_atomically
from ...common.text import cut
from ...common.untrusted.budgets import CAPTION_EDIT, CAPTION_FILE, check_size
from ..layouts.captions import CaptionSource, caption_file
from ..layouts.layout import FolderLayout
from ..layouts.subsets import Example, Subset

MOST_UNDO = 50  # edits that can be undone
UNDO_CHARACTERS = 64_000_000  # of their captions, in memory
_WRITERS = 4  # files written at once: each waits for the disk

MayWrite = Callable[[Path], bool]


class CaptionChanged(ValueError):
    """Raised if a caption is another than the one that was shown. The message is for the user."""


@dataclass(frozen=True)
class EditableCaption:
    """A caption that an editor shows.

    example: its picture or clip.
    file: the file that an edit writes; for a caption that can't be written, only a name.
    text: its text, without what the layout adds; None if there is none or it can't be read.
    locked: reason why it can't be written; empty if it can.
    """

    example: Example
    file: Path
    text: str | None
    locked: str = ""

    @property
    def has_file(self) -> bool:
        """Return True for a caption in a file of its own: not one from a list or the name of a folder."""
        return self.example.caption is not None and self.example.caption.file is not None


@dataclass(frozen=True)
class Change:
    """A caption before and after an edit.

    file: caption file that is written.
    before: text before the edit; None if there was no file.
    after: text after it.
    """

    file: Path
    before: str | None
    after: str


@dataclass(frozen=True)
class Replacement:
    """Result of a search over captions.

    changes: one for each caption with a match.
    matches: matches in all of them.
    locked: captions with a match that can't be written.
    """

    changes: tuple[Change, ...]
    matches: int
    locked: int


def editable_caption(subset: Subset, example: Example, extension: str, may_write: MayWrite) -> EditableCaption:
    """Read the caption of an example for an editor.

    extension: of captions that are new.
    may_write: predicate for files that may be written.
    """
    source = example.caption
    own = source.file if source is not None else None
    file = own or caption_file(example.path, _extension(subset) or extension)
    if source is not None and source.list is not None:
        return EditableCaption(example, file, source.text, f"The caption is in {source.list.name!r}; change it there.")
    if not may_write(file):
        place = "Captions are written only in folders inside ComfyUI's input and datasets folders, not into archives."
        return EditableCaption(example, file, _readable(example)[0], place)
    if own is not None and own.suffix.lower() == ".json":
        return EditableCaption(
            example, file, _readable(example)[0], f"The caption is in {own.name!r}; change it there."
        )
    if file.is_symlink():
        return EditableCaption(example, file, None, f"The caption file {file.name!r} is a link; change its target.")
    if source is None:
        return EditableCaption(example, file, None)
    text, problem = _readable(example)
    return EditableCaption(example, file, text, problem)


def editable_captions(layout: FolderLayout, extension: str, may_write: MayWrite) -> Iterator[EditableCaption]:
    """Read the captions of a layout one by one, see `editable_caption`."""
    for subset in layout.subsets:
        for example in subset.examples:
            yield editable_caption(subset, example, extension, may_write)


def _readable(example: Example) -> tuple[str | None, str]:
    """Read the text of a caption; returns it, and why it can't be read."""
    if example.caption is None:
        return None, ""
    try:
        return example.caption.read().strip(), ""
    except ValueError as error:
        return None, str(error)


def _extension(subset: Subset) -> str:
    """Return the extension of a subset's captions, as a dataset file may name its own; empty without any."""
    sources = (example.caption for example in subset.examples)
    file = next((source.file for source in sources if source is not None and source.file is not None), None)
    return "" if file is None or file.suffix.lower() == ".json" else file.suffix


def save_caption(caption: EditableCaption, text: str, before: str | None) -> Change | None:
    """Write a caption beside its picture, whole or not at all; returns the change, None if the text is the same.

    before: the text that the editor showed.
    Raises CaptionChanged if the file holds another one by now, ValueError if it can't be written or is too long, and
    OSError for a full or read-only disk.
    """
    if caption.locked:
        raise ValueError(caption.locked)
    if caption.text != before or read_caption(caption.file) != (caption.text if caption.has_file else None):
        raise CaptionChanged(f"The caption {caption.file.name!r} was changed elsewhere meanwhile; look at it again.")
    text = checked_caption(text, caption.file.name)
    if text == caption.text and caption.has_file:
        return None
    change = Change(caption.file, before if caption.has_file else None, text)
    _write(change.file, text)
    return change


def checked_caption(text: str, name: str) -> str:
    """Normalise a caption that is to be written. Raises ValueError if it is too long, or no Unicode text."""
    plain = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    check_size(CAPTION_FILE, name, characters=len(plain))
    try:
        plain.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"The caption {name!r} holds half a character; type that part again.") from error
    return plain


def find_replacements(
    captions: Iterable[EditableCaption], search: str, replacement: str, match_case: bool
) -> Replacement:
    """Search captions for a text and replace it, without writing anything.

    Only captions with a file of their own are changed. Raises ValueError for a search without text, and for captions
    that get too long.
    """
    if not search:
        raise ValueError("Type the text to search for.")
    check_size(CAPTION_EDIT, "The text to search for", characters=len(search))
    check_size(CAPTION_EDIT, "The new text", characters=len(replacement))
    pattern = re.compile(re.escape(search), 0 if match_case else re.IGNORECASE)
    changes: dict[Path, Change] = {}
    matches = 0
    locked = 0
    for caption in captions:
        if caption.file in changes:  # two pictures of one name share a caption
            continue
        if caption.text is None or not (count := len(pattern.findall(caption.text))):
            continue
        if caption.locked or not caption.has_file:
            locked += 1
            continue
        after = checked_caption(pattern.sub(lambda match: replacement, caption.text), caption.file.name)
        matches += count
        changes[caption.file] = Change(caption.file, caption.text, after)
    return Replacement(tuple(changes.values()), matches, locked)


def apply_changes(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Write the changes whose captions still are as they were; returns those that were written.

    On OSError, for a full or read-only disk, those that were written are taken back.
    """
    with ThreadPoolExecutor(_WRITERS) as pool:
        results = list(pool.map(_written, changes))
        written = [change for change, result in zip(changes, results, strict=True) if result is True]
        if error := next((result for result in results if isinstance(result, OSError)), None):
            for restored in [pool.submit(_restored, change) for change in written]:
                with contextlib.suppress(OSError):
                    restored.result()
            raise error
    return tuple(written)


def _written(change: Change) -> bool | OSError:
    """Write a change; returns whether the caption still was as it was, or why it could not be written."""
    try:
        if read_caption(change.file) != change.before:
            return False
        _write(change.file, change.after)
    except OSError as error:
        return error
    return True


def _restored(change: Change) -> bool:
    """Take a change back, or remove the file that it made; returns whether the caption still was as it left it."""
    if read_caption(change.file) != change.after:
        return False
    if change.before is None:
        change.file.unlink()
    else:
        _write(change.file, change.before)
    return True


def read_caption(file: Path) -> str | None:
    """Read a caption file as an editor shows it; None if there is none, or it isn't readable."""
    if file.is_symlink() or not file.is_file():
        return None
    return _readable(Example(file, file.name, CaptionSource(file)))[0]


def _write(file: Path, text: str) -> None:
    def write(unfinished: Path) -> None:
        unfinished.write_text(text, encoding="utf-8", newline="\n")

    write_atomically(file, write)


class UndoList:
    """The last edits of this server's pages, which can be taken back until it ends."""

    def __init__(self) -> None:
        self._edits: OrderedDict[str, tuple[Change, ...]] = OrderedDict()

    def put(self, changes: Sequence[Change]) -> str:
        """Remember an edit; returns its id. Older edits are forgotten when there are many."""
        id = secrets.token_hex(8)
        self._edits[id] = tuple(changes)
        while len(self._edits) > 1 and (len(self._edits) > MOST_UNDO or self._characters() > UNDO_CHARACTERS):
            self._edits.popitem(last=False)
        return id

    def _characters(self) -> int:
        return sum(len(c.before or "") + len(c.after) for changes in self._edits.values() for c in changes)

    def undo(self, id: str) -> tuple[int, list[str]]:
        """Take an edit back; returns how many captions were restored, and the names of those changed since.

        A caption file that the edit made is removed. Raises ValueError for an edit that isn't known any more.
        """
        changes = self._edits.pop(id, None)
        if changes is None:
            raise ValueError(f"The edit {cut(id)!r} can't be undone any more.")
        with ThreadPoolExecutor(_WRITERS) as pool:
            results = list(pool.map(_restored, changes))
        changed = [change.file.name for change, result in zip(changes, results, strict=True) if not result]
        return len(changes) - len(changed), changed
