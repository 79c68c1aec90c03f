"""Swapped blocks sharded over the devices of one machine: each rank keeps a piece of every block; slots are gathered.

All ranks have to take part in each gather, in the same order, whatever each computes: one may run more forwards than
another, stop its backward earlier, or compute nothing. So the ring goes through all its blocks in sweeps, forward or
backward. Before each sweep the ranks meet and exchange their requests. If these differ, forward comes first, and ranks
that requested something else go through that sweep without computing. Finished ranks take part until all are finished.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ..host.flat_buffer import Layout, empty_bytes
from ..host.flat_weights import WeightRef, parts_of
from .plan import piece_bytes
from .slot_ring import CopyStream, SlotRing
from .training import BlockSwap

FORWARD = "forward"
BACKWARD = "backward"
DONE = "done"
SMALLER = "smaller"


class Peers(Protocol):
    """Ranks that share blocks.

    count: number of ranks.
    index: index of this rank among them.
    """

    count: int
    index: int

    def gather(self, output: Tensor, piece: Tensor) -> None:
        """Queue a gather of all ranks' pieces on the current stream. output: (count·n,), piece: (n,), bytes."""
        ...

    def barrier(self, request: str, fresh: bool) -> list[tuple[str, bool]]:
        """Wait for all ranks. Returns their arguments, by index. Raises if one aborts or does not arrive."""
        ...

    def abort(self, complete: bool) -> None:
        """Announce that this rank passes no further barrier.

        complete: it has queued all gathers of the current sweep.
        """
        ...


class OutOfMemoryElsewhere(torch.OutOfMemoryError):
    """Another rank is out of memory, and all ranks that share blocks have to go on with a smaller plan."""


@dataclass(frozen=True)
class ShardedBuffer:
    """Substitute for a flat buffer of which this rank has a piece.

    piece: (n,) uint8 on the device, bytes of the buffer.
    count: number of equally sized pieces.
    """

    piece: Tensor
    count: int

    def numel(self) -> int:
        return self.piece.numel() * self.count

    def is_pinned(self) -> bool:
        return False


class GatherStream(CopyStream):
    """Fills slots by gathering the ranks' pieces."""

    def __init__(self, device: torch.device, peers: Peers):
        super().__init__(device)
        self.peers = peers

    def fill(self, slot: Tensor, host: ShardedBuffer) -> None:
        self.peers.gather(slot, host.piece)


