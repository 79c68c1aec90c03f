"""Record of a run on disk, written while it trains: `run.json` says what it is, `progress.jsonl` how it goes.

A run that is killed has its curve so. Each line of `progress.jsonl` is an object with a `kind`, see `RunRecord`.
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
from typing import Any

from ...common.files import write_atomically
from ...common.untrusted.budgets import (
    CURVE,
    PROGRESS_FILE,
    PROGRESS_LINE,
    RUN_FILE,
    RUN_NOTES,
    RUN_SUMMARY,
    Budget,
    check_size,
)
from ...common.untrusted.json_text import parse_json, read_json

log = logging.getLogger(__name__)

RECORD = RUN, PROGRESS, SUMMARY = "run.json", "progress.jsonl", "summary.json"
SECONDS_BETWEEN_WRITES = 1.0
MOST_POINTS = 2000
GREATEST = 1e30  # of a loss: fp32 ends at 3e38, and means are taken of sums


class RunRecord:
    """Writer of a run's record. A write that fails is tried again with the next one, and never ends training.

    Lines: `start` of a session, `begin` of its steps (step, loss and validation so far), `step` (step, loss, rate),
    `saved` (step, file), `preview` (step), `validation` (step, loss), `note` (text), `end` (status, step, text, and the
    seconds that the session took).
    """

    def __init__(self, folder: Path, facts: dict[str, Any], writes: bool = True):
        """facts: contents of run.json. writes: false where another process writes the record."""
        self._writes = writes
        self._folder = folder
        self._facts: str | None = json.dumps(facts, indent=1)
        self._lines: list[str] = []
        self._written = -math.inf
        self._told = False
        self._started = time.monotonic()
        self._lock = threading.Lock()  # the timer writes from a thread of its own
        self._timer: threading.Timer | None = None
        self.add("start")

    def begin(self, step: int, loss: Sequence[float], validation: Sequence[dict[str, Any]]) -> None:
        """Begin a session after `step` steps, whose losses take the place of those on record."""
        points = [[point["step"], point["loss"]] for point in validation]
        self.add("begin", step=step, loss=list(loss), validation=points)

    def end(self, status: str, step: int, text: str) -> None:
        """End the session after `step` steps in all, and write what is not written yet."""
        self.add("end", status=status, step=step, text=text, seconds=round(time.monotonic() - self._started, 3))
        self.write()

    def add(self, kind: str, **values: Any) -> None:
        """Add a line. It is written at once, or a second after the last write."""
        if not self._writes:
            return
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"))
        with self._lock:
            self._lines.append(line)
            wait = self._written + SECONDS_BETWEEN_WRITES - time.monotonic()
            if wait > 0 and self._timer is None:
                self._timer = threading.Timer(wait, self.write)
                self._timer.daemon = True
                self._timer.start()
        if wait <= 0:
            self.write()

    def write(self) -> None:
        """Append the lines that are not written yet, and write run.json where that has not been done."""
        if not self._writes:
            return
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._written = time.monotonic()
            try:
                if self._facts is not None:
                    text = self._facts
                    write_atomically(self._folder / RUN, lambda beside: _write_text(beside, text))
                    self._facts = None
            except OSError as error:
                self._tell(error)
            if not self._lines:
                return
            try:
                # The first line break ends what a killed process or a full disk left of a line.
                with open(self._folder / PROGRESS, "a", encoding="utf-8") as file:
                    file.write("\n" + "\n".join(self._lines) + "\n")
            except OSError as error:
                self._tell(error)
                return
            self._lines.clear()

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            log.warning("The loss curve of this run can't be written to disk, so it has a gap: %s", error.strerror)


@dataclass
class RunCurve:
    """Curve and end of a run, as its record tells them.

    loss: (step, loss, learning rate) by ascending step; the rate is None where it is not known.
    validation: (step, loss) by ascending step.
    saves: (step, file name) by ascending step.
    previews: steps of previews, ascending.
    status: `finished`, `stopped`, `cancelled`, `failed` or `unsaved`; empty while it trains, or where it was killed.
    text: the sentence that it ended with.
    seconds: what the sessions after step `timed_from` took, loading included; None where that is not known.
    first_steps: steps that were asked for at first: those that were taken until it was first finished, 0 before.
    first_begin: step after which it began, above 0 where it went on from another run.
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
        """Take in one line of the record. Raises KeyError, TypeError or ValueError where it is none."""
        kind = line["kind"]
        if kind == "start":
            if not self.status:  # the session before was killed, and nobody knows when
                self.seconds = None
            self.notes, self.status, self.text = {}, "", ""
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
        rates = {at: rate for at, _, rate in self.loss.values()}
        points = {at: (at, _number(value), rates.get(at)) for at, value in enumerate(loss, start=1)}
        validated = {_step(at): (at, _number(value)) for at, value in validation}
        if not self.loss or not step:
            self.first_begin, self.first_steps = step, 0
        self.loss, self.validation = points, validated
        if self.seconds is None or not step:
            self.seconds, self.timed_from = 0.0, step
        self.saves = {at: saved for at, saved in self.saves.items() if at <= step}
        self.previews = {at: at for at in self.previews if at <= step}


