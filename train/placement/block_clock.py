"""Block clock: seconds that compiled blocks take in a run's own steps."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from types import TracebackType
from typing import Any

import torch

from ...compile.report.report import RegionReport

LEAST = 3  # calls of each structure, so that one that was held up does not count
MOST = 64  # that are kept while other structures were not met


class BlockClock:
    """Timer of the forward of compiled blocks, at the sizes at which they were measured eagerly.

    On a GPU events stand around each call, which hold nothing up. A call that compiled something does not count.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        """shapes: of the first input, by structure."""
        self.shapes, self.device = shapes, device
        self._taken: dict[str, list[tuple[Any, Any]]] = {structure: [] for structure in shapes}

    def time(self, structure: str, report: RegionReport, args: tuple[Any, ...]) -> "AbstractContextManager[None]":
        """Return a context for one call of a block with these inputs."""
        if tuple(args[0].shape) != self.shapes.get(structure) or len(self._taken[structure]) == MOST:
            return nullcontext()
        return _Call(self, self._taken[structure], report)

    def moment(self) -> Any:
        """Record a moment: an event in the GPU's queue, or the time of the CPU."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float] | None:
        """Return the median of each structure, None until each was met often enough. Waits for the GPU's events."""
        if any(len(taken) < LEAST for taken in self._taken.values()):
            return None
        return {structure: median(map(self._between, taken)) for structure, taken in self._taken.items()}

    def _between(self, call: tuple[Any, Any]) -> float:
        begun, ended = call
        if self.device.type != "cuda":
            return float(ended - begun)
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1000


class _Call:
    """One call under a clock, added to `taken` where it compiled nothing and raised nothing."""

    def __init__(self, clock: BlockClock, taken: list[tuple[Any, Any]], report: RegionReport):
        self.clock, self.taken, self.report = clock, taken, report

    def __enter__(self) -> None:
        self.compiled = len(self.report.events)
        self.begun = self.clock.moment()

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if kind is None and len(self.report.events) == self.compiled:
            self.taken.append((self.begun, self.clock.moment()))
