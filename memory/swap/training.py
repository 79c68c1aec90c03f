"""Block swap in training: the frozen weights of blocks that do not fit stream from the host.

What autograd saved out of a slot is valid again when the block is back, so nothing has to be computed again for the
sake of swapping. A slot is written behind autograd's back, which its version counters would forbid; in their place the
engine checks before and after each backward that the slot holds the right block.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..host.flat_buffer import Field, Layout, Pieces, empty_bytes, trim_heap
from ..host.flat_weights import SMALL_PART
from ..host.page_locked import give_back, unlock
from ..weights.residency import FrozenModule
from .slot_ring import SlotRing


def frozen_modules(block: nn.Module) -> dict[str, FrozenModule]:
    return {name: module for name, module in block.named_modules() if isinstance(module, FrozenModule)}


class BlockSwap:
    """Streams blocks through slots. The blocks come with their frozen tensors on the host and leave with them in slots.

    blocks: those that are swapped, in the order of the forward. prefetch: how many are copied ahead. as_they_lie: their
    tensors stay where they are on the host, for instance in the mapped file, in place of moving into flat buffers.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, prefetch: int, pinned: bool, as_they_lie: bool = False
    ):
        self.blocks = tuple(blocks)
        self.number = {id(block): j for j, block in enumerate(self.blocks)}
        self.layouts = [Layout.of(_frozen_tensors(block)) for block in self.blocks]
        moved: list[tuple[Tensor | Pieces, set[str]]] = [
            (Pieces(layout, tuple(t for _, t in _frozen_tensors(block))), set())
            if as_they_lie
            else _into_flat(block, layout, pinned)
            for block, layout in zip(self.blocks, self.layouts, strict=True)
        ]
        self.ring = SlotRing([master for master, _ in moved], device, prefetch)
        self._beside = [beside for _, beside in moved]
        try:
            self.take()
        except BaseException:  # the slots do not fit
            self.end()
            raise

    def held_bytes(self) -> int:
        """What the slots take on the device."""
        return self.ring.held_bytes()

    def take(self) -> None:
        """Makes the slots and points the blocks at them."""
        self.ring.take()
        for j, (block, layout) in enumerate(zip(self.blocks, self.layouts, strict=True)):
            modules = frozen_modules(block)
            for field in layout.fields:
                owner, _, name = field.name.rpartition(".")
                modules[owner]._buffers[name] = field.on(self.ring.slot_of(j))

    def release(self) -> None:
        """Gives the slots' memory back; the masters stay."""
        for block in self.blocks:
            for module in frozen_modules(block).values():
                module.release()
        self.ring.release()

    def end(self) -> None:
        """Leaves the MODEL its own weights, in ordinary memory, and no more: they leave the buffers that hold others
        too, patched or cast ones, which go then, and those that stay page-locked for as long as they are there."""
        for j, (block, layout, beside) in enumerate(zip(self.blocks, self.layouts, self._beside, strict=True)):
            foreign = sum(math.prod(f.shape) * f.dtype.itemsize for f in layout.fields if f.name in beside)
            master, self.ring.masters[j] = self.ring.masters[j], torch.empty(0, dtype=torch.uint8)
            if isinstance(master, Pieces):
                continue
            unlocked = unlock(master)
            if unlocked and foreign < layout.size // SMALL_PART:
                continue
            _leave(block, [field for field in layout.fields if field.name not in beside], master)
            if not unlocked:
                del master
                give_back()

    def run(self, run: Any, block: nn.Module, *args: Any) -> Any:
        """`run(block, *args)` with the block on the device, in the forward and again in its backward."""
        j = self.number[id(block)]
        self.ring.forward(j)
        # The others stay out of it: a function's outputs all require a gradient.
        needed = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]
        if not needed or not torch.is_grad_enabled():
            return run(block, *args)
        entered = dict(zip(needed, _AfterBackward.apply(self.ring, j, *(args[i] for i in needed)), strict=True))
        out = run(block, *(entered.get(i, a) for i, a in enumerate(args)))
        if isinstance(out, Tensor):
            return _BeforeBackward.apply(self.ring, j, out)[0]
        return _BeforeBackward.apply(self.ring, j, *out)


def _frozen_tensors(block: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{owner}.{name}", tensor)
        for owner, module in frozen_modules(block).items()
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _into_flat(block: nn.Module, layout: Layout, pinned: bool) -> tuple[Tensor, set[str]]:
    """The block's tensors moved into one flat buffer on the host, each let go before the next is read; and the names of
    those that the MODEL has otherwise."""
    flat = empty_bytes(layout.size, torch.device("cpu"), pinned)
    modules, beside = frozen_modules(block), set()
    for field in layout.fields:
        owner, _, name = field.name.rpartition(".")
        module = modules[owner]
        source, moved = module._buffers[name], field.on(flat)
        assert source is not None
        moved.copy_(source)
        if module.moved(name, source, moved):
            beside.add(field.name)
        module._buffers[name] = None
        del source
    trim_heap()
    return flat, beside


def _leave(block: nn.Module, fields: Sequence[Field], master: Tensor) -> None:
    """The MODEL has copies of these in ordinary memory from here on."""
    modules = frozen_modules(block)
    for field in fields:
        owner, _, name = field.name.rpartition(".")
        source = field.on(master)
        modules[owner].moved(name, source, source.clone())


class _BeforeBackward(torch.autograd.Function):
    """Stands over all outputs of a block: its backward runs before the block's own, whichever output has a gradient."""

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
    """Stands over all inputs of a block: its backward runs when the block's own is done."""

    @staticmethod
    def forward(ctx, ring, j, *inputs):
        ctx.ring, ctx.j = ring, j
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx, *grads):
        ctx.ring.check(ctx.j)
        return None, None, *grads
