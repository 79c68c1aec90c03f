"""The small frozen parts that only Wan's blocks and embeddings are made of, each over ComfyUI's own weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule
from ..layers.frozen import FrozenTensors

PATCH = 2  # latent cells a side of a token; a token is one frame deep


class Modulation(FrozenTensors):
    """The learned part of a block's or the head's modulation, which the timestep's part is added to."""

    modulation: Tensor

    def __init__(self, weights: FrozenWeights, prefix: str):
        super().__init__(weights, prefix, "modulation")

    def forward(self, e: Tensor, clean: Tensor | None) -> list[Tensor]:
        """e: (B, F, n or 1, D) → n of (B, 1, D), or of (B, N, D) where `clean` (B, N, 1) says which of the two
        timesteps a token has."""
        parts = (self.modulation[:, None] + e).unbind(2)
        return [part if clean is None else torch.where(clean, part[:, 1:], part[:, :1]) for part in parts]


class PatchEmbedding(FrozenModule):
    """A convolution whose stride is its kernel, on tokens that are cut already: a matrix product, in fp32 as in core.

    Channels come last in a token, as the head writes them, so the kernel's axes are turned once here.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: FrozenWeights):
        super().__init__()
        # Core keeps this layer in fp32, whatever the model computes in.
        self._weights = FrozenWeights(weights.patcher, weights.device, torch.float32)
        self.take()

    def take(self) -> None:
        kernel = self._weights.tensor("patch_embedding.weight")  # (D, C, 1, 2, 2)
        assert kernel is not None
        self.register_buffer("weight", kernel.permute(0, 2, 3, 4, 1).flatten(1), persistent=False)
        self.register_buffer("bias", self._weights.tensor("patch_embedding.bias"), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, 4·C) → (B, N, D)"""
        return F.linear(tokens.float(), self.weight, self.bias).to(tokens.dtype)


def sinusoid(t: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding of timesteps in fp32, as Wan-Video/Wan2.1 (wan/modules/model.py) gives it, with its periods
    from `pow`. t: (B,), 0 to 1000 → (B, dim), cosines first."""
    half = dim // 2
    periods = torch.pow(10000, -torch.arange(half, device=t.device, dtype=torch.float32).div(half))
    angle = torch.outer(t.float(), periods)
    return torch.cat((angle.cos(), angle.sin()), dim=1)
