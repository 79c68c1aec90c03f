"""Record of a run on disk, written while it trains: `run.json` describes the run, `progress.jsonl` its progress.

A killed run keeps its curve this way. Each line of `progress.jsonl` is an object with a `kind`, see `RunRecord`.
"""

import json
import logging
import math
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from ...common.files import write_atomically
from ...common.untrusted.budgets import (
    CURVE,
    PROGRESS_FILE,
    PROGRESS_LINE,
    RUN_FILE,
    RUN_NOTES,
    Budget,
    check_size,
)
from ...common.untrusted.json_text import parse_json, read_json
from ...common.untrusted.regular_files import append_regular, open_regular

log = logging.getLogger(__name__)

RUN = "run.json"
PROGRESS = "progress.jsonl"
SUMMARY = "summary.json"
RECORD = (RUN, PROGRESS, SUMMARY)
SECONDS_BETWEEN_WRITES = 1.0
MOST_POINTS = 2000
GREATEST = 1e30  # largest loss: fp32 ends at 3e38, and means are computed from sums


class RunRecord:
    """Writer of a run's record. A failed write is retried with the next one, and never ends training.

    Lines: `start` of a session, `begin` of its steps (step, loss and validation so far), `step` (step, loss, rate),
    `saved` (step, file), `preview` (step), `validation` (step, loss), `note` (text), `end` (status, step, text, and the
    duration of the session in seconds).
    """

    def __init__(self, folder: Path, facts: dict[str, Any], writes: bool = True):
        """facts: contents of run.json. writes: False if another process writes the record."""
        self._writes = writes
        self._folder = folder
        self._facts: str | None = json.dumps(facts, indent=1)
        self._lines: list[str] = []
        self._last_write = -math.inf
        self._has_warned = False
        self._started = time.monotonic()
        self._lock = threading.Lock()  # the timer writes from a thread of its own
        self._timer: threading.Timer | None = None
        self.add("start")

    def begin(self, step: int, loss: Sequence[float], validation: Sequence[dict[str, Any]]) -> None:
        """Begin a session after `step` steps. Its losses replace the recorded ones."""
        points = [[point["step"], point["loss"]] for point in validation]
        self.add("begin", step=step, loss=list(loss), validation=points)

    def end(self, status: str, step: int, text: str) -> None:
        """End the session after `step` steps in total, and write the pending lines."""
        self.add("end", status=status, step=step, text=text, seconds=round(time.monotonic() - self._started, 3))
        self.write()

    def add(self, kind: str, **values: Any) -> None:
        """Add a line. It is written immediately, or a second after the last write."""
        if not self._writes:
            return
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"))
        with self._lock:
            self._lines.append(line)
            wait = self._last_write + SECONDS_BETWEEN_WRITES - time.monotonic()
            if wait > 0 and self._timer is None:
                self._timer = threading.Timer(wait, self.write)
                self._timer.daemon = True
                self._timer.start()
        if wait <= 0:
            self.write()

    def write(self) -> None:
        """Append the pending lines, and write run.json if that has not been done."""
        if not self._writes:
            return
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._last_write = time.monotonic()
            try:
                if self._facts is not None:
                    text = self._facts
                    write_atomically(self._folder / RUN, lambda temporary: _write_text(temporary, text))
                    self._facts = None
            except OSError as error:
                self._tell(error)
            if not self._lines:
                return
            try:
                # The leading line break ends a partial line that a killed process or a full disk left.
                with append_regular(self._folder / PROGRESS) as file:
                    file.write("\n" + "\n".join(self._lines) + "\n")
            except OSError as error:
                self._tell(error)
                return
            self._lines.clear()

    def _tell(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("The loss curve of this run can't be written to disk, so it has a gap: %s", error.strerror)


@dataclass
class RunCurve:
    """Curve and end of a run, read from its record.

    loss: (step, loss, learning rate) by ascending step; the rate is None if it is not known.
    validation: (step, loss) by ascending step.
    saves: (step, file name) by ascending step.
    previews: steps of previews, ascending.
    notes: notes of the last session, each once, in the order of their first appearance.
    status: `finished`, `stopped`, `cancelled`, `failed` or `unsaved`; empty while it trains, or if it was killed.
    text: the sentence that it ended with.
    seconds: duration of the sessions after step `timed_from`, loading included; None if it is not known.
    timed_from: steps done before the time that `seconds` counts.
    first_steps: number of steps requested at first: the steps trained until the run first finished, 0 before that.
    first_begin: step after which it began, above 0 if it continued another run.
    """

    loss: dict[int, tuple[int, float, float | None]] = field(default_factory=dict)
    validation: dict[int, tuple[int, float]] = field(default_factory=dict)
    saves: dict[int, tuple[int, str]] = field(default_factory=dict)
    previews: dict[int, int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    status: str = ""
    text: str = ""
    seconds: float | None = None
    timed_from: int = 0
    first_steps: int = 0
    first_begin: int = 0

    @property
    def step(self) -> int:
        """Steps done."""
        return max(self.loss, default=0)

    def take(self, line: dict[str, Any]) -> None:
        """Process one line of the record. Raises KeyError, TypeError or ValueError if it is not valid."""
        kind = line["kind"]
        if kind == "start":
            if not self.status:  # the previous session was killed, at an unknown time
                self.seconds = None
            self.notes = {}
            self.status = ""
            self.text = ""
        elif kind == "begin":
            self._begin(_step(line["step"]), line["loss"], line["validation"])
        elif kind == "step":
            step = _step(line["step"])
            _put(self.loss, step, (step, _number(line["loss"]), _number(line["rate"])))
        elif kind == "saved":
            _put(self.saves, _step(line["step"]), (line["step"], _text(line["file"])))
        elif kind == "preview":
            _put(self.previews, _step(line["step"]), line["step"])
        elif kind == "validation":
            _put(self.validation, _step(line["step"]), (line["step"], _number(line["loss"])))
        elif kind == "note":
            if len(self.notes) < RUN_NOTES.items:
                self.notes[_text(line["text"])] = None
        elif kind == "end":
            self.status, self.text = _text(line["status"]), _text(line["text"])
            if self.status == "finished" and not self.first_steps and "step" in line:
                self.first_steps = max(0, _step(line["step"]) - self.first_begin)
            seconds = line.get("seconds")
            if self.seconds is not None and isinstance(seconds, int | float) and 0 <= seconds < math.inf:
                self.seconds += seconds
            else:
                self.seconds = None

    def _begin(self, step: int, loss: Sequence[float], validation: Sequence[Sequence[Any]]) -> None:
        check_size(CURVE, "The curve", items=max(len(loss), len(validation)))
        rates = {point_step: rate for point_step, _, rate in self.loss.values()}
        points = {
            point_step: (point_step, _number(value), rates.get(point_step))
            for point_step, value in enumerate(loss, start=1)
        }
        validated = {_step(point_step): (point_step, _number(value)) for point_step, value in validation}
        if not self.loss or not step:
            self.first_begin, self.first_steps = step, 0
        self.loss, self.validation = points, validated
        if self.seconds is None or not step:
            self.seconds, self.timed_from = 0.0, step
        self.saves = {save_step: saved for save_step, saved in self.saves.items() if save_step <= step}
        self.previews = {preview_step: preview_step for preview_step in self.previews if preview_step <= step}


class RunReader:
    """Reader of a run's record. Each call of `read` reads the lines added since the last one."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self.curve = RunCurve()
        self._offset = 0
        self._file = (0, 0)
        self._inside_long_line = False

    def facts(self) -> dict[str, Any]:
        """Read run.json; empty without a readable one."""
        return read_object(self.folder, RUN, RUN_FILE)

    def read(self) -> RunCurve:
        """Read the record. Damaged lines are skipped."""
        path = own_file(self.folder, PROGRESS)
        if path is None:
            return RunCurve()
        file_stat = path.stat()
        if (file_stat.st_dev, file_stat.st_ino) != self._file or file_stat.st_size < self._offset:
            self._forget()
            self._file = file_stat.st_dev, file_stat.st_ino
        with open_regular(path) as file:
            file.seek(self._offset)
            while self._offset < PROGRESS_FILE.bytes:
                line = file.readline(PROGRESS_LINE.bytes)
                whole = line.endswith(b"\n")
                if not whole and len(line) < PROGRESS_LINE.bytes:
                    break  # it may still be being written
                self._offset += len(line)
                if whole and not self._inside_long_line and line.strip():
                    self._take(line)
                self._inside_long_line = not whole
        return self.curve

    def _take(self, line: bytes) -> None:
        """Process one line; a damaged line, or one over its budget, is skipped."""
        with suppress(KeyError, TypeError, ValueError):
            self.curve.take(parse_json(line.decode(), PROGRESS_LINE, PROGRESS))


def own_file(folder: Path, name: str) -> Path | None:
    """Return the path of a regular file of a folder; None if there is none, or for a link out of the folder."""
    path = folder / name
    try:
        if path.name == name and stat.S_ISREG(path.lstat().st_mode):  # not a link, so resolve() is not needed
            return path
        real = path.resolve(strict=True)
        plain = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links, before Python 3.13
        return None
    return path if plain and real.parent == folder.resolve() else None


def loss_ends(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the mean loss of the first and the last twentieth of the steps; None without steps."""
    count = max(1, len(losses) // 20)
    return (fmean(losses[:count]), fmean(losses[-count:])) if losses else None


def averaged(points: Sequence[tuple[int, float, Any]], window: int) -> list[tuple[int, float, Any, float]]:
    """Add to each point (step, loss, rate) the mean loss of the last `window` points up to it."""
    smoothed, total = [], 0.0
    for index, (step, loss, rate) in enumerate(points):
        total += loss - (points[index - window][1] if index >= window else 0.0)
        smoothed.append((step, loss, rate, total / min(index + 1, window)))
    return smoothed


def thinned(points: Sequence[tuple[Any, ...]], limit: int = MOST_POINTS) -> list[tuple[Any, ...]]:
    """Thin points (step, value, …) to at most `limit`: the smallest and largest of each stretch, and the last point.

    This keeps the lows and peaks of a curve visible.
    """
    if len(points) <= limit:
        return list(points)
    stretches = (limit - 1) // 2
    indices = {len(points) - 1}
    for number in range(stretches):
        stretch = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        indices |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(indices)]


def read_object(folder: Path, name: str, budget: Budget) -> dict[str, Any]:
    """Read a JSON object from a run's own file, never through a link; empty without a readable one."""
    path = own_file(folder, name)
    try:
        content = {} if path is None else read_json(path, budget)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _step(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 10_000_000:
        raise ValueError
    return value


def _number(value: Any) -> float:
    """Check a loss or a rate, clamped to GREATEST: sums of larger values would not be finite."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError
    return min(max(float(value), -GREATEST), GREATEST)


def _text(value: Any) -> str:
    return str(value)[: RUN_NOTES.characters]


def _put(series: dict[int, Any], step: int, point: Any) -> None:
    """Add a point to a series, unless the series already has the maximum length."""
    if step in series or len(series) < CURVE.items:
        series[step] = point
