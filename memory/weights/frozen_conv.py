"""Frozen convolution."""

from typing import NamedTuple

import torch
from torch import Tensor


class FrozenConv(NamedTuple):
    """Weights of one frozen convolution, in the MODEL's dtype.

    weight: (out, in, height, width).
    bias: (out,), or None.
    stride: as in torch.nn.Conv2d.
    padding: as in torch.nn.Conv2d.
    dilation: as in torch.nn.Conv2d.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Convolve x, (B, in, H, W) → (B, out, h, w)."""
        return self.convolve(x, self.weight, self.bias)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve with another weight of the same kernel size, with this stride, padding and dilation."""
        bias = None if bias is None else bias.to(x.dtype)
        return torch.nn.functional.conv2d(x, weight.to(x.dtype), bias, self.stride, self.padding, self.dilation)
