"""Block swap in training: stream the frozen weights of blocks that do not fit from the host.

Tensors that autograd saved from a slot are valid again when the block is back, so swapping needs no recompute. Slots
are written without autograd's knowledge, as its version counters would forbid it; instead the engine checks before and
after each backward that the slot holds the right block.
"""

import gc
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..host.flat_buffer import Layout, ScatteredBuffer
from ..host.flat_weights import SMALL_PART, WeightRef, into_flat, leave_flat, scattered
from ..host.page_locked import give_back, unlock
from ..weights.residency import FrozenModule
from .slot_ring import SlotRing


def frozen_modules(block: nn.Module) -> dict[str, FrozenModule]:
    """Collect the modules of a block that hold frozen weights, by name."""
    return {name: module for name, module in block.named_modules() if isinstance(module, FrozenModule)}


class BlockSwap:
    """Streams blocks through slots. The frozen tensors of the blocks start on the host and then point into slots.

    blocks: the swapped blocks, in the order of the forward.
    prefetch: number of blocks copied ahead.
    pinned: their flat buffers are page-locked.
    in_place: their tensors stay in their host memory, for instance in the mapped file, and move into no buffer.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, prefetch: int, pinned: bool, in_place: bool = False
    ):
        self.blocks = tuple(blocks)
        self.number = {id(block): j for j, block in enumerate(self.blocks)}
        self.refs = [_frozen_places(block) for block in self.blocks]
        self.layouts = [_layout(refs) for refs in self.refs]
        self._foreign: set[tuple[int, str]] = set()  # tensors that differ from the MODEL's: patched or cast
        self.ring = self._make_ring(device, prefetch, pinned, in_place)
        try:
            self.take()
        except BaseException:  # the slots do not fit
            self.end()
            raise

    def _make_ring(self, device: torch.device, prefetch: int, pinned: bool, in_place: bool) -> SlotRing:
        flat_weights = [
            scattered(refs, layout) if in_place else into_flat(refs, layout, pinned, self._repoint, later=True)
            for refs, layout in zip(self.refs, self.layouts, strict=True)
        ]
        ring = SlotRing(flat_weights, device, prefetch)
        if pinned and not in_place:
            ring.lock_meanwhile()
        return ring

    def held_bytes(self) -> int:
        """Return the bytes of the slots on the device."""
        return self.ring.slots.held_bytes()

    def take(self) -> None:
        """Allocate the slots and point the blocks at them."""
        self.ring.take()
        for j, (refs, layout) in enumerate(zip(self.refs, self.layouts, strict=True)):
            for ref, field in zip(refs, layout.fields, strict=True):
                ref.table[ref.attribute] = field.tensor_in(self.ring.slots.tensor(j))

    def release(self, last: bool = False) -> None:
        """Free the slots; the flat weights stay. last: the slots will not be allocated again."""
        for block in self.blocks:
            for module in frozen_modules(block).values():
                module.release()
        self.ring.release()

    def end(self) -> None:
        """Leave the MODEL only its own weights, in pageable memory.

        They are copied out of buffers that also hold patched or cast tensors, which are then freed, and out of buffers
        that remain page-locked while allocated.
        """
        self.ring.end_locking()
        gc.collect()  # the check before step 1 leaves reference cycles that hold buffers
        for j, (refs, layout) in enumerate(zip(self.refs, self.layouts, strict=True)):
            weights, self.ring.flat_weights[j] = self.ring.flat_weights[j], torch.empty(0, dtype=torch.uint8)
            if isinstance(weights, ScatteredBuffer):
                continue
            pairs = list(zip(refs, layout.fields, strict=True))
            foreign = sum(math.prod(f.shape) * f.dtype.itemsize for ref, f in pairs if self._is_foreign(ref))
            unlocked = unlock(weights)
            if unlocked and foreign < layout.size // SMALL_PART:
                continue
            tensors = ((ref, field.tensor_in(weights)) for ref, field in pairs if not self._is_foreign(ref))
            leave_flat(tensors, lambda *_: True, _relocate)
            if not unlocked:
                del weights
                give_back()

    def _is_foreign(self, ref: WeightRef) -> bool:
        return (id(ref.owner), ref.attribute) in self._foreign

    def _repoint(self, ref: WeightRef, tensor: Tensor, parts: list[Tensor]) -> None:
        """Record that a frozen buffer moved into a flat one; from here on it is read from its slot."""
        if _relocate(ref, tensor, parts):
            self._foreign.add((id(ref.owner), ref.attribute))
        ref.table[ref.attribute] = None

    def run(self, run: Any, block: nn.Module, *args: Any) -> Any:
        """Call `run(block, *args)` with the block on the device, in the forward and again in its backward."""
        j = self.number[id(block)]
        self.ring.forward(j)
        # Only these: all outputs of an autograd function require a gradient.
        needed = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        if not needed or not torch.is_grad_enabled():
            return run(block, *args)
        inputs = list(args)
        entered = _AfterBackward.apply(self.ring, j, *[args[i] for i in needed])
        for i, tensor in zip(needed, entered, strict=True):
            inputs[i] = tensor
        out = run(block, *inputs)
        if isinstance(out, Tensor):
            return _BeforeBackward.apply(self.ring, j, out)[0]
        return _BeforeBackward.apply(self.ring, j, *out)


def _frozen_places(block: nn.Module) -> list[WeightRef]:
    return [
        WeightRef(f"{owner}.{name}", module, module._buffers, name)
        for owner, module in frozen_modules(block).items()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _layout(refs: Sequence[WeightRef]) -> Layout:
    return Layout.from_tensors((ref.key, tensor) for ref in refs if (tensor := ref.tensor()) is not None)


def _relocate(ref: WeightRef, tensor: Tensor, parts: list[Tensor]) -> bool | None:
    """Notify the owning module of the buffer's new host memory; True if the MODEL's own weight differs from it."""
    assert isinstance(ref.owner, FrozenModule)
    return ref.owner.repoint(ref.attribute, tensor, parts[0])


class _BeforeBackward(torch.autograd.Function):
    """Wraps all outputs of a block: its backward runs before the block's own, whichever output has a gradient."""

    @staticmethod
    def forward(ctx, ring, j, *outputs):
        ctx.ring, ctx.j = ring, j
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in outputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.ring.backward(ctx.j)
        return None, None, *grads


class _AfterBackward(torch.autograd.Function):
    """Wraps all inputs of a block: its backward runs after the block's own."""

    @staticmethod
    def forward(ctx, ring, j, *inputs):
        ctx.ring, ctx.j = ring, j
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.ring.slots.check(ctx.j)
        return None, None, *grads
