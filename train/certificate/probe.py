"""Probe in place of an adapter: moves a layer's output along one random direction, by a scalar."""

from typing import Any

import torch
from torch import Tensor, nn

from ...models.adapters.base import DropMask


class DirectionProbe(nn.Module):
    """Compute y + t·(W' x) for a random W' of rank 1, scaled so that t = 1 changes the output by about its norm.

    t: scalar parameter; its gradient is the derivative along the direction W'.
    """

    def __init__(self, shape: tuple[int, int], seed: int, device: torch.device):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.down = torch.randn(shape[1], generator=generator).to(device)
        self.up = torch.randn(shape[0], generator=generator).to(device)
        self.t = nn.Parameter(torch.zeros((), device=device))
        self.size: float | None = None

    def forward(self, x: Tensor, frozen: Any, mask: DropMask | None) -> Tensor:
        y: Tensor = frozen.apply(x)
        if hasattr(frozen, "convolve"):
            kernel = frozen.weight
            step = frozen.convolve(x, self.down.view(1, *kernel.shape[1:]).to(x.dtype)) * self.up[:, None, None]
        else:
            step = (x @ self.down.to(x.dtype))[..., None] * self.up.to(x.dtype)
        if self.size is None:  # set by the first call
            self.size = float(y.detach().norm() / step.detach().norm().clamp(min=1e-12))
        return y + (self.t.to(x.dtype) * self.size) * step

    def structure(self) -> str:
        return f"probe({self.down.numel()},{self.up.numel()})"