class ShardedRing(SlotRing):
    """Slot ring that all ranks fill together, sweep by sweep.

    A sweep gathers all blocks in the order of the forward, or in reverse; every rank makes the same copies, as the
    slots have the same contents on all ranks.
    """

    flat_weights: list[ShardedBuffer]  # type: ignore[assignment]

    def __init__(self, pieces: Sequence[ShardedBuffer], device: torch.device, prefetch: int, peers: Peers):
        self.peers = peers
        self.fresh = True
        self.is_aborted = False
        self.direction, self.position = "", 0  # current sweep, and the number of its blocks brought to slots
        super().__init__(pieces, device, prefetch, stream=GatherStream(device, peers))  # type: ignore[arg-type]

    def invalidate(self) -> None:
        super().invalidate()
        self.fresh = True  # the other ranks invalidate their slots too at the next barrier

    def copy_anew(self) -> None:
        """Invalidate all slots at the next sweep: an aborted one still runs to its end, as on the other ranks."""
        self.fresh = True

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        with super().uncounted():
            yield
            self._end_sweep()

    def forward(self, j: int) -> None:
        self._reach(FORWARD, j, j)

    def backward(self, j: int) -> None:
        self._reach(BACKWARD, len(self.flat_weights) - 1 - j, j)
        self.slots.check(j)

    def _reach(self, direction: str, number: int, j: int) -> None:
        """Bring block j, the `number`th of a sweep in this direction, to its slot."""
        if direction != self.direction or number < self.position - 1:
            self._end_sweep()
            while self._begin_sweep(direction) != direction:
                self._end_sweep()
        self._walk(number + 1)
        self.stream.wait(self.slots.copied(j))

    def _begin_sweep(self, request: str) -> str:
        """Begin the next sweep on all ranks; returns its direction, or DONE or SMALLER."""
        arguments = self.peers.barrier(request, self.fresh)
        if any(fresh for _, fresh in arguments):
            super().invalidate()
            self.fresh = False
        requests = [rank_request for rank_request, _ in arguments]
        if SMALLER in requests:
            if request != SMALLER:
                raise OutOfMemoryElsewhere("Another device is out of memory.")
            return SMALLER
        direction = next((candidate for candidate in (FORWARD, BACKWARD) if candidate in requests), DONE)
        self.direction, self.position = ("" if direction == DONE else direction), 0
        return direction

    def _walk(self, end: int) -> None:
        """Bring the sweep's first `end` blocks to their slots, and prefetch those after them."""
        blocks, back = len(self.flat_weights), self.direction == BACKWARD
        while self.position < end:
            for number in range(self.position, min(blocks, self.position + 1 + self.prefetch)):
                self._copy(blocks - 1 - number if back else number)
            self.position += 1

    def _end_sweep(self) -> None:
        if self.direction:
            self._walk(len(self.flat_weights))
            self.direction, self.position = "", 0

    def end_work(self) -> None:
        """Take part in the other ranks' sweeps until no rank has anything to compute."""
        self._end_sweep()
        while self._begin_sweep(DONE) != DONE:
            self._end_sweep()

    def ask_for_less(self) -> None:
        """Make all ranks stop and go on with a smaller plan: the others raise `OutOfMemoryElsewhere`."""
        self._end_sweep()
        while self._begin_sweep(SMALLER) != SMALLER:
            self._end_sweep()

    def abort(self) -> None:
        """Let the other ranks begin no further sweep; the current one is finished with them."""
        if not self.is_aborted:
            self.is_aborted = True
            try:
                self._end_sweep()
            except BaseException:
                self.peers.abort(complete=False)
                raise
            self.peers.abort(complete=True)


class ShardedSwap(BlockSwap):
    """Block swap whose blocks are sharded over the devices of all ranks. The MODEL's own weights are unchanged.

    While the device is needed for something else the pieces are kept in host memory.
    """

    ring: ShardedRing

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device, prefetch: int, peers: Peers):
        self.peers = peers
        super().__init__(blocks, device, prefetch, pinned=False)

    def _make_ring(self, device: torch.device, prefetch: int, pinned: bool, in_place: bool) -> SlotRing:
        pairs = zip(self.refs, self.layouts, strict=True)
        pieces = [_piece(refs, layout, device, self.peers) for refs, layout in pairs]
        return ShardedRing(pieces, device, prefetch, self.peers)

    def held_bytes(self) -> int:
        """Return the bytes of the slots and the pieces on the device."""
        device = self.ring.device.type
        pieces = [weights.piece for weights in self.ring.flat_weights]
        return self.ring.slots.held_bytes() + sum(piece.numel() for piece in pieces if piece.device.type == device)

    def take(self) -> None:
        self._move(self.ring.device)
        super().take()

    def release(self, last: bool = False) -> None:
        super().release(last)
        if last:
            self.end()
        else:
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        weights = self.ring.flat_weights
        for j, buffer in enumerate(weights):
            weights[j] = replace(buffer, piece=buffer.piece.to(device))

    def end(self) -> None:
        """Free the pieces."""
        self.ring.replace([])


def _piece(refs: Sequence[WeightRef], layout: Layout, device: torch.device, peers: Peers) -> ShardedBuffer:
    """Put this rank's piece of a block on the device, and remove the block's tensors from its modules."""
    size = piece_bytes(layout.size, peers.count)
    first = size * peers.index
    flat = empty_bytes(size * peers.count, torch.device("cpu"))  # only written pages take memory
    for ref, field in zip(refs, layout.fields, strict=True):
        tensor = ref.tensor()
        assert tensor is not None
        if field.offset < first + size and field.offset + tensor.nbytes > first:
            (part,) = parts_of(tensor)
            field.tensor_in(flat).copy_(torch.zeros_like(part, device="cpu") if part.is_meta else part)
        ref.table[ref.attribute] = None
        del tensor
    piece = empty_bytes(size, device)
    piece.copy_(flat[first : first + size])
    return ShardedBuffer(piece, peers.count)
