"""Random weights that keep activations near one and leave no parameter without effect."""

from zlib import crc32

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def linear(shapes: Shapes, name: str, inputs: int, outputs: int, bias: bool = True) -> None:
    """Add a Linear's weight, (outputs, inputs), and bias, (outputs,)."""
    shapes[f"{name}.weight"] = (outputs, inputs)
    if bias:
        shapes[f"{name}.bias"] = (outputs,)


def fill(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Make fp32 tensors of these shapes. Each has a generator seeded by (seed, name), so that no tensor depends on
    another.

    Matrices and kernels: normal, variance 1 / fan-in. Biases: normal, 0.1. Norm weights (one axis): 1 plus normal 0.1.
    """
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
        value = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            value *= 0.1
        elif len(shape) == 1:
            value = 1 + 0.1 * value
        else:
            value /= value[0].numel() ** 0.5
        tensors[name] = value
    return tensors
