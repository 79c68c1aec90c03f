"""LoRA (Hu et al. 2021, arXiv 2106.09685)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...memory.weights.frozen_linear import FrozenLinear
from .base import DROPOUTS, Adapter, AdapterSpec, DropMask, ReadWeights, Shape, norm_of_product


class LoraAdapter(Adapter):
    """delta W = alpha / rank · up · down. down: (rank, in), up: (out, rank)."""

    algorithm = "lora"
    drops = DROPOUTS
    has_norm = True
    down: nn.Parameter
    up: nn.Parameter

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        return {"down": (spec.rank, in_features), "up": (out_features, spec.rank)}

    @torch.no_grad()
    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """up at zero (section 4.1); down as torch starts a Linear (Kaiming uniform), or normal with a deviation of
        1 / rank (PEFT's init_lora_weights 'gaussian')."""
        if self.spec.init == "gaussian":
            self.down.normal_(0.0, 1.0 / self.spec.rank, generator=source)
            return
        bound = 1.0 / math.sqrt(self.in_features)
        self.down.uniform_(-bound, bound, generator=source)

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        y = frozen.apply(x)
        # The scale goes on the rank activations, the smallest tensor here.
        hidden = linear(x, self.down.to(x.dtype)) * self.scale
        if mask is not None:
            hidden = hidden * mask.update
        return y + linear(hidden, self.up.to(x.dtype))

    def drop_width(self) -> int:
        """The ranks."""
        return self.spec.rank

    def norm(self) -> Tensor:
        return self.scale * norm_of_product(self.up, self.down)

    def tensors(self) -> dict[str, Tensor]:
        alpha = torch.tensor(float(self.spec.alpha))
        return {"lora_down.weight": self.down, "lora_up.weight": self.up, "alpha": alpha}
