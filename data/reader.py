"""Reads the samples of the next step while this one computes."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .samples import Choice, Sample, SampleTensors

Shown = tuple[int, Choice]
"""A sample by its index, and the form of it that is shown."""


class SampleReader:
    """A thread that reads ahead. The GPU would otherwise wait for the disk between two steps."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tessera-reader")
        self._ahead: dict[Shown, Future[SampleTensors]] = {}

    def want(self, wanted: Iterable[Shown]) -> None:
        """Starts reading these, keeps those among them that are read already, and drops all others."""
        ahead: dict[Shown, Future[SampleTensors]] = {}
        for shown in dict.fromkeys(wanted):
            index, choice = shown
            ahead[shown] = self._ahead.get(shown) or self._pool.submit(self._samples[index].load, choice)
        self._ahead = ahead

    def read(self, shown: Shown) -> SampleTensors:
        """The sample's tensors; waits for the thread where it is at it, and raises what reading raised."""
        future = self._ahead.get(shown)
        return self._samples[shown[0]].load(shown[1]) if future is None else future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()
