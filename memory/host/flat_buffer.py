"""Flat buffers: the tensors of a block in one allocation, so that a single copy transfers them all."""

import ctypes
import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .page_locked import host_bytes

ALIGNMENT = 256  # bytes; as of the device's own allocator, and more than the 16 that kernels need


@dataclass(frozen=True)
class Field:
    """Position of one tensor in a flat buffer.

    name: chosen by the owner of the layout.
    offset: bytes from the start of the buffer.
    shape: shape of the tensor.
    stride: its strides in elements.
    dtype: its dtype.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor_in(self, buffer: Tensor) -> Tensor:
        """Make the tensor over the memory of `buffer`; no view in autograd's sense, so it is not tied to the buffer."""
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=self.dtype, device=buffer.device)
            start = buffer.storage_offset() + self.offset
            return tensor.set_(buffer.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """Positions of tensors in one flat buffer.

    fields: position of each tensor, by ascending offset.
    size: bytes of the buffer, a multiple of ALIGNMENT.
    """

    fields: tuple[Field, ...]
    size: int

    @staticmethod
    def from_tensors(tensors: Iterable[tuple[str, Tensor]]) -> "Layout":
        """Lay out plain tensors, passed with their names."""
        fields, end = [], 0
        for name, tensor in tensors:
            fields.append(Field(name, end, tuple(tensor.shape), dense_stride(tensor), tensor.dtype))
            end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        return Layout(tuple(fields), end)


@dataclass(frozen=True)
class ScatteredBuffer:
    """Substitute for a flat buffer whose tensors are separate, as in a mapped file; the copy makes them contiguous.

    layout: positions of the tensors in the flat buffer.
    tensors: the tensors, in the order of the layout's fields.
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
            field.tensor_in(buffer).copy_(tensor)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense in some dimension order, else those of a contiguous one."""
    order = sorted(range(tensor.dim()), key=lambda i: tensor.stride(i))
    expected = 1
    for i in order:
        if tensor.shape[i] != 1 and tensor.stride(i) != expected:
            return tuple(torch.empty(tensor.shape, device="meta").stride())
        expected *= tensor.shape[i]
    return tuple(tensor.stride())


def empty_bytes(size: int, device: torch.device, pinned: bool = False, later: bool = False) -> Tensor:
    """Allocate a flat buffer, (size,) uint8, that starts at a multiple of ALIGNMENT.

    pinned: page-locked if possible. later: `page_locked.lock` is to lock it once it is filled.
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
    """Return freed memory to the system.

    glibc keeps freed blocks of up to 32 MB for reuse, so a model with smaller tensors would take its memory twice after
    all its blocks have moved.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)
