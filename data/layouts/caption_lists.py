"""Captions of many pictures in one file: metadata.jsonl, metadata.csv, captions.json, captions.txt and their like."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ...common.progress import Interrupted
from ...common.text import cut, quantity, shortlist
from ...common.untrusted.budgets import (
    CAPTION_COLUMNS,
    CAPTION_FILE,
    CAPTION_LINE,
    CAPTION_LIST,
    DATASET_PATH,
    check_size,
)
from ...common.untrusted.json_text import parse_json
from ...common.untrusted.regular_files import file_state, read_regular
from .captions import TAG_FIELDS, TEXT_FIELDS, CaptionSource, caption_in, decoded, unreadable
from .files import stem_of

_LISTS = re.compile(r"(?:metadata|captions?|prompts?)\.(?:jsonl|json|csv|tsv|txt)", re.IGNORECASE)
_FILE_FIELDS = tuple("file_name filename image_path video_path image file path video name image_file".split())
_CONTROL = re.compile(r"control_path(?:_(\d{1,9}))?")
_SEPARATOR = re.compile(r"[\t,:|]")
_ENDING = re.compile(r"\.\w{2,5}\Z")
_LONGEST_NAME = 300  # characters of a file's name in a line of text
_LARGEST_CACHED = 4_000_000  # bytes of a list that is kept in memory, as a file may be looked at again and again


@dataclass(frozen=True)
class CaptionRow:
    """One line of a list.

    file: name or path of a picture, as written.
    text: its caption; None if the line has none.
    controls: paths of its control images, as written.
    """

    file: str
    text: str | None
    controls: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaptionList:
    """A file with captions.

    path: the file.
    rows: its lines that name a picture.
    text: the text of a file that names none, which is the caption of all pictures beside it.
    unused: names of fields that mean nothing here.
    """

    path: Path
    rows: tuple[CaptionRow, ...]
    text: str = ""
    unused: tuple[str, ...] = ()


@dataclass
class ListedCaptions:
    """Captions of the lists of a folder.

    texts: by file.
    controls: paths of control images, as written, by file.
    missing: names in lines that name no file of the folder.
    """

    texts: dict[Path, CaptionSource] = field(default_factory=dict)
    controls: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


def is_list(name: str) -> bool:
    """Return True for the name of a file that lists captions."""
    return _LISTS.fullmatch(name) is not None


def read_list(path: Path, interrupted: Interrupted = lambda: None) -> CaptionList:
    """Read a list of captions. Raises ValueError, naming the file and the line, if it isn't readable.

    interrupted: called before each line of a large list; raises to stop.
    """
    try:
        state = file_state(path)
        return _read_again(path, state) if state[0] <= _LARGEST_CACHED else _read(path, interrupted)
    except OSError as error:
        raise unreadable("file", path, error) from error


class ListReader:
    """Reader of the lists of captions of one data set: each once, all within the budget of one."""

    def __init__(self, interrupted: Interrupted = lambda: None) -> None:
        """interrupted: called before each line of a large list; raises to stop."""
        self._interrupted = interrupted
        self._lists: dict[Path, CaptionList] = {}
        self._bytes = self._rows = 0

    def read(self, path: Path) -> CaptionList:
        """Read a list, or return it as it was read before. Raises ValueError as `read_list`."""
        if path not in self._lists:
            try:
                self._bytes += path.stat().st_size
            except OSError as error:
                raise unreadable("file", path, error) from error
            check_size(CAPTION_LIST, f"{path.name} with the lists before it", bytes=self._bytes)
            self._lists[path] = read_list(path, self._interrupted)
            self._rows += len(self._lists[path].rows)
            check_size(CAPTION_LIST, f"{path.name} with the lists before it", items=self._rows)
        return self._lists[path]


@lru_cache(maxsize=16)
def _read_again(path: Path, state: tuple[int, ...]) -> CaptionList:
    return _read(path, lambda: None)


def _read(path: Path, interrupted: Interrupted) -> CaptionList:
    try:
        text = decoded(read_regular(path, CAPTION_LIST))
    except UnicodeDecodeError as error:
        raise ValueError(f"The file {path.name!r} is not UTF-8 text; save it as UTF-8.") from error
    check_size(CAPTION_LIST, path.name, items=text.count("\n"))
    kind = path.suffix.lower()
    if kind == ".txt":
        return _read_lines(path, text)
    records = {".jsonl": _json_lines, ".json": _json_records}.get(kind, _table)(path, text)
    rows, fields = [], dict[str, None]()
    for record in records:
        interrupted()
        row = row_of(record)
        fields |= dict.fromkeys(record)
        if row is not None:
            rows.append(row)
    known = _FILE_FIELDS + TEXT_FIELDS + TAG_FIELDS
    unused = tuple(name for name in fields if name not in known and not _CONTROL.fullmatch(name))
    return CaptionList(path, tuple(rows), unused=unused)


def row_of(record: Mapping[str, Any]) -> CaptionRow | None:
    """Find file, caption and control images in an object of a list; None if it names no file."""
    file = next((record[name] for name in _FILE_FIELDS if isinstance(record.get(name), str) and record[name]), None)
    if file is None:
        return None
    numbered = [(int(match[1] or 0), name) for name in record if (match := _CONTROL.fullmatch(name))]
    controls = [record[name] for _, name in sorted(numbered) if isinstance(record[name], str) and record[name]]
    return CaptionRow(file, caption_in(dict(record)), tuple(controls))


def _json_lines(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, CAPTION_LINE, f"Line {number} of {path.name!r}")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Line {number} of {path.name!r} is not JSON ({cut(line)}); write one object per line, such as "
                '{"file_name": "a.jpg", "text": "a fox"}.'
            ) from error
        if isinstance(record, dict):
            yield record


def _json_records(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a JSON file: a list of them, or captions (or objects) by file name, as sd-scripts has it."""
    try:
        value = parse_json(text, CAPTION_LIST, path.name)
    except json.JSONDecodeError as error:
        raise ValueError(f"The file {path.name!r} is not JSON; correct it or take it out of the folder.") from error
    if isinstance(value, list):
        yield from (record for record in value if isinstance(record, dict))
    elif isinstance(value, dict):
        for name, content in value.items():
            caption = caption_in(content)
            if caption is not None:
                yield {"file_name": name, "text": caption}


