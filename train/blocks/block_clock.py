"""Block clock: seconds that compiled blocks take in a run's own steps."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from types import TracebackType
from typing import Any

import torch

from ...compile.compile_report import RegionReport

LEAST = 3  # calls of each structure, so that the median ignores a delayed one
MOST = 64  # calls recorded of one structure while others are missing


class BlockClock:
    """Timer of the forward of compiled blocks, at the sizes at which they were measured eagerly.

    On a GPU each call is timed by events, without a synchronisation. A call that compiled does not count.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        """shapes: shape of the first input, by structure."""
        self.shapes, self.device = shapes, device
        self._calls: dict[str, list[tuple[Any, Any]]] = {structure: [] for structure in shapes}

    def time(self, structure: str, report: RegionReport, args: tuple[Any, ...]) -> "AbstractContextManager[None]":
        """Return a context for one call of a block with these inputs."""
        if tuple(args[0].shape) != self.shapes.get(structure) or len(self._calls[structure]) == MOST:
            return nullcontext()
        return _Call(self, self._calls[structure], report)

    def moment(self) -> Any:
        """Record a moment: an event in the GPU's queue, or the time of the CPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float] | None:
        """Return the median of each structure, None until each has LEAST calls. Waits for the GPU's events."""
        if any(len(calls) < LEAST for calls in self._calls.values()):
            return None
        return {structure: median(map(self._elapsed, calls)) for structure, calls in self._calls.items()}

    def _elapsed(self, call: tuple[Any, Any]) -> float:
        start, end = call
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class _Call:
    """Context of one timed call, added to `calls` if it neither compiled nor raised."""

    def __init__(self, clock: BlockClock, calls: list[tuple[Any, Any]], report: RegionReport):
        self.clock = clock
        self.calls = calls
        self.report = report

    def __enter__(self) -> None:
        self.compiled = len(self.report.events)
        self.start = self.clock.moment()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None and len(self.report.events) == self.compiled:
            self.calls.append((self.start, self.clock.moment()))
