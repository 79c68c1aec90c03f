"""Fixed slots on the device through which blocks stream from the host, in the order in which they are used.

The flat weights on the host are never written. Block number j always uses slot j mod K, so a tensor that was saved out
of a slot is valid again once the block is back at its address. In a pass over S blocks that goes forward and back, the
last K are there at the turn and the first K at the end: 2·(S − K) copies.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..host.flat_buffer import ScatteredBuffer, empty_bytes
from ..host.locking import Locking
from ..host.staging import StagedStream, staged_stream


class CopyStream:
    """Copies to the device that overlap with computation. On a CPU copies are made at once, in the same order."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, slot: Tensor, host: Any, then: Callable[[], None] | None) -> Any:
        """Copy after everything computed so far, then call `then` on the same stream; returns what `wait` takes.

        No `record_stream` is needed. A slot is written here only when all that has read it is queued before, which the
        copy waits for, and is read only behind the event; it is freed after `settle`. What `then` allocates belongs to
        this stream, and is taken again by work that is queued on this stream behind it.
        """
        if self.stream is None:
            self.fill(slot[: host.numel()], host)
            if then is not None:
                then()
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.fill(slot[: host.numel()], host)
            if then is not None:
                then()
            return self.stream.record_event()

    def fill(self, slot: Tensor, host: Any) -> None:
        """Queue the copy itself on the current stream. slot: as many bytes as the weights have."""
        slot.copy_(host, non_blocking=self.stream is not None)

    def wait(self, copied: Any) -> None:
        """Let everything computed from here on start after that copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def settle(self) -> None:
        """Block until no copy is under way: slots may be freed then."""
        if self.stream is not None:
            self.stream.synchronize()

    def release(self) -> None:
        self.settle()


class SlotRing:
    """Ring of slots that blocks stream through.

    flat_weights: flat host buffers of the blocks, or their stand-ins, in the order of the forward.
    prefetch: blocks copied ahead; one slot more than that is used.
    finish(j): called after each copy of block j, on the stream of the copies.
    locking: page-locks the flat weights meanwhile; None once they all are, or are left as they are.
    stream: makes the copies; None chooses by where the flat weights lie.
    refused: flat weights that could not be locked.
    copies, bytes_copied: counters.
    """

    def __init__(
        self,
        flat_weights: Sequence[Tensor | ScatteredBuffer],
        device: torch.device,
        prefetch: int,
        finish: Callable[[int], None] | None = None,
        stream: CopyStream | None = None,
    ):
        assert prefetch >= 1 and flat_weights
        self.flat_weights: list[Tensor | ScatteredBuffer] = list(flat_weights)
        self.device, self.prefetch, self.finish = device, prefetch, finish
        self.count = min(prefetch + 1, len(self.flat_weights))
        self.slot_bytes = max(weights.numel() for weights in self.flat_weights)
        staged = stream or staged_stream(flat_weights, device, finish is not None)
        self.stream: CopyStream | StagedStream = staged or CopyStream(device)
        self.locking: Locking | None = None
        self.refused = 0
        self.copies = 0
        self.bytes_copied = 0
        self.slots: list[Tensor] = []
        self.occupants: list[int | None] = []
        self._copied: list[Any] = []

    def accepts(self, flat_weights: Sequence[Tensor | ScatteredBuffer]) -> bool:
        """Return True if these may come in the place of the flat weights.

        Scattered ones have to come together in a stage, and copies from memory that is not page-locked overlap with
        nothing.
        """
        if isinstance(self.stream, StagedStream):
            return True
        ready = self.stream.stream is None
        return all(isinstance(weights, Tensor) and (ready or weights.is_pinned()) for weights in flat_weights)

    def take(self) -> None:
        """Allocate the slots."""
        self.slots = [empty_bytes(self.slot_bytes, self.device) for _ in range(self.count)]
        self.invalidate()

    def invalidate(self) -> None:
        """Have every block copied again."""
        self.occupants = [None] * self.count
        self._copied = [None] * self.count

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out of the counters what is copied within the context, after which every block is copied again."""
        before = self.copies, self.bytes_copied
        try:
            yield
        finally:
            self.copies, self.bytes_copied = before
            self.copy_anew()

    def copy_anew(self) -> None:
        """Have every block copied again, whatever the slots hold."""
        self.invalidate()

    def release(self) -> None:
        """Free the slots; the flat weights stay."""
        self.stream.release()
        self.slots = []

    def held_bytes(self) -> int:
        return sum(slot.numel() for slot in self.slots)

    def slot_of(self, j: int) -> Tensor:
        return self.slots[j % self.count]

    def forward(self, j: int) -> None:
        """Bring block j to its slot for what is computed from here on; those behind it are copied meanwhile.

        The farthest of them, j + K - 1, goes where block j - 1 was, whose computation is queued by now; so block j
        computes while it comes. The same holds at the turn and, the other way round, in the backward.
        """
        self._bring(j, range(j + 1, j + 1 + self.prefetch))

    def backward(self, j: int) -> None:
        """Do the same, with the blocks before it."""
        self._bring(j, range(j - 1, j - 1 - self.prefetch, -1))
        self.check(j)

    def lock_meanwhile(self) -> None:
        """Begin to page-lock the flat weights, which go through a stage until all of them are."""
        self.locking = Locking([weights for weights in self.flat_weights if isinstance(weights, Tensor)], self.device)

    def end_locking(self) -> None:
        """Stop locking. Where all flat weights are locked they are copied as they lie from here on."""
        locking, self.locking = self.locking, None
        if locking is None:
            return
        finished = locking.is_done()
        locking.end()
        self.refused = locking.failed
        if finished and not locking.failed and self.finish is None:
            self.stream.release()
            self.stream, self._copied = CopyStream(self.device), [None] * self.count

    def _bring(self, j: int, ahead: Iterable[int]) -> None:
        if self.locking is not None and self.locking.is_done():
            self.end_locking()
        try:
            self._copy(j)
            for other in ahead:
                if 0 <= other < len(self.flat_weights):
                    self._copy(other)
            self.stream.wait(self._copied[j % self.count])
        except BaseException:
            self.invalidate()  # a slot may hold half a copy, or one that is not finished
            raise

    def _copy(self, j: int) -> None:
        slot = j % self.count
        if self.occupants[slot] == j:
            return
        weights = self.flat_weights[j]
        finish = None if self.finish is None else lambda: self.finish(j)  # type: ignore[misc]
        self._copied[slot] = self.stream.copy(self.slots[slot], weights, finish)
        self.occupants[slot] = j
        self.copies += 1
        self.bytes_copied += weights.numel()

    def check(self, j: int) -> None:
        """Assert that the slot of block j holds block j."""
        held = self.occupants[j % self.count]
        assert held == j, f"slot {j % self.count} holds block {held} in place of {j}"
