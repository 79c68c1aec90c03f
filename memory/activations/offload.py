"""Activation offload: with full checkpointing, the saved inputs of each block wait on the host for its backward.

They leave on a stream of their own while the next blocks compute, in the direction of the link that block swap leaves
idle, and come back one block ahead of their backward. The hooks stand around the checkpoint, outside of what is
compiled, so no graph changes. Only inputs that need a gradient leave: the others (the modulation vector, positions) are
one tensor for all blocks.
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
    """One tensor on the host. Its buffer returns to the pool when autograd frees the tensor."""

    def __init__(self, offload: "ActivationOffload", tensor: Tensor, turn: int):
        self.turn = turn
        layout = Layout.of([("", tensor)])
        self.field, self.device, self.size = layout.fields[0], tensor.device, layout.size
        self.buffer = offload.buffer(layout.size)
        self.bytes = tensor.numel() * tensor.element_size()
        self.fetched: tuple[Tensor, Any] | None = None
        weakref.finalize(self, offload.pool[layout.size].append, self.buffer).atexit = False


class ActivationOffload:
    """Wraps the runners of blocks.

    bytes_out, bytes_in: bytes copied to the host and back.
    buffers: host buffers made.
    pageable: bytes of those that could not be page-locked on a GPU's host.
    """

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
        """Keep the inputs of this block, the last one, on the device: its backward comes next."""
        self.last = id(block)

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap run(block, *args), which checkpoints in full, so that its saved inputs go to the host."""

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
        """Take a host buffer of `size` bytes from the pool; those of the step before are used again."""
        if self.pool[size]:
            return self.pool[size].pop()
        self.buffers += 1
        made = empty_bytes(size, torch.device("cpu"), pinned=self.stream is not None)
        self.pageable += 0 if self.stream is None or made.is_pinned() else size
        return made

    def message(self) -> str | None:
        """Return one sentence, once, where page-locked memory could not be had."""
        if self.warned or not self.pageable:
            return None
        self.warned = True
        return (
            f"offload_activations: {self.pageable / 2**30:.2f} GB of RAM could not be page-locked, so copies from the "
            "GPU slow each step down; free some RAM, or set offload_activations off."
        )

    def _release_until(self, turn: int) -> None:
        """Let the computation wait until what was stored up to `turn` is out, and free its device memory.

        Freeing it sooner would ask the allocator to watch another stream (`record_stream`), and it sees an end there
        only when the host has caught up.
        """
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
        """Return the tensor on the device and the event to wait for; one that was prefetched is there or on its way."""
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
        """Copy after everything computed so far and after the copies before; returns the copy's event."""
        with torch.no_grad():
            if self.stream is None:
                target.copy_(source)
                return None
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                target.copy_(source, non_blocking=True)
                return self.stream.record_event()

    def drop_broken_step(self) -> None:
        """Drop the state of a step that broke off, once none of its copies is under way."""
        if self.stream is not None:
            self.stream.synchronize()
        self._storing.clear()
        self._fetching.clear()
        self._offloaded.clear()


def _is_dense(tensor: Tensor) -> bool:
    """Return True if it fills its memory in some order.

    The copy has the same strides then: a recompute has to see the same layout.
    """
    return tuple(tensor.stride()) == dense_stride(tensor)
