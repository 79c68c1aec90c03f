"""Ring of fixed device slots through which blocks stream from the host, in the order in which they are used.

The flat weights on the host are never written. Block j always uses slot j mod K, so a tensor that autograd saved from a
slot is valid again once the block is back at its address. In a pass over S blocks that goes forward and back, the last
K are resident at the turn and the first K at the end: 2·(S − K) copies.
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
    """Copies to the device that overlap with computation. On a CPU copies are synchronous, in the same order."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, slot: Tensor, host: Any, after_copy: Callable[[], None] | None) -> Any:
        """Copy after all work queued so far, then call `after_copy` on the same stream; returns the argument of `wait`.

        slot: (n,) uint8, of at least as many bytes as the weights.

        No `record_stream` is needed. All readers of a slot are queued before it is written here, and the copy waits for
        them; later readers wait for the event; it is freed after `settle`. Memory that `after_copy` allocates belongs
        to this stream, and is reused only by work queued later on this stream.
        """
        if self.stream is None:
            self.fill(slot[: host.numel()], host)
            if after_copy is not None:
                after_copy()
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.fill(slot[: host.numel()], host)
            if after_copy is not None:
                after_copy()
            return self.stream.record_event()

    def fill(self, slot: Tensor, host: Any) -> None:
        """Queue the copy itself on the current stream. slot: (n,) uint8, of as many bytes as the weights."""
        slot.copy_(host, non_blocking=self.stream is not None)

    def wait(self, copied: Any) -> None:
        """Make all work queued from here on wait for that copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)

    def settle(self) -> None:
        """Block until no copy is in flight: then slots may be freed."""
        if self.stream is not None:
            self.stream.synchronize()

    def release(self) -> None:
        self.settle()


class Slots:
    """Device memory at fixed addresses that blocks share in turn: block j always uses slot j mod `count`.

    count: number of slots.
    size: bytes of one.
    tensors: the slots while they are allocated, (size,) bytes each.
    occupants: the block in each slot, or None.
    """

    def __init__(self, count: int, size: int, device: torch.device):
        self.count = count
        self.size = size
        self.device = device
        self.tensors: list[Tensor] = []
        self.occupants: list[int | None] = []
        self._copied: list[Any] = []  # of the last copy into each slot: the argument of the stream's `wait`

    def allocate(self) -> None:
        self.tensors = [empty_bytes(self.size, self.device) for _ in range(self.count)]
        self.invalidate()

    def free(self) -> None:
        self.tensors = []

    def held_bytes(self) -> int:
        return sum(slot.numel() for slot in self.tensors)

    def tensor(self, j: int) -> Tensor:
        """Return the slot of block j."""
        return self.tensors[j % self.count]

    def holds(self, j: int) -> bool:
        return self.occupants[j % self.count] == j

    def check(self, j: int) -> None:
        """Assert that the slot of block j holds block j."""
        occupant = self.occupants[j % self.count]
        assert occupant == j, f"slot {j % self.count} holds block {occupant} in place of {j}"

    def occupy(self, j: int, copied: Any) -> None:
        """Record that block j has been copied to its slot. copied: what the stream's `wait` takes."""
        self._copied[j % self.count] = copied
        self.occupants[j % self.count] = j

    def copied(self, j: int) -> Any:
        """Return what the stream's `wait` takes for the last copy into the slot of block j."""
        return self._copied[j % self.count]

    def invalidate(self) -> None:
        """Mark all slots as empty."""
        self.occupants = [None] * self.count
        self.forget_copies()

    def forget_copies(self) -> None:
        """Wait for no earlier copy: its stream has settled."""
        self._copied = [None] * self.count


