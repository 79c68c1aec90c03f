"""Output of a run on the terminal, in the log and in the result file."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from .errors import UsageError


class Reporter:
    """Writer of events to the terminal and, as lines of JSON, to a log. Only rank 0 writes."""

    def __init__(self, log: TextIO | None, rank: int = 0) -> None:
        self.log = log
        self.on_terminal = sys.stdout.isatty()
        self.silent = rank > 0
        self.open, self.last = False, 0.0

    def event(self, event: str, **facts: Any) -> None:
        if self.log is not None:
            self.log.write(json.dumps({"time": round(time.time(), 3), "event": event, **facts}, default=str) + "\n")
            self.log.flush()

    def line(self, text: str, stream: TextIO | None = None) -> None:
        if self.silent:
            return
        if self.open:
            print()
            self.open = False
        print(text, file=stream or sys.stdout, flush=True)

    def progress(self, text: str) -> None:
        """Update one line on a terminal; elsewhere print every few seconds."""
        if self.silent:
            return
        if self.on_terminal:
            print(f"\r    {text[:110]:<110}", end="", flush=True)
            self.open = True
        elif time.monotonic() - self.last > 3:
            print(f"    {text}", flush=True)
            self.last = time.monotonic()


@contextlib.contextmanager
def open_log(path: str | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        log = open(path, "a", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--log {path} can't be written: {error.strerror}.") from error
    with log:
        yield log


class Result:
    """File with the exit code: torchrun turns every code but 0 into 1."""

    def __init__(self, path: str | None) -> None:
        self.path, self.facts = path, dict[str, Any]()
        if path is not None:
            self.write()

    def write(self) -> None:
        if self.path is None:
            return
        try:
            Path(self.path).write_text(json.dumps(self.facts), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--result {self.path} can't be written: {error.strerror}.") from error

    def record_start(self, output: str, started: float) -> None:
        """Write the place of a state, for a process that can no longer do so at its end."""
        self.facts |= {"output": output, "started": started}
        self.write()

    def ended(self, code: int) -> int:
        self.facts["code"] = code
        with contextlib.suppress(UsageError):
            self.write()
        return code


def saved_a_state(output: str, started: float) -> bool:
    """Return whether a run written since `started` has a state to resume from."""
    for summary in Path(output, "loras").rglob("summary.json"):
        if summary.stat().st_mtime >= started and any(summary.parent.glob("state-*")):
            return True
    return any(state.stat().st_mtime >= started for state in Path(output, "loras").rglob("state-*.tessera"))
