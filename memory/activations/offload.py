"""Activation offload: with full checkpointing, keep the saved inputs of each block on the host until its backward.

They are copied out on a separate stream while the next blocks compute, in the link direction that block swap leaves
idle, and are prefetched one block ahead of their backward. The hooks wrap the checkpoint, outside the compiled code, so
no graph changes. Only inputs that require a gradient are offloaded: the others (the modulation vector, positions) are
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

IN_FLIGHT = 2  # blocks whose tensors may be in transit to the host before the computation waits for the oldest


class _Offloaded:
    """One tensor offloaded to the host. Its buffer returns to the pool when autograd frees the tensor."""

    def __init__(self, offload: "ActivationOffload", tensor: Tensor, turn: int):
        self.turn = turn
        layout = Layout.from_tensors([("", tensor)])
        self.field = layout.fields[0]
        self.device = tensor.device
        self.size = layout.size
        self.buffer = offload.pool.take(layout.size, pinned=offload.stream is not None)
        self.bytes = tensor.numel() * tensor.element_size()
        self.fetched: tuple[Tensor, Any] | None = None
        weakref.finalize(self, offload.pool.free[layout.size].append, self.buffer).atexit = False

    def hold_fetched(self, device_copy: Tensor, copied: Any) -> tuple[Tensor, Any]:
        """Hold the copy on the device until the backward, and return both. copied: the event of its end."""
        self.fetched = device_copy, copied
        return self.fetched


class HostPool:
    """Host buffers, which are reused from step to step.

    free: those that hold nothing, by their bytes.
    buffers: the number allocated.
    pageable: bytes of those that could not be page-locked as intended.
    """

    def __init__(self) -> None:
        self.free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.buffers = self.pageable = 0
        self.warned = False

    def take(self, size: int, pinned: bool) -> Tensor:
        """Return a buffer, (size,) uint8. pinned: page-lock a new one."""
        if self.free[size]:
            return self.free[size].pop()
        self.buffers += 1
        buffer = empty_bytes(size, torch.device("cpu"), pinned=pinned)
        self.pageable += size if pinned and not buffer.is_pinned() else 0
        return buffer

    def message(self) -> str | None:
        """Return one sentence, once, if page-locked memory could not be allocated."""
        if self.warned or not self.pageable:
            return None
        self.warned = True
        return (
            f"offload_activations: {self.pageable / 2**30:.2f} GB of RAM could not be page-locked, so copies from the "
            "GPU slow each step down; free some RAM, or set offload_activations off."
        )


class ActivationOffload:
    """Wraps the functions that run blocks.

    pool: the host memory.
    bytes_out, bytes_in: bytes copied to the host and back.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pool = HostPool()
        self.last: int | None = None
        self.turn = 0
        self.bytes_out = self.bytes_in = 0
        self._offloaded: defaultdict[int, list[weakref.ref[_Offloaded]]] = defaultdict(list)
        self._storing: list[tuple[int, Tensor, Any]] = []
        self._fetching: dict[int, Tensor] = {}  # an aborted backward drops its references while copies still write

    def keep_on_device(self, block: Any) -> None:
        """Keep the inputs of the last block on the device, as its backward comes next."""
        self.last = id(block)

    def wrap(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap run(block, *args), which does full checkpointing, to offload its saved inputs to the host."""

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

    def _release_until(self, turn: int) -> None:
        """Make the computation wait until the tensors of all turns up to `turn` are copied out, and free their memory.

        Freeing it sooner would need `record_stream`, with which the allocator notices the end of the copy only once the
        host has caught up.
        """
        while self._storing and self._storing[0][0] <= turn:
            _, _, stored = self._storing.pop(0)
            if stored is not None:
                torch.cuda.current_stream(self.device).wait_event(stored)

    def _store(self, tensor: Tensor, turn: int) -> _Offloaded:
        offloaded = _Offloaded(self, tensor, turn)
        source = tensor.detach()
        self._storing.append((turn, source, self._copy(offloaded.field.tensor_in(offloaded.buffer), source)))
        self._offloaded[turn].append(weakref.ref(offloaded))
        self.bytes_out += offloaded.bytes
        return offloaded

    def _fetch(self, offloaded: _Offloaded) -> tuple[Tensor, Any]:
        """Return the tensor on the device and the event to wait for; start the copy unless it was prefetched."""
        if offloaded.fetched is None:
            device_copy = offloaded.field.tensor_in(empty_bytes(offloaded.size, offloaded.device))
            self._fetching[id(offloaded)] = device_copy
            copied = self._copy(device_copy, offloaded.field.tensor_in(offloaded.buffer))
            self.bytes_in += offloaded.bytes
            return offloaded.hold_fetched(device_copy, copied)
        return offloaded.fetched

    def _unpack(self, offloaded: Any) -> Tensor:
        if isinstance(offloaded, Tensor):
            return offloaded
        self._release_until(self.turn)
        device_copy, fetched = self._fetch(offloaded)
        for other in self._offloaded.pop(offloaded.turn - 1, ()):
            if (ahead := other()) is not None:
                self._fetch(ahead)
        self._offloaded.pop(offloaded.turn, None)
        if fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(fetched)
        self._fetching.pop(id(offloaded), None)
        return device_copy

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after all work queued so far and after earlier copies; returns the copy's event."""
        with torch.no_grad():
            if self.stream is None:
                target.copy_(source)
                return None
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                target.copy_(source, non_blocking=True)
                return self.stream.record_event()

    def drop_broken_step(self) -> None:
        """Drop the state of an aborted step, once none of its copies is in flight."""
        if self.stream is not None:
            self.stream.synchronize()
        self._storing.clear()
        self._fetching.clear()
        self._offloaded.clear()


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the tensor is dense in some dimension order.

    Its copy then has the same strides: a recompute has to see the same layout.
    """
    return tuple(tensor.stride()) == dense_stride(tensor)
