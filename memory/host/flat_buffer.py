"""Flat buffers: the tensors of a block in one piece of memory, so that one copy brings them all."""

import ctypes
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .page_locked import host_bytes

ALIGNMENT = 256  # bytes; what the device's own allocator gives, and more than the 16 that kernels ask for


@dataclass(frozen=True)
class Field:
    """Position of one tensor in a flat buffer.

    name: chosen by the owner of the layout.
    offset: bytes from the start of the buffer.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, buffer: Tensor) -> Tensor:
        """Make the tensor over the memory of `buffer`; not a view of it, so autograd ties nothing to the buffer."""
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=self.dtype, device=buffer.device)
            start = buffer.storage_offset() + self.offset
            return tensor.set_(buffer.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """Positions of tensors in one flat buffer of `size` bytes."""

    fields: tuple[Field, ...]
    size: int

    @staticmethod
    def of(tensors: Iterable[tuple[str, Tensor]]) -> "Layout":
        """Lay out plain tensors, given with their names."""
        fields, end = [], 0
        for name, tensor in tensors:
            fields.append(Field(name, end, tuple(tensor.shape), dense_stride(tensor), tensor.dtype))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return Layout(tuple(fields), end)


@dataclass(frozen=True)
class ScatteredBuffer:
    """Stand-in for a flat buffer whose tensors lie elsewhere, each by itself, as in a mapped file.

    They are brought together where they are copied to.
    """

    layout: Layout
    tensors: tuple[Tensor, ...]

    def numel(self) -> int:
        return self.layout.size

    def is_pinned(self) -> bool:
        return False

    def copy_to(self, buffer: Tensor) -> None:
        """Copy all tensors into a flat buffer of `numel` bytes."""
        for field, tensor in zip(self.layout.fields, self.tensors, strict=True):
            field.on(buffer).copy_(tensor)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it fills its memory (in whatever order), else those of a contiguous one."""
    order = sorted(range(tensor.dim()), key=lambda i: tensor.stride(i))
    expected = 1
    for i in order:
        if tensor.shape[i] != 1 and tensor.stride(i) != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= tensor.shape[i]
    return tuple(tensor.stride())


def empty_bytes(size: int, device: torch.device, pinned: bool = False, later: bool = False) -> Tensor:
    """Allocate a flat buffer that starts at a multiple of ALIGNMENT.

    pinned: page-locked, where that can be had. later: to be locked when it is filled, by `page_locked.lock`.
    """
    with torch.inference_mode(False):
        if device.type == "cpu":
            raw = host_bytes(size + ALIGNMENT, pinned, later)
        else:
            raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + size]


@functools.cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def trim_heap() -> None:
    """Give freed memory back to the system.

    glibc keeps freed tensors of up to 32 MB for later, so that a model whose tensors are smaller would lie in memory
    twice when all its blocks have moved.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)