class SlotRing:
    """Ring of slots that blocks stream through.

    flat_weights: flat host buffers of the blocks, or their substitutes, in the order of the forward.
    prefetch: number of blocks copied ahead; one more slot than that is used.
    finish(j): called after each copy of block j, on the stream of the copies.
    slots: the device memory.
    locking: page-locks the flat weights in the background; None once it has ended, or without it.
    stream: makes the copies; None chooses it by the memory of the flat weights.
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
        self.device = device
        self.prefetch = prefetch
        self.finish = finish
        largest = max(weights.numel() for weights in self.flat_weights)
        self.slots = Slots(min(prefetch + 1, len(self.flat_weights)), largest, device)
        staged = stream or staged_stream(flat_weights, device, finish is not None)
        self.stream: CopyStream | StagedStream = staged or CopyStream(device)
        self.locking: Locking | None = None
        self.refused = 0
        self.copies = 0
        self.bytes_copied = 0

    def accepts(self, flat_weights: Sequence[Tensor | ScatteredBuffer]) -> bool:
        """Return True if these may replace the flat weights.

        Scattered ones have to be gathered in a stage, and copies from memory that is not page-locked overlap with
        nothing.
        """
        if isinstance(self.stream, StagedStream):
            return True
        ready = self.stream.stream is None
        return all(isinstance(weights, Tensor) and (ready or weights.is_pinned()) for weights in flat_weights)

    def replace(self, flat_weights: Sequence[Tensor | ScatteredBuffer]) -> None:
        """Copy from these from here on: the same blocks in other host memory, or none once the slots are free."""
        self.flat_weights = list(flat_weights)

    def take(self) -> None:
        """Allocate the slots."""
        self.slots.allocate()
        self.invalidate()

    def invalidate(self) -> None:
        """Mark all slots as empty, so that every block is copied again."""
        self.slots.invalidate()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude copies within the context from the counters; afterwards every block is copied again."""
        counters = self.copies, self.bytes_copied
        try:
            yield
        finally:
            self.copies, self.bytes_copied = counters
            self.copy_anew()

    def copy_anew(self) -> None:
        """Copy every block again, whatever the slots hold."""
        self.invalidate()

    def release(self) -> None:
        """Free the slots; the flat weights stay."""
        self.stream.release()
        self.slots.free()

    def forward(self, j: int) -> None:
        """Bring block j to its slot for all work queued from here on, and prefetch those after it.

        The farthest of them, j + K - 1, takes the slot of block j - 1, whose computation is already queued; so it is
        copied while block j computes. The same holds at the turn and, in reverse, in the backward.
        """
        self._bring(j, range(j + 1, j + 1 + self.prefetch))

    def backward(self, j: int) -> None:
        """Bring block j to its slot, and prefetch those before it."""
        self._bring(j, range(j - 1, j - 1 - self.prefetch, -1))
        self.slots.check(j)

    def lock_meanwhile(self) -> None:
        """Start page-locking the flat weights in the background; until all are locked they go through a stage."""
        self.locking = Locking([weights for weights in self.flat_weights if isinstance(weights, Tensor)], self.device)

    def end_locking(self) -> None:
        """Stop locking. If all flat weights are locked, they are copied directly from here on."""
        locking, self.locking = self.locking, None
        if locking is None:
            return
        finished = locking.is_done()
        locking.end()
        self.refused = locking.failed
        if finished and not locking.failed and self.finish is None:
            self.stream.release()
            self.stream = CopyStream(self.device)
            self.slots.forget_copies()

    def take_refused(self) -> int:
        """Return the number of flat weights that could not be locked, once."""
        refused, self.refused = self.refused, 0
        return refused

    def _bring(self, j: int, ahead: Iterable[int]) -> None:
        if self.locking is not None and self.locking.is_done():
            self.end_locking()
        try:
            self._copy(j)
            for other in ahead:
                if 0 <= other < len(self.flat_weights):
                    self._copy(other)
            self.stream.wait(self.slots.copied(j))
        except BaseException:
            self.invalidate()  # a slot may hold a partial or unfinished copy
            raise

    def _copy(self, j: int) -> None:
        if self.slots.holds(j):
            return
        weights = self.flat_weights[j]
        finish = None if self.finish is None else lambda: self.finish(j)  # type: ignore[misc]
        self.slots.occupy(j, self.stream.copy(self.slots.tensor(j), weights, finish))
        self.copies += 1
        self.bytes_copied += weights.numel()
