"""Ledger of written captions: what a model wrote for which picture, and which captions nobody has looked at yet.

A folder of pictures has one JSON file in the user folder, so that nothing but captions is written beside pictures.
"""

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...common.files import write_atomically
from ...common.untrusted.budgets import CAPTION_LEDGER
from ...common.untrusted.json_text import read_json

_writing = threading.Lock()  # nodes and pages write from different threads


@dataclass(frozen=True)
class LedgerEntry:
    """Record of the caption that a model wrote for a picture.

    key: of the picture's bytes, the model and the settings.
    waits: nobody has looked at it yet.
    """

    key: str
    waits: bool


class Ledger:
    """Entries of pictures, read folder by folder when they are asked for. Nothing is written before `save`."""

    def __init__(self, root: Path):
        self.root = root
        self._folders: dict[Path, dict[str, LedgerEntry]] = {}
        self._changes: dict[Path, dict[str, LedgerEntry]] = {}

    def find(self, picture: Path) -> LedgerEntry | None:
        """Return the entry of a picture; None if no model wrote its caption."""
        folder = picture.parent
        if folder not in self._folders:
            self._folders[folder] = _read(self._file(folder))
        return self._folders[folder].get(picture.name)

    def waits(self, picture: Path) -> bool:
        """Return whether the caption of a picture waits for review."""
        entry = self.find(picture)
        return entry is not None and entry.waits

    def put(self, picture: Path, entry: LedgerEntry) -> None:
        """Set the entry of a picture."""
        self.find(picture)
        self._folders[picture.parent][picture.name] = entry
        self._changes.setdefault(picture.parent, {})[picture.name] = entry

    def settle(self, pictures: Iterable[Path]) -> None:
        """Mark captions as looked at."""
        for picture in pictures:
            if (entry := self.find(picture)) is not None and entry.waits:
                self.put(picture, LedgerEntry(entry.key, False))

    def save(self) -> None:
        """Write the changed entries, beside those that others wrote meanwhile. Raises OSError as `write_atomically`."""
        with _writing:
            for folder, changes in self._changes.items():
                file = self._file(folder)
                entries = _read(file) | changes
                content = {"folder": str(folder), "captions": {name: asdict(entry) for name, entry in entries.items()}}
                _write(file, json.dumps(content, ensure_ascii=True))
            self._changes.clear()

    def _file(self, folder: Path) -> Path:
        name = blake2b(os.fsencode(os.path.realpath(folder)), digest_size=16).hexdigest()
        return self.root / f"{name}.json"


def _read(file: Path) -> dict[str, LedgerEntry]:
    """Read the entries of a folder by name; none of a file that isn't there or is damaged."""
    try:
        content = read_json(file, CAPTION_LEDGER)
    except (OSError, ValueError):
        return {}
    captions = content.get("captions") if isinstance(content, dict) else None
    values = captions.items() if isinstance(captions, dict) else ()
    return {name: entry for name, value in values if (entry := _entry(value)) is not None}


def _entry(value: Any) -> LedgerEntry | None:
    known = isinstance(value, dict) and isinstance(value.get("key"), str) and isinstance(value.get("waits"), bool)
    return LedgerEntry(value["key"], value["waits"]) if known else None


def _write(file: Path, text: str) -> None:
    def write(unfinished: Path) -> None:
        unfinished.write_text(text, encoding="utf-8")

    write_atomically(file, write)