def _table(path: Path, text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a table whose first line names its columns."""
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    table = csv.reader((f"{line}\n" for line in text.split("\n")), delimiter=separator)
    try:
        rows = filter(None, table)
        columns = next(rows, [])
        check_size(CAPTION_COLUMNS, f"The first line of {path.name!r}", items=len(columns))
        for row in rows:
            yield {name: value for name, value in zip_longest(columns, row[: len(columns)]) if name}
    except csv.Error as error:
        raise ValueError(f"The table {path.name!r} can't be read ({error}); save it as CSV.") from error


def _read_lines(path: Path, text: str) -> CaptionList:
    """Read `a.jpg: a fox`, with a tab, a comma or a colon between; a text without such lines is for all pictures."""
    rows = [row for line in text.split("\n") if (row := _row_of_line(line.strip())) is not None]
    if rows:
        return CaptionList(path, tuple(rows))
    check_size(CAPTION_FILE, path.name, bytes=len(text))  # one caption for all
    return CaptionList(path, (), text.strip())


def _row_of_line(line: str) -> CaptionRow | None:
    match = _SEPARATOR.search(line, 0, _LONGEST_NAME)
    if match is None or not _ENDING.search(name := line[: match.start()].rstrip()):
        return None
    caption = line[match.end() :].strip()
    return CaptionRow(name, caption) if caption else None


def match_lists(
    lists: Iterable[CaptionList], files: Sequence[Path], interrupted: Interrupted = lambda: None
) -> ListedCaptions:
    """Match the lines of lists to files, by their path below the folder of the list, or by their name alone if one file
    has it; sd-scripts leaves the extension out. A file that a list names several times has several captions.
    """
    listed = ListedCaptions()
    by_path = {str(file): file for file in files}
    by_stem: dict[str, list[Path]] = {}
    for file in files:
        for key in (str(file.with_suffix("")), file.name, file.stem):
            by_stem.setdefault(stem_of(f"{key}.x"), []).append(file)
    for caption_list in lists:
        texts: dict[Path, dict[str, None]] = {}
        for row in caption_list.rows:
            interrupted()
            match = _match(caption_list.path.parent, row.file, by_path, by_stem)
            if match is None:
                listed.missing.append(row.file)
            elif row.text is not None:
                texts.setdefault(match, {})[row.text] = None
                listed.controls.update({match: row.controls} if row.controls else {})
        for file, captions in texts.items():
            listed.texts.setdefault(file, _source(caption_list.path, list(captions)))
        if caption_list.text:
            # OneTrainer takes one line of a text for all pictures each time.
            source = CaptionSource(text=caption_list.text, list=caption_list.path, per_line="\n" in caption_list.text)
            for file in files:
                if file.is_relative_to(caption_list.path.parent):
                    listed.texts.setdefault(file, source)
    return listed


def _source(path: Path, captions: Sequence[str]) -> CaptionSource:
    """Return the one caption of a file in a list, or its several captions on a line each."""
    if len(captions) == 1:
        return CaptionSource(text=captions[0], list=path)
    return CaptionSource(text="\n".join(text.replace("\n", " ") for text in captions), list=path, per_line=True)


def _match(folder: Path, name: str, by_path: Mapping[str, Path], by_stem: Mapping[str, list[Path]]) -> Path | None:
    if len(name) > DATASET_PATH.characters:  # no file has such a name
        return None
    plain = name.replace("\\", "/")
    if (file := by_path.get(str(folder / plain))) is not None:
        return file
    for key in (str(folder / plain), plain.rsplit("/", 1)[-1]):
        matches = by_stem.get(stem_of(f"{key}.x"), [])
        if len(matches) == 1:
            return matches[0]
    return None


def list_notes(lists: Sequence[CaptionList], listed: ListedCaptions) -> Iterator[str]:
    """Yield notes on the entries of the lists that were read."""
    used = {source.list for source in listed.texts.values()}
    names = [caption_list.path.name for caption_list in lists if caption_list.path in used]
    if names:
        unused = dict.fromkeys(
            name for caption_list in lists if caption_list.path in used for name in caption_list.unused
        )
        rest = f"; these fields aren't used: {shortlist(list(unused))}" if unused else ""
        several = sum(source.per_line for source in listed.texts.values())
        choice = f"; {several} of them in several versions, one for each showing" if several else ""
        count = quantity(len(listed.texts), "caption comes", "captions come")
        yield f"{count} from {shortlist(list(dict.fromkeys(names)))}{choice}{rest}."
    if names and listed.missing:
        yield f"These files of the list are not in the folder: {shortlist(listed.missing)}."
