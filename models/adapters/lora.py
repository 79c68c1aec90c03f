"""LoRA (Hu et al. 2021, arXiv 2106.09685)."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...memory.weights.frozen_linear import FrozenLinear
from .base import DROPOUTS, Adapter, AdapterSpec, DropMask, ReadWeights, Shape, as_rows, norm_of_product
from .low_rank.linear import Update, lora_linears


class LoraAdapter(Adapter):
    """delta W = alpha / rank · up · down. down: (rank, in), up: (out, rank)."""

    algorithm = "lora"
    drops = DROPOUTS
    has_norm = True
    reads_casts = True
    shares_input: ClassVar[bool] = True
    """True where x is multiplied with the down of `factors` as it is, so that it can be with those of other Linears."""
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
        (y,) = run_loras(x, [frozen], [self], [mask])
        return y

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """down and up of the update, in `dtype`."""
        return self.cast("down", dtype), self.cast("up", dtype)

    def kept(self, mask: Tensor) -> Tensor:
        """The mask (B, rows, `drop_width` or 1) of the rank activations of `factors`."""
        return mask

    def drop_width(self) -> int:
        """The ranks."""
        return self.spec.rank

    def norm(self) -> Tensor:
        return self.scale * norm_of_product(self.up, self.down)

    def tensors(self) -> dict[str, Tensor]:
        alpha = torch.tensor(float(self.spec.alpha))
        return {"lora_down.weight": self.down, "lora_up.weight": self.up, "alpha": alpha}


def run_loras(
    x: Tensor, frozen: Sequence[FrozenLinear], adapters: Sequence[LoraAdapter], masks: Sequence[DropMask | None]
) -> list[Tensor]:
    """Run Linears that read one input, x (…, in), with one product for the downs of all: for these x, and in backward
    x and its gradient, pass through memory once."""
    factors = [adapter.factors(x.dtype) for adapter in adapters]
    downs = [down for down, _ in factors]
    updates = [
        Update(up, adapter.scale, None if mask is None else adapter.kept(mask.update))
        for adapter, (_, up), mask in zip(adapters, factors, masks, strict=True)
    ]
    down, shape = downs[0] if len(downs) == 1 else torch.cat(downs), x.shape[:-1]
    return [y.unflatten(0, shape) for y in lora_linears(as_rows(x), frozen, down, updates, shape)]
