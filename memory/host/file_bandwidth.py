"""When swapped blocks stream straight from the mapped file that they lie in, and how fast that is."""

from dataclasses import dataclass


def worth_streaming(inside: int, needed: int, room: float) -> bool:
    """Whether swapped blocks of `needed` bytes, of which `inside` lie in a mapped file, stream from there: where RAM
    has no `room` for these bytes, which are no less than half of all."""
    return inside > max(0, room) and inside * 2 >= needed


@dataclass(frozen=True)
class FileBandwidth:
    """What is known of reading the blocks of a model from its file. disk, cache: bytes per second, of what the system's
    cache of files does not hold and of what it holds; memory: bytes that the cache may take; room: bytes of RAM that
    the blocks may take themselves."""

    disk: float
    cache: float
    memory: int
    room: float

    def speed(self, inside: int, turns: bool) -> float:
        """Bytes per second at which blocks of `inside` bytes come out of the file, pass after pass. turns: whether a
        pass goes forward and back, as a training step does.

        What was read last is in the cache. A pass that turns begins with it, and so finds as large a part of the blocks
        as the cache has room for; one that begins again at the start finds all or, as a cache lets the oldest go, next
        to nothing.
        """
        held = min(1.0, self.memory / inside)
        if not turns and held < 1.0:
            held = 0.0
        return 1.0 / (held / self.cache + (1.0 - held) / self.disk)
