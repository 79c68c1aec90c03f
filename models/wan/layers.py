"""Small frozen layers specific to Wan's blocks and embeddings, each over ComfyUI's own weights."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule
from ..layers.frozen import FrozenTensors
from ..layers.math import modulate

PATCH = 2  # latent cells per side of a token; a token is one frame deep
_ROWS = slice(0, 1), slice(1, 2)  # of the noisy frames and of the clean frames


class Modulation(FrozenTensors):
    """The learned part of a block's or the head's modulation, added to the timestep's part."""

    modulation: Tensor

    def __init__(self, weights: FrozenWeights, prefix: str):
        super().__init__(weights, prefix, "modulation")

    def forward(self, e: Tensor) -> tuple[Tensor, ...]:
        """Add e (B, F, n or 1, D) → n of (B, F, D), one row per timestep."""
        return (self.modulation[:, None] + e).unbind(2)


def modulate_frames(x: Tensor, shift: Tensor, scale: Tensor, clean: Tensor | None) -> Tensor:
    """Apply `modulate` with a row of shift and scale per timestep: (B, 1, D), or (B, 2, D) with `clean` (B, N, 1)
    selecting the row of each token. x: (B, N, D).

    Tokens are selected after the multiplications: autograd then saves the rows for backward. Rows selected before would
    be saved as (B, N, D), which musubi-tuner's `force_v2_1_time_embedding` avoids with one timestep for all frames.
    """
    if clean is None:
        return modulate(x, shift, scale)
    normed = F.layer_norm(x, x.shape[-1:], eps=1e-6)
    noisy_out, clean_out = (torch.addcmul(shift[:, row], normed, 1 + scale[:, row]) for row in _ROWS)
    return torch.where(clean, clean_out, noisy_out)


def gate_frames(x: Tensor, y: Tensor, gate: Tensor, clean: Tensor | None) -> Tensor:
    """Compute x + gate·y, with rows of the gate as in `modulate_frames`. x, y: (B, N, D)."""
    if clean is None:
        return torch.addcmul(x, y, gate)
    noisy_out, clean_out = (torch.addcmul(x, y, gate[:, row]) for row in _ROWS)
    return torch.where(clean, clean_out, noisy_out)


class PatchEmbedding(FrozenModule):
    """A convolution whose stride is its kernel, on pre-cut tokens: a matmul, in fp32 as in core.

    Channels come last in a token, as the head writes them, so the kernel's axes are permuted once here.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: FrozenWeights):
        super().__init__()
        # Core keeps this layer in fp32, whatever the compute dtype.
        self._weights = FrozenWeights(weights.patcher, weights.device, torch.float32)
        self.take()

    def take(self) -> None:
        kernel = self._weights.tensor("patch_embedding.weight")  # (D, C, 1, 2, 2)
        assert kernel is not None
        self.register_buffer("weight", kernel.permute(0, 2, 3, 4, 1).flatten(1), persistent=False)
        self.register_buffer("bias", self._weights.tensor("patch_embedding.bias"), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens (B, N, 4·C) → (B, N, D)."""
        return F.linear(tokens.float(), self.weight, self.bias).to(tokens.dtype)


def sinusoid(t: Tensor, dim: int) -> Tensor:
    """Compute the sinusoidal embedding of timesteps in fp32, as in Wan-Video/Wan2.1 (wan/modules/model.py), with its
    periods from `pow`. t: (B,), 0 to 1000 → (B, dim), cosines first."""
    half = dim // 2
    periods = torch.pow(10000, -torch.arange(half, device=t.device, dtype=torch.float32).div(half))
    angle = torch.outer(t.float(), periods)
    return torch.cat((angle.cos(), angle.sin()), dim=1)
