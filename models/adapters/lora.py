"""LoRA (Hu et al. 2021, arXiv 2106.09685)."""

import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...memory.weights.frozen_linear import FrozenLinear
from .add_product import add_product, as_rows
from .base import (
    DROPOUTS,
    Adapter,
    AdapterSpec,
    DropMask,
    Layers,
    ReadWeights,
    Shape,
    above_rank,
    norm_of_product,
    scaled,
)


class LoraAdapter(Adapter):
    """delta W = alpha / rank · up · down. down: (rank, in), up: (out, rank)."""

    algorithm = "lora"
    drops = DROPOUTS
    has_norm = True
    reads_casts = True
    inits: ClassVar[tuple[str, ...]] = ("kaiming", "gaussian", "pissa")
    has_pair = True
    odd_in = "up"
    fits_any = True
    in_kohya = True
    shares_input: ClassVar[bool] = True
    """True if x itself is multiplied by the down of `factors`, so that one matmul can serve several Linears."""
    down: nn.Parameter
    up: nn.Parameter

    @classmethod
    def network_args(cls, spec: AdapterSpec) -> dict[str, Any]:
        return {}

    @classmethod
    def layer_notes(cls, layers: Layers) -> list[str]:
        return above_rank(layers)

    @classmethod
    def reads_as(cls, name: str, suffixes: Collection[str]) -> bool:
        return name == LoraAdapter.algorithm and ("dora_scale" in suffixes) == cls.has_lengths

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        return {"down": (spec.rank, in_features), "up": (out_features, spec.rank)}

    @torch.no_grad()
    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Initialise up to zero (section 4.1) and down like torch's Linear (Kaiming uniform), or normal with a
        deviation of 1 / rank (PEFT's init_lora_weights 'gaussian')."""
        if self.spec.init == "gaussian":
            self.down.normal_(0.0, 1.0 / self.spec.rank, generator=source)
            return
        bound = 1.0 / math.sqrt(self.in_features)
        self.down.uniform_(-bound, bound, generator=source)

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        down, up = self.factors(x.dtype)
        rows = as_rows(x)
        return self.finish(frozen.apply(rows), linear(rows, down), up, x.shape[:-1], mask)

    def finish(self, y: Tensor, activations: Tensor, up: Tensor, shape: torch.Size, mask: DropMask | None) -> Tensor:
        """Compute the output (*shape, out) from the frozen layer's, y (rows, out), x·downᵀ (rows, ranks), and up."""
        activations = scaled(activations, self.scale)
        if mask is not None:
            activations = activations.unflatten(0, shape) * self.expand_mask(mask.update)
        return add_product(y, activations, up).unflatten(0, shape)

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return down and up of the update, in `dtype`."""
        return self.cast("down", dtype), self.cast("up", dtype)

    def expand_mask(self, mask: Tensor) -> Tensor:
        """Expand a mask (B, rows, `drop_width` or 1) to the rank activations of `factors`."""
        return mask

    def drop_width(self) -> int:
        """Count the ranks."""
        return self.spec.rank

    def norm(self) -> Tensor:
        return self.scale * norm_of_product(self.up, self.down)

    def tensors(self) -> dict[str, Tensor]:
        alpha = torch.tensor(float(self.spec.alpha))
        return {"lora_down.weight": self.down, "lora_up.weight": self.up, "alpha": alpha}


def run_loras(
    x: Tensor, frozen: Sequence[FrozenLinear], adapters: Sequence[LoraAdapter], masks: Sequence[DropMask | None]
) -> list[Tensor]:
    """Run Linears that share one input, x (…, in), with one matmul for all downs: for these x, and in backward x and
    its gradient, are read from memory once."""
    rows = as_rows(x)
    factors = [adapter.factors(x.dtype) for adapter in adapters]
    downs = [down for down, _ in factors]
    activations = linear(rows, torch.cat(downs)).split([len(down) for down in downs], dim=1)
    return [
        adapter.finish(weights.apply(rows), activation, up, x.shape[:-1], mask)
        for weights, adapter, activation, (_, up), mask in zip(
            frozen, adapters, activations, factors, masks, strict=True
        )
    ]
