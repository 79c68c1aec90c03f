"""Reads the samples of the next step while this one computes."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from .data import Sample, SampleTensors


class SampleReader:
    """A thread that reads ahead. The GPU would otherwise wait for the disk between two steps."""

    def __init__(self, samples: Sequence[Sample]):
        self._samples = samples
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tessera-reader")
        self._ahead: dict[int, Future[SampleTensors]] = {}

    def want(self, indices: Iterable[int]) -> None:
        """Starts reading these, keeps those among them that are read already, and drops all others."""
        ahead: dict[int, Future[SampleTensors]] = {}
        for index in dict.fromkeys(indices):
            ahead[index] = self._ahead.get(index) or self._pool.submit(self._samples[index].load)
        self._ahead = ahead

    def read(self, index: int) -> SampleTensors:
        """The sample's tensors; waits for the thread where it is at it, and raises what reading raised."""
        future = self._ahead.get(index)
        return self._samples[index].load() if future is None else future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()
