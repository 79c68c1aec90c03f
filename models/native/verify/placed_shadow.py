"""A shadow of ComfyUI's model that uses the weights of a run: no large matrix is held twice."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ....memory.weights.frozen import FrozenWeights
from ....memory.weights.frozen_linear import FrozenLinear
from ...layers.lora_linear import LoraLayer
from ..forward.shadow import Shadow


class PlacedLinear(nn.Module):
    """A Linear of ComfyUI's forward on frozen weights owned by another module.

    read: returns them at each call: those of a swapped block are in a slot.
    """

    def __init__(self, read: Callable[[], FrozenLinear], module: Any):
        super().__init__()
        self.read = read
        self.in_features, self.out_features = module.in_features, module.out_features

    @property
    def weight(self) -> Tensor:
        return self.read().weight

    @property
    def bias(self) -> Tensor | None:
        return self.read().bias

    def forward(self, x: Tensor) -> Tensor:
        return self.read().apply(x)


class PlacedShadow(Shadow):
    """ComfyUI's model over the Linears of a transformer, without its adapters.

    A Linear that the transformer lacks is read at each call; of other modules only small tensors are read, once.
    """

    def __init__(self, patcher: ModelPatcher, weights: FrozenWeights, placed: Mapping[str, LoraLayer]):
        self._placed = placed
        super().__init__(patcher, weights)

    def make_linear(self, weights: FrozenWeights, name: str, module: nn.Module) -> nn.Module:
        layer: Any = self._placed.get(name)

        def anew() -> FrozenLinear:
            return weights.linear(name).to(weights.device)

        return PlacedLinear(anew if layer is None else layer.frozen, module)

    def leave(self) -> None:
        """Drop the references to the transformer."""
        self._placed = {}


def shadow_over(
    patcher: ModelPatcher, placed: Mapping[str, LoraLayer], device: torch.device, dtype: torch.dtype
) -> PlacedShadow:
    """Make the shadow for one check."""
    return PlacedShadow(patcher, FrozenWeights(patcher, device, dtype), placed)
