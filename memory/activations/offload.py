"""Activation offload: with full checkpointing, what a block keeps for backward waits on the host.

Each block keeps its inputs only. They leave on a stream of their own while the next blocks compute, in the direction
of the link that block swap leaves idle, and come back one block ahead of their backward. The hooks stand around the
checkpoint, outside of what is compiled, so no graph changes. Only inputs that need a gradient leave: the others (the
modulation vector, positions) are one tensor for all blocks.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..host.flat_buffer import Layout, dense_stride, empty_bytes

IN_FLIGHT = 2  # tensors of as many blocks may be on their way out; then the computation waits for the oldest


class _Offloaded:
    """One tensor on the host. Its buffer goes back to the pool with it, when autograd lets it go."""

    def __init__(self, offload: "ActivationOffload", tensor: Tensor, turn: int):
        self.turn = turn
        layout = Layout.of([("", tensor)])
        self.field, self.device, self.size = layout.fields[0], tensor.device, layout.size
        self.buffer = offload.buffer(layout.size)
        self.bytes = tensor.numel() * tensor.element_size()
        self.fetched: tuple[Tensor, Any] | None = None
        weakref.finalize(self, offload.pool[layout.size].append, self.buffer).atexit = False


class ActivationOffload:
    """Wraps the runners of blocks. `bytes_out` and `bytes_in` count what went to the host and came back; `buffers` is
    how many host buffers were made, and `pageable` the bytes of those that could not be page-locked on a GPU's host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.last: int | None = None
        self.turn = 0
        self.bytes_out = self.bytes_in = self.buffers = self.pageable = 0
        self.warned = False
        self._offloaded: defaultdict[int, list[weakref.ref[_Offloaded]]] = defaultdict(list)
        self._storing: list[tuple[int, Tensor, Any]] = []
        self._fetching: dict[int, Tensor] = {}  # a backward that breaks off lets go of them while they are written

    def keep_on_device(self, block: Any) -> None:
        """The inputs of this block, the last one, stay on the device: they are needed again at once."""
        self.last = id(block)

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """run(block, *args), checkpointed in full, with the inputs that it keeps on the host."""

        def run_offloaded(block: Any, *args: Any) -> Any:
            if id(block) == self.last or not torch.is_grad_enabled():
                return run(block, *args)
            self.turn += 1
            turn = self.turn
            self._release_until(turn - IN_FLIGHT)
            leaving = {a.data_ptr() for a in args if isinstance(a, Tensor) and a.requires_grad and _is_dense(a)}

            def pack(tensor: Tensor) -> Any:
                return self._store(tensor, turn) if tensor.data_ptr() in leaving else tensor

            with saved_tensors_hooks(pack, self._unpack):
                return run(block, *args)

        return run_offloaded

    def buffer(self, size: int) -> Tensor:
        """A host buffer; those of the step before are used again."""
        if self.pool[size]:
            return self.pool[size].pop()
        self.buffers += 1
        made = empty_bytes(size, torch.device("cpu"), pinned=self.stream is not None)
        self.pageable += 0 if self.stream is None or made.is_pinned() else size
        return made

    def message(self) -> str | None:
        """One sentence, once, where page-locked memory could not be had."""
        if self.warned or not self.pageable:
            return None
        self.warned = True
        return (
            f"offload_activations: {self.pageable / 2**30:.2f} GB of RAM could not be page-locked, so what leaves the "
            "GPU holds up the step; free some RAM, or set offload_activations off."
        )

    def _release_until(self, turn: int) -> None:
        """The computation goes on when what was stored up to `turn` is out, whose memory is free then. Letting go of it
        sooner would ask the allocator to watch another stream, and it sees that only when the host has caught up."""
        while self._storing and self._storing[0][0] <= turn:
            _, _, stored = self._storing.pop(0)
            if stored is not None:
                torch.cuda.current_stream(self.device).wait_event(stored)

    def _store(self, tensor: Tensor, turn: int) -> _Offloaded:
        offloaded = _Offloaded(self, tensor, turn)
        source = tensor.detach()
        self._storing.append((turn, source, self._copy(offloaded.field.on(offloaded.buffer), source)))
        self._offloaded[turn].append(weakref.ref(offloaded))
        self.bytes_out += offloaded.bytes
        return offloaded

    def _fetch(self, offloaded: _Offloaded) -> tuple[Tensor, Any]:
        """The tensor on the device and what to wait for. One that was asked for before is there or on its way."""
        if offloaded.fetched is None:
            there = offloaded.field.on(empty_bytes(offloaded.size, offloaded.device))
            self._fetching[id(offloaded)] = there
            offloaded.fetched = there, self._copy(there, offloaded.field.on(offloaded.buffer))
            self.bytes_in += offloaded.bytes
        return offloaded.fetched

    def _unpack(self, offloaded: Any) -> Tensor:
        if isinstance(offloaded, Tensor):
            return offloaded
        self._release_until(self.turn)
        there, fetched = self._fetch(offloaded)
        for other in self._offloaded.pop(offloaded.turn - 1, ()):
            if (ahead := other()) is not None:
                self._fetch(ahead)
        self._offloaded.pop(offloaded.turn, None)
        if fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(fetched)
        self._fetching.pop(id(offloaded), None)
        return there

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copies after everything that was computed so far, and after the copies before; returns its event."""
        with torch.no_grad():
            if self.stream is None:
                target.copy_(source)
                return None
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                target.copy_(source, non_blocking=True)
                return self.stream.record_event()

    def forget(self) -> None:
        """After a step that broke off: nothing of it is on its way any more."""
        if self.stream is not None:
            self.stream.synchronize()
        self._storing.clear()
        self._fetching.clear()
        self._offloaded.clear()


def _is_dense(tensor: Tensor) -> bool:
    """Fills its memory in some order, so that the copy has the same strides: a recompute has to see the same layout."""
    return tuple(tensor.stride()) == dense_stride(tensor)
