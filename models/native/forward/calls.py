"""Calls that ComfyUI's forward makes of its blocks, which go to the trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...transformer_options import steady
from ..writes.out_of_place import OutOfPlace
from .blocks import NativeBlock, flatten

RunCall = Callable[[NativeBlock, list[Tensor], Any], Any]  # (block, tensors of the call, the call without them)


class BlockCalls:
    """The blocks of a model by their swap names, and what happens when ComfyUI's forward calls one.

    streams: indices of the tensors that come from the previous block, by structure.
    """

    def __init__(self, streams: dict[str, set[int]]):
        self.blocks: dict[str, NativeBlock] = {}
        self._streams = streams
        self._run: RunCall | None = None
        self._samples = 1  # of the running forward
        self._mode: OutOfPlace | None = None
        self._running: str | None = None  # name of the block that the model has called
        self._previous_ids: dict[str, tuple[int, ...]] = {}

    def add(self, name: str, block: NativeBlock) -> None:
        self.blocks[name] = block

    @contextmanager
    def handled_by(self, run: RunCall) -> Iterator[None]:
        """Run the blocks by this function within the context."""
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def begin(self, samples: int) -> None:
        """Begin a forward of this batch size."""
        self._samples = samples
        self._previous_ids.clear()

    @contextmanager
    def sample_by_sample(self) -> Iterator[None]:
        """Take the batch size of calls within the context for 1."""
        samples, self._samples = self._samples, 1
        try:
            yield
        finally:
            self._samples = samples

    def out_of_place(self, model_name: str, call: Callable[[], Tensor]) -> Tensor:
        """Return `call()`, in which in-place writes between the blocks are made out of place."""
        self._mode = OutOfPlace(model_name)
        try:
            with self._mode:
                out = call()
            return self._mode.current(out)
        finally:
            self._mode = None

    def enter(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of a block that the model has called."""
        block, mode = self.blocks[name], self._mode
        tensors, call = flatten(args, kwargs, self._samples, method)
        if block.running.depth or not tensors:  # called from within the block, or no computation
            return getattr(type(block.core), method)(block.core, *args, **kwargs)
        assert self._run is not None, block.name
        if self._running is not None:
            raise ValueError(
                f"model can't be trained: its block {block.name} runs inside its block {self._running}; choose another "
                "model."
            )
        self._running = block.name
        try:
            if mode is None:
                return self._run(block, tensors, call)
            args, kwargs = mode.current(args), mode.current(kwargs)
            mode.__exit__(None, None, None)  # a block has its own mode, which the compiler sees
            try:
                tensors, call = flatten(_steady(args), _steady(kwargs), self._samples, method)
                return self._run(block, self._alike(block, tensors, method), call)
            finally:
                mode.__enter__()
        finally:
            self._running = None

    def _alike(self, block: NativeBlock, tensors: list[Tensor], method: str) -> list[Tensor]:
        """Make the first block of a kind look like the others to the compiler: tensors from the previous block are
        contiguous and require a gradient."""
        alike = list(tensors)
        for number in self._stream_numbers(f"{method} {block.structure()}", tensors):
            if number < len(alike) and alike[number].is_floating_point():
                alike[number] = _like_a_result(alike[number])
        is_trained = any(linear.adapter is not None for linear in block.linears().values())
        if is_trained and torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in alike):
            _require_a_gradient(alike)
        return alike

    def _stream_numbers(self, structure: str, tensors: list[Tensor]) -> set[int]:
        """Return the numbers of the tensors that one block of a structure passes on to the next, as far as known."""
        ids = tuple(map(id, tensors))
        previous_ids = self._previous_ids.get(structure)
        streams = self._streams.setdefault(structure, set())
        if previous_ids is not None and len(previous_ids) == len(ids):
            streams |= {number for number in range(len(ids)) if ids[number] != previous_ids[number]}
        self._previous_ids[structure] = ids
        return streams


def _like_a_result(tensor: Tensor) -> Tensor:
    """Return the tensor as if a block had made it."""
    tensor = _in_row_order(tensor)
    if torch.is_grad_enabled() and not tensor.requires_grad:
        return tensor.detach().requires_grad_()
    return tensor


def _require_a_gradient(tensors: list[Tensor]) -> None:
    """Have the first floating-point tensor require a gradient, by which block swap reloads a block for its backward."""
    for number, tensor in enumerate(tensors):
        if tensor.is_floating_point():
            tensors[number] = tensor.detach().requires_grad_()
            return


def _in_row_order(tensor: Tensor) -> Tensor:
    """Return the tensor with the strides of a new one: torch calls it contiguous even if axes of length 1 have other
    strides, the compiler does not."""
    return tensor.reshape(-1).view(tensor.shape)


def _steady(value: Any) -> Any:
    """Drop entries that change from call to call from the options that ComfyUI passes down."""
    if type(value) is tuple:
        return tuple(map(_steady, value))
    if type(value) is dict:
        entries = {name: _steady(inner) if name == "transformer_options" else inner for name, inner in value.items()}
        return steady(entries)
    return value
