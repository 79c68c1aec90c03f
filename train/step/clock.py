"""Step clock: seconds of a run's steps, and their shares of data, host and waiting."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch

KEPT = 50  # steps, the last ones


class Step(NamedTuple):
    """Seconds of one step.

    whole: total.
    data: making batches, including reading their files and the batch made ahead for the next step.
    wait: waiting for the device, at the one read of a step.
    device: CUDA events before its first and after its last kernel; None without a GPU.
    """

    whole: float
    data: float
    wait: float
    device: tuple[Any, Any] | None

    @property
    def host(self) -> float:
        """Seconds of the host's own work."""
        return self.whole - self.data - self.wait


class StepClock:
    """Clock of a run's steps. On a GPU each step is timed by events, without a synchronisation."""

    def __init__(self, device: torch.device):
        self.device = device
        self.steps: deque[Step] = deque(maxlen=KEPT)
        self._seconds = {"data": 0.0, "wait": 0.0}
        self._start, self._event = time.perf_counter(), None

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._start, self._event = time.perf_counter(), self._moment()

    @contextmanager
    def spend(self, kind: str) -> Iterator[None]:
        """Add the seconds of the context to `kind`: data or wait."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[kind] += time.perf_counter() - started

    def end(self) -> None:
        """Count the step that was begun; a step without `end` is not counted."""
        device = None if self._event is None else (self._event, self._moment())
        whole = time.perf_counter() - self._start
        self.steps.append(Step(whole, self._seconds["data"], self._seconds["wait"], device))

    def clear(self) -> None:
        """Forget the steps so far."""
        self.steps.clear()

    def pace(self) -> float | None:
        """Return the median seconds of a step; None before one was counted."""
        return median(step.whole for step in self.steps) if self.steps else None

    def facts(self) -> dict[str, float | None]:
        """Return entries for the summary, medians; waits for the GPU's last event."""
        return {
            "seconds_per_step": _median(step.whole for step in self.steps),
            "host_seconds": _median(step.host for step in self.steps),
            "wait_seconds": _median(step.wait for step in self.steps),
            "data_seconds": _median(step.data for step in self.steps),
            "device_seconds": _median(_elapsed(*step.device) for step in self.steps if step.device is not None),
        }

    def _moment(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _median(seconds: Iterable[float]) -> float | None:
    """Return the median, rounded to a tenth of a millisecond; None of nothing."""
    values = list(seconds)
    return round(median(values), 4) if values else None


def _elapsed(start: Any, end: Any) -> float:
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
