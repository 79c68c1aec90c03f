"""A frozen Linear with a LoRA beside it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..memory.frozen import FrozenWeights, frozen_linear
from ..memory.residency import FrozenModule


class LoraLinear(FrozenModule):
    """y = x·Wᵀ + b + scale·(x·Aᵀ)·Bᵀ, the update of LoRA (arXiv 2106.09685), where A is `lora_down`, B is `lora_up`.

    The frozen weight may be stored in a narrower dtype. A and B are fp32 masters and are used in the dtype of x.
    `mask` (…, rank) drops elements of the rank activations; it holds 0 or 1 / (1 − p).
    """

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str):
        super().__init__()
        self._source = (weights, name)
        self.take()
        self.lora_down: nn.Parameter | None = None
        self.lora_up: nn.Parameter | None = None
        self.lora_scale = 1.0

    def take(self) -> None:
        weights, name = self._source
        frozen = weights.linear(name)
        self.register_buffer("weight", frozen.weight, persistent=False)
        self.register_buffer("weight_scale", frozen.scale, persistent=False)
        self.register_buffer("bias", frozen.bias, persistent=False)

    def moved(self, name: str, source: Tensor, moved: Tensor) -> bool:
        weights, own = self._source
        return name == "weight_scale" or weights.moved(f"{own}.{name}", source, moved)

    def add_lora(self, down: nn.Parameter, up: nn.Parameter, scale: float) -> None:
        """down: (rank, in), up: (out, rank), both fp32."""
        self.lora_down, self.lora_up, self.lora_scale = down, up, scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = frozen_linear(x, self.weight, self.weight_scale, self.bias)
        if self.lora_down is None or self.lora_up is None:
            return y
        # The scale goes on the rank activations, the smallest tensor here.
        hidden = torch.nn.functional.linear(x, self.lora_down.to(x.dtype)) * self.lora_scale
        if mask is not None:
            hidden = hidden * mask
        return y + torch.nn.functional.linear(hidden, self.lora_up.to(x.dtype))


def masks_of(prefix: str, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The dropout masks of one part of a block, by the names inside it. prefix: of the part, such as `img.`."""
    return {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}
