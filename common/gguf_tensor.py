"""Tensors of a GGUF file in a MODEL, as ComfyUI-GGUF's loader puts them there.

They are met by what they have, never by their class: `tensor_type` is GGML's number of the format, `tensor_shape` the
shape of the values, and `patches` what a loaded MODEL applies at each use. Their `shape` is that of the values while
their memory holds rows of bytes, and their class answers `clone`, `detach` and `copy_` in ways of its own; so here they
are always taken as ordinary tensors first.
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
    """Return GGML's number of the format in which a weight is stored in blocks; None for one of another kind."""
    number = getattr(weight, "tensor_type", None) if is_gguf(weight) else None
    return None if number is None or int(number) in PLAIN else int(number)


def type_name(weight: Any) -> str:
    """Return the format's name, such as Q4_K, or its number where it has none."""
    number = weight.tensor_type
    return getattr(number, "name", str(number))


def value_shape(weight: Any) -> tuple[int, ...]:
    """Return the shape of the values that the tensor stands for."""
    return tuple(int(size) for size in weight.tensor_shape)


def as_stored(weight: Tensor) -> Tensor:
    """Return an ordinary tensor over the same memory, in the dtype and shape in which it is stored."""
    return torch.Tensor.as_subclass(weight, Tensor)


def plain_values(weight: Tensor) -> Tensor:
    """Return an ordinary tensor of the values over the same memory, for a format that torch reads itself."""
    stored, number = as_stored(weight), getattr(weight, "tensor_type", None)
    dtype = stored.dtype if number is None else PLAIN[int(number)]
    return stored.view(dtype).reshape(value_shape(weight))


def over(weight: Tensor, memory: Tensor) -> Tensor:
    """Make the same tensor over other memory, an ordinary one of as many bytes."""
    stored = as_stored(weight)
    made = torch.Tensor.as_subclass(memory.view(stored.dtype).reshape(stored.shape), type(weight))
    vars(made).update(vars(weight))
    return made


def with_patches(weight: Tensor, patches: list[Any]) -> Tensor:
    """Make the same tensor over the same memory with these patches on it, [(weight patches, key)]."""
    made = over(weight, as_stored(weight))
    vars(made)["patches"] = patches
    return made
