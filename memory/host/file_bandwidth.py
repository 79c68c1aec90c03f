"""Streaming of swapped blocks from the mapped file that they lie in: when it pays, and at which rate."""

from dataclasses import dataclass


def worth_streaming(inside: int, needed: int, room: float) -> bool:
    """Return True if swapped blocks stream from their file rather than from RAM.

    That is where RAM has no `room` (bytes) for the bytes `inside` the file, and these are no less than half of the
    bytes `needed`.
    """
    return inside > max(0, room) and inside * 2 >= needed


@dataclass(frozen=True)
class FileBandwidth:
    """Rates of reading a model's blocks from its file.

    disk: bytes per second of what the system's page cache does not hold.
    cache: bytes per second of what it holds.
    memory: bytes that the page cache may take.
    room: bytes of RAM that the blocks may take themselves.
    """

    disk: float
    cache: float
    memory: int
    room: float

    def speed(self, inside: int, turns: bool) -> float:
        """Return bytes per second at which blocks of `inside` bytes come out of the file, pass after pass.

        turns: a pass goes forward and back, as a training step does. What was read last is in the cache. A pass that
        turns begins with it, and so finds as large a part of the blocks as the cache has room for; one that begins
        again at the start finds all or, as a cache lets the oldest go, next to nothing.
        """
        held = min(1.0, self.memory / inside)
        if not turns and held < 1.0:
            held = 0.0
        return 1.0 / (held / self.cache + (1.0 - held) / self.disk)
