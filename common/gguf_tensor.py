"""Tensors of a GGUF file in a MODEL, as ComfyUI-GGUF's loader puts them there.

They are recognised by attributes, never by class: `tensor_type` is GGML's number of the format, `tensor_shape` the
shape of the values, and `patches` the patches that a loaded MODEL applies at each use. Their `shape` is that of the
values while their memory holds rows of bytes, and their class overrides `clone`, `detach` and `copy_`; so here they are
always converted to ordinary tensors first.
"""

from typing import Any

import torch
from torch import Tensor

# Formats that torch reads itself, by GGML's number (`enum ggml_type`).
PLAIN = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}


def is_gguf(weight: Any) -> bool:
    """Return True for a tensor of a GGUF file."""
    return hasattr(weight, "tensor_type") and hasattr(weight, "tensor_shape")


def block_type(weight: Any) -> int | None:
    """Return GGML's number of the format of a weight stored in blocks; None for other weights."""
    number = getattr(weight, "tensor_type", None) if is_gguf(weight) else None
    return None if number is None or int(number) in PLAIN else int(number)


def type_name(weight: Any) -> str:
    """Return the format's name, such as Q4_K, or its number if it has none."""
    number = weight.tensor_type
    return getattr(number, "name", str(number))


def value_shape(weight: Any) -> tuple[int, ...]:
    """Return the shape of the dequantised values."""
    return tuple(int(size) for size in weight.tensor_shape)


def as_stored(weight: Tensor) -> Tensor:
    """Return an ordinary tensor over the same memory, in its stored dtype and shape."""
    return torch.Tensor.as_subclass(weight, Tensor)


def plain_values(weight: Tensor) -> Tensor:
    """Return an ordinary tensor of the values over the same memory, for a format that torch reads itself."""
    stored, number = as_stored(weight), getattr(weight, "tensor_type", None)
    dtype = stored.dtype if number is None else PLAIN[int(number)]
    return stored.view(dtype).reshape(value_shape(weight))


def with_memory(weight: Tensor, memory: Tensor) -> Tensor:
    """Wrap `memory`, an ordinary tensor of as many bytes, as a tensor with the attributes of `weight`."""
    stored = as_stored(weight)
    tensor = torch.Tensor.as_subclass(memory.view(stored.dtype).reshape(stored.shape), type(weight))
    vars(tensor).update(vars(weight))
    return tensor


def with_patches(weight: Tensor, patches: list[Any]) -> Tensor:
    """Make the same tensor over the same memory with these patches, [(weight patches, key)]."""
    tensor = with_memory(weight, as_stored(weight))
    vars(tensor)["patches"] = patches
    return tensor
