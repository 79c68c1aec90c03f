"""Entries of ComfyUI's CONDITIONING, and copies of tensors that training may keep."""

from typing import Any

import torch
from torch import Tensor


def read_entry(entry: Any, name: str) -> tuple[Tensor, dict[str, Any]]:
    """Return the encoded caption, (1, L, D), and the rest of an entry. Raises ValueError for another shape.

    name: of the entry, in messages.
    """
    cond, conditioning = entry[0], dict(entry[1])
    if cond.ndim == 4:  # some text encoders add an axis of size 1 next to the batch axis
        cond = next((cond.squeeze(axis) for axis in (1, 2) if cond.shape[axis] == 1), cond)
    if cond.ndim != 3 or cond.shape[0] != 1:
        raise ValueError(f"{name} has the shape {tuple(cond.shape)}; it must be (1, tokens, width).")
    return cond, conditioning


def check_finite(tensor: Tensor, name: str) -> None:
    """Raise ValueError for a latent or a caption with values that are not finite."""
    if not torch.isfinite(tensor).all():
        raise ValueError(
            f"{name[0].upper()}{name[1:]} holds values that are not finite; encode it again, with the VAE or the "
            f"text encoders in a wider dtype (ComfyUI's --fp32-vae or --fp32-text-enc)."
        )


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host as an ordinary tensor: autograd rejects inference tensors, which nodes create."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def copy_all_to_host(value: Any) -> Any:
    """Copy the tensors of a conditioning's value."""
    if isinstance(value, Tensor):
        return copy_to_host(value)
    return [copy_all_to_host(element) for element in value] if isinstance(value, list) else value
