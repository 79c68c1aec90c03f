"""Streaming of swapped blocks from their mapped file: when it is worthwhile, and at which rate."""

from dataclasses import dataclass


def worth_streaming(inside: int, needed: int, room: float) -> bool:
    """Return True if swapped blocks should stream from their file rather than from RAM.

    True if RAM has no `room` (bytes) for the bytes `inside` the file, and these are at least half of those `needed`.
    """
    return inside > max(0, room) and inside * 2 >= needed


@dataclass(frozen=True)
class FileBandwidth:
    """Rates of reading a model's blocks from its file.

    disk: bytes per second of pages outside the system's page cache.
    cache: bytes per second of pages in it.
    memory: bytes that the page cache may use.
    room: bytes of RAM that the blocks themselves may use.
    """

    disk: float
    cache: float
    memory: int
    room: float

    def speed(self, inside: int, turns: bool) -> float:
        """Return the bytes per second at which blocks of `inside` bytes are read from the file, pass after pass.

        turns: a pass goes forward and back, as a training step does. The blocks read last are in the cache. A pass that
        turns starts with them, so its hit rate is the part of the blocks that the cache has room for; one that starts
        over from the first block hits all or, as the cache evicts the oldest, almost nothing.
        """
        cached_share = min(1.0, self.memory / inside)
        if not turns and cached_share < 1.0:
            cached_share = 0.0
        return 1.0 / (cached_share / self.cache + (1.0 - cached_share) / self.disk)
