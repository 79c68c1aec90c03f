"""Hadamard rotation of weights and activations, which spreads outliers before quantising (ConvRot)."""

import functools
import math

import torch
from torch import Tensor


@functools.cache
def hadamard_matrix(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ConvRot's rotation, (size, size): the Kronecker power of a regular Hadamard matrix of order 4, over √size.

    It is symmetric and its own inverse.
    """
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], device=device)
    power = functools.reduce(torch.kron, [four] * round(math.log(size, 4)))
    return (power / math.sqrt(size)).to(dtype)


def rotate(x: Tensor, size: int) -> Tensor:
    """Rotate groups of `size` elements of the last axis of x, (…, n), or rotate them back."""
    return (x.unflatten(-1, (-1, size)) @ hadamard_matrix(size, x.device, x.dtype)).flatten(-2)