class RunReader:
    """Reader of a run's record. Each call of `read` reads what was added since."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._forget()

    def _forget(self) -> None:
        self.curve, self._offset, self._file = RunCurve(), 0, (0, 0)
        self._inside_long_line = False

    def facts(self) -> dict[str, Any]:
        """Read run.json, or what summary.json says where there is none; empty without either."""
        return _read_object(self.folder, RUN, RUN_FILE) or _read_object(self.folder, SUMMARY, RUN_SUMMARY)

    def read(self) -> RunCurve:
        """Read the record. Lines that are damaged are left out."""
        path = own_file(self.folder, PROGRESS)
        if path is None:
            return self._of_summary()
        found = path.stat()
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._offset:
            self._forget()
            self._file = found.st_dev, found.st_ino
        with open(path, "rb") as file:
            file.seek(self._offset)
            while self._offset < PROGRESS_FILE.bytes:
                line = file.readline(PROGRESS_LINE.bytes)
                whole = line.endswith(b"\n")
                if not whole and len(line) < PROGRESS_LINE.bytes:
                    break  # it may be written just now
                self._offset += len(line)
                if whole and not self._inside_long_line and line.strip():
                    self._take(line)
                self._inside_long_line = not whole
        return self.curve

    def _take(self, line: bytes) -> None:
        """Take in one line; a damaged one is left out, and one past its budget."""
        with suppress(KeyError, TypeError, ValueError, RecursionError):
            self.curve.take(parse_json(line.decode(), PROGRESS_LINE, PROGRESS))

    def _of_summary(self) -> RunCurve:
        """Make the curve of a run that an older version trained."""
        summary, curve = _read_object(self.folder, SUMMARY, RUN_SUMMARY), RunCurve()
        points = summary.get("validation", {}).get("points", []) if isinstance(summary.get("validation"), dict) else []
        try:
            for line in (
                {"kind": "begin", "step": 0, "loss": summary.get("loss", []), "validation": []},
                *({"kind": "validation", "step": point["step"], "loss": point["loss"]} for point in points),
                {"kind": "end", "status": summary.get("status", ""), "text": ""},
            ):
                curve.take(line)
        except (KeyError, TypeError, ValueError):
            return RunCurve()
        return curve


def own_file(folder: Path, name: str) -> Path | None:
    """Path of a plain file of a folder; None where there is none, or a link that leads out of the folder."""
    path = folder / name
    try:
        if path.name == name and stat.S_ISREG(path.lstat().st_mode):  # no link, so it needs no look at all folders
            return path
        real = path.resolve(strict=True)
        plain = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        return None
    return path if plain and real.parent == folder.resolve() else None


def averaged(points: Sequence[tuple[int, float, Any]], window: int) -> list[tuple[int, float, Any, float]]:
    """Add to each point (step, loss, rate) the mean loss of the last `window` points up to it."""
    found, total = [], 0.0
    for at, (step, loss, rate) in enumerate(points):
        total += loss - (points[at - window][1] if at >= window else 0.0)
        found.append((step, loss, rate, total / min(at + 1, window)))
    return found


def thinned(points: Sequence[tuple[Any, ...]], most: int = MOST_POINTS) -> list[tuple[Any, ...]]:
    """Thin points (step, value, …) to at most `most`: of each stretch the least and the greatest, and the last of all.

    Lows and peaks of a curve stay in view so.
    """
    if len(points) <= most:
        return list(points)
    stretches = (most - 1) // 2
    kept = {len(points) - 1}
    for number in range(stretches):
        stretch = range(number * len(points) // stretches, (number + 1) * len(points) // stretches)
        kept |= {min(stretch, key=lambda at: points[at][1]), max(stretch, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def _read_object(folder: Path, name: str, budget: Budget) -> dict[str, Any]:
    path = own_file(folder, name)
    try:
        found = {} if path is None else read_json(path, budget)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _step(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 10_000_000:
        raise ValueError
    return value


def _number(value: Any) -> float:
    """Check a loss or a rate, cut to GREATEST: sums of larger ones would not be finite."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError
    return min(max(float(value), -GREATEST), GREATEST)


def _text(value: Any) -> str:
    return str(value)[: RUN_NOTES.characters]


def _put(series: dict[int, Any], step: int, point: Any) -> None:
    """Add a point to a series, unless that would be longer than a run may have."""
    if step in series or len(series) < CURVE.items:
        series[step] = point
