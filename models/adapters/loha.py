"""LoHa: the elementwise product of two low-rank matrices (FedPara, Hyeon-Woo et al. 2021, arXiv 2108.06098; LyCORIS,
arXiv 2309.14859)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...memory.weights.frozen_linear import FrozenLinear
from .add_product import add_product, as_rows
from .base import (
    Adapter,
    AdapterSpec,
    DropMask,
    Layers,
    ReadWeights,
    Shape,
    norm_of_product,
    scaled,
)

# A slice of delta W, in numbers: 16 MB in fp32.
_SLICE = 2**22


class LohaAdapter(Adapter):
    """delta W = alpha / rank · (w1_a·w1_b) ∘ (w2_a·w2_b), of rank up to rank². a: (out, rank), b: (rank, in).

    The product of products is itself of low rank: (w1_a·w1_b) ∘ (w2_a·w2_b) = A·B, with rank² columns of A, the
    elementwise products of a column of w1_a and one of w2_a, and the rows of B made likewise from the rows of w1_b and
    w2_b. So x goes through B and A as in a LoRA of rank², and no matrix of the weight's size is made or saved for
    backward, as long as rank² is less than the layer's smaller side.
    """

    algorithm = "loha"
    has_norm = True
    odd_in = "hada_w1_a"
    hada_w1_a: nn.Parameter
    hada_w1_b: nn.Parameter
    hada_w2_a: nn.Parameter
    hada_w2_b: nn.Parameter

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        a, b = (out_features, spec.rank), (spec.rank, in_features)
        return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a, "hada_w2_b": b}

    @classmethod
    def layer_notes(cls, layers: Layers) -> list[str]:
        high = [(name, spec, size) for name, spec, size in layers if spec.rank**2 > min(size)]
        if not high:
            return []
        name, spec, (rows, columns) = high[0]
        return [
            f"loha of rank {spec.rank} reaches rank {spec.rank**2}, more than {len(high)} of the layers can use, such "
            f"as {name} of {rows} × {columns}; it takes the time and the memory of a LoRA of that rank."
        ]

    @torch.no_grad()
    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        """Initialise as LyCORIS does: w1_a from N(0, 0.1²), both b from N(0, 1), w2_a at zero."""
        self.hada_w1_a.normal_(std=0.1, generator=source)
        self.hada_w1_b.normal_(generator=source)
        self.hada_w2_b.normal_(generator=source)

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        rows = as_rows(x)
        y = frozen.apply(rows)
        a, b = self.factors()
        # The rows of B are products of normal numbers: scaled down to the length of LoRA's, so that fp16 does not
        # overflow.
        length = math.sqrt(self.in_features)
        activations, a = scaled(linear(rows, (b / length).to(x.dtype)), self.scale), (a * length).to(x.dtype)
        if mask is None:
            return add_product(y, activations, a).unflatten(0, x.shape[:-1])
        update = linear(activations, a).unflatten(0, x.shape[:-1])
        return y.view_as(update) + update * mask.update

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A (out, rank²) and B (rank², in)."""
        a = (self.hada_w1_a.unsqueeze(2) * self.hada_w2_a.unsqueeze(1)).flatten(1)
        b = (self.hada_w1_b.unsqueeze(1) * self.hada_w2_b.unsqueeze(0)).flatten(0, 1)
        return a, b

    def norm(self) -> Tensor:
        """Compute the norm from the Gram matrices of A and B, (rank², rank²) each, if they are cheaper than delta W;
        else from slices of rows of delta W."""
        if 4 * self.spec.rank**2 <= min(self.out_features, self.in_features):
            return self.scale * norm_of_product(*self.factors())
        rows = max(1, _SLICE // self.in_features)
        pairs = zip(self.hada_w1_a.split(rows), self.hada_w2_a.split(rows), strict=True)
        slices = [((w1_a @ self.hada_w1_b) * (w2_a @ self.hada_w2_b)).norm() for w1_a, w2_a in pairs]
        return self.scale * torch.stack(slices).norm()

    def drop_width(self) -> int:
        """Count the rows of delta W, as LyCORIS drops them."""
        return self.out_features

    def tensors(self) -> dict[str, Tensor]:
        return {**dict(self.named_parameters()), "alpha": torch.tensor(float(self.spec.alpha))}
