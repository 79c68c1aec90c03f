"""Index of all runs for the sidebar, the one in training first, then the last changed.

A run's record is read again only when it has changed.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unicodedata import normalize

from ...train.runs.run_folder import FoundRun, RunFolder, Stamp, all_runs
from ...train.runs.run_record import PROGRESS, RunReader
from ..common import training_now

PAGE = 200  # runs
MOST_STEPS = 10_000_000
MOST_TEXT = 300  # letters of a text from a file


@dataclass(frozen=True)
class IndexedRun:
    """Run in the index.

    folder: its folder.
    place: path of its folder relative to the folder of all runs, with forward slashes.
    changed: time of the last change of its record, in seconds since 1970.
    stamp: names, times and sizes of the files of its record, which show if it has changed.
    facts: facts from its record.
    words: searchable text.
    """

    folder: RunFolder
    place: str
    changed: float
    stamp: Stamp
    facts: dict[str, Any] = field(default_factory=dict)
    words: str = ""


class RunIndex:
    """Index of the runs below a folder."""

    def __init__(self) -> None:
        self._runs: dict[Path, IndexedRun] = {}
        self._lock = threading.Lock()  # requests search concurrently

    def search(self, root: Path, query: str) -> list[IndexedRun]:
        """List the runs with every word of `query` in place, name or model: those in training, then the newest."""
        with self._lock:
            self._runs = {run.folder.path: self._indexed(run, root) for run in all_runs(root)}
            runs = list(self._runs.values())
        words = _folded(query).split()
        matches = [run for run in runs if all(word in run.words for word in words)]
        return sorted(matches, key=_order, reverse=True)

    def _indexed(self, found_run: FoundRun, root: Path) -> IndexedRun:
        cached = self._runs.get(found_run.folder.path)
        if cached is not None and cached.stamp == found_run.stamp:
            return cached
        place = found_run.folder.path.relative_to(root).as_posix()
        if cached is not None and _but_progress(cached.stamp) == _but_progress(found_run.stamp):
            facts, words = cached.facts, cached.words
        else:
            facts = _facts(RunReader(found_run.folder.path).facts())
            words = _folded(f"{place} {facts['output_name']} {facts['model']}")
        return IndexedRun(found_run.folder, place, found_run.changed, found_run.stamp, facts, words)


def _but_progress(stamp: Stamp) -> Stamp:
    """Return the stamp without the progress file, which holds no listed facts."""
    return tuple(entry for entry in stamp if entry[0] != PROGRESS)


def page_of(runs: Sequence[IndexedRun], number: int) -> list[IndexedRun]:
    """Return a page of runs; the first has number 0."""
    return list(runs[number * PAGE : (number + 1) * PAGE])


def _facts(record: dict[str, Any]) -> dict[str, Any]:
    text = {name: text_of(record.get(name))[:MOST_TEXT] for name in ("output_name", "model", "started")}
    return {**text, "steps": steps_of(record)}


def _order(run: IndexedRun) -> tuple[bool, float, str]:
    return training_now.running_in(run.folder.path) is not None, run.changed, run.place


def _folded(text: str) -> str:
    return normalize("NFC", text).casefold()


def steps_of(record: dict[str, Any]) -> int:
    """Return the requested steps of a run from its record; 0 if missing."""
    steps = record.get("steps")
    return steps if type(steps) is int and 0 <= steps <= MOST_STEPS else 0


def text_of(value: Any) -> str:
    """Return a text from a file; empty for anything else."""
    return value if isinstance(value, str) else ""
