"""DoRA: the length of each column of the weight is trained separately from its direction (Liu et al. 2024, arXiv
2402.09353)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...memory.weights.frozen_linear import FrozenLinear
from .add_product import add_product
from .base import AdapterSpec, DropMask, ReadWeights, Shape, scaled
from .lora import LoraAdapter

# ComfyUI's reader adds it to the lengths.
_EPS = torch.finfo(torch.float32).eps


class DoraAdapter(LoraAdapter):
    """W' = m · (W + delta W) / ‖W + delta W‖, delta W as LoRA's (eq. 5).

    ‖·‖ is the length of each column, one per input, as in the paper; so m is a number per input. ComfyUI also reads the
    other layout, one per output, but then divides by the lengths of W alone, which is another weight. The gradient
    treats ‖W + delta W‖ as a constant (section 4.3, eq. 11). m is trained as its offset from its start, ‖W‖: the steps
    are the same, and weight decay pulls towards the model, not towards zero.

    ‖W + delta W‖² = ‖W‖² + 2·⟨W, delta W⟩ + ‖delta W‖², column by column, needs upᵀ·W only, so no full-size weight is
    ever materialised, and an fp8 weight is saved for backward as stored. m / ‖·‖ then scales x.
    """

    algorithm = "dora"
    inits = ("kaiming", "gaussian")
    fits_any = False
    in_kohya = False
    has_lengths = True
    odd_in = ""
    multiplies_weight = True
    no_training_adapter = "whose file would hold the lengths of weights with that adapter in them"
    replaces_output = True
    shares_input = False  # its down is scaled by the lengths of this layer's adapted weight
    reads_casts = False  # down is scaled by the ratio of lengths in fp32
    has_norm = False  # the column lengths are parameters too
    unlike_matrices = "a vector of lengths for each layer too"
    no_norm = (
        "dora trains the lengths of a layer's columns apart from its matrices, whose size does not limit them; set "
        "scale_weight_norms to 0"
    )
    magnitude: nn.Parameter
    lengths: Tensor
    """(in,): ‖W‖ of each column, fp32."""

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int):
        super().__init__(spec, out_features, in_features)
        self.register_buffer("lengths", torch.ones(in_features), persistent=False)

    @classmethod
    def network_args(cls, spec: AdapterSpec) -> dict[str, Any]:
        return {"algo": "lora", "dora_wd": True, "wd_on_output": False}

    @classmethod
    def shapes(cls, spec: AdapterSpec, out_features: int, in_features: int) -> dict[str, Shape]:
        return {**super().shapes(spec, out_features, in_features), "magnitude": (in_features,)}

    @torch.no_grad()
    def start(self, source: torch.Generator, read: ReadWeights) -> None:
        super().start(source, read)
        self.lengths.copy_(column_lengths(read()))

    def forward(self, x: Tensor, frozen: FrozenLinear, mask: DropMask | None) -> Tensor:
        ratio = (self.lengths + self.magnitude) / (self.adapted_lengths(frozen, x.dtype) + _EPS)
        # Applied as a change of x: ratio − 1 is exact in bf16, ratio itself near 1 is not. The change is still rounded
        # to x's dtype, like a merged weight: in bf16 a column's length takes effect from about 0.2 % on.
        gain = (ratio - 1).to(x.dtype)
        if mask is not None and mask.module is not None:
            y = frozen.apply(torch.addcmul(x, x, gain * mask.module))
        else:
            y = frozen.apply(torch.addcmul(x, x, gain))
        activations = scaled(linear(x, (self.down * ratio).to(x.dtype)), self.scale)
        if mask is not None:
            activations = activations * mask.update
        return add_product(y, activations, self.up.to(x.dtype))

    def adapted_lengths(self, frozen: FrozenLinear, dtype: torch.dtype) -> Tensor:
        """Compute ‖W + delta W‖ of each column, (in,) fp32, without a gradient."""
        down, up = self.down.detach(), self.up.detach()
        crossed = (frozen.apply_transposed(up.to(dtype).T).float() * down).sum(dim=0)
        update_squares = ((up.T @ up) @ down * down).sum(dim=0)
        return (self.lengths.square() + 2 * self.scale * crossed + self.scale**2 * update_squares).clamp(min=0).sqrt()

    def tensors(self) -> dict[str, Tensor]:
        return {**super().tensors(), "dora_scale": (self.lengths + self.magnitude.detach()).unsqueeze(0)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load(tensors)
        self.magnitude.copy_(tensors["dora_scale"].to(self.lengths).reshape(-1) - self.lengths)


def column_lengths(frozen: FrozenLinear, rows: int = 1024) -> Tensor:
    """Compute the length of each column of a weight, (in,) fp32, casting `rows` rows at a time; a quantised weight is
    dequantised whole."""
    if frozen.layout is not None:
        return torch.linalg.vector_norm(frozen.full(), dim=0)
    parts = frozen.weight.split(rows)
    squares = sum((part.float().square().sum(dim=0) for part in parts), torch.zeros(()).to(frozen.weight.device))
    lengths = squares.sqrt() if frozen.scale is None else squares.sqrt() * frozen.scale.abs()
    return lengths if frozen.pre_quant_scale is None else lengths * frozen.pre_quant_scale.float().abs()
