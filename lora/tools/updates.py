"""Updates of a LoRA layer by layer, and LoRAs made of new ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.text import shortlist
from ...models.convolutions import WeightShape, weight_shapes
from ...models.family import Family
from ..files.coverage import check_finite, no_layer_met
from ..files.lora_model import MODULES, LoraModel, LowRank, low_rank
from ..files.patches import DoesNotFit, delta_of
from ..files.reader import ReadLora, read_lora
from ..files.spellings import ALPHA, DOWN, UP
from .hadamard import HadamardUpdate
from .kronecker import KroneckerUpdate

LayerUpdate = LowRank | KroneckerUpdate | HadamardUpdate
ReadWeight = Callable[[str], Tensor]
"""Returns the weight of a layer of the model, fp32."""


@dataclass(frozen=True)
class Updates:
    """The updates of one LoRA for one model.

    name: of the LoRA with its input, for messages.
    read: its content.
    shapes: of the weights of the model's layers.
    read_weight: for updates that depend on the weights.
    """

    name: str
    read: ReadLora
    shapes: Mapping[str, WeightShape]
    read_weight: ReadWeight

    @classmethod
    def from_lora(
        cls, lora: Mapping[str, Tensor], family: Family, model: Any, name: str, read_weight: ReadWeight
    ) -> "Updates":
        """Read a LORA_MODEL. Raises ValueError if it is of another model, damaged, or changes no layer."""
        check_finite(lora, name)
        try:
            read = read_lora(lora, family, model)
        except DoesNotFit as error:
            raise ValueError(f"{name} does not fit this model ({error}); connect the model that it is for.") from error
        if not read.patches:
            raise ValueError(no_layer_met(name, read.other_layers, (), family, model))
        return cls(name, read, weight_shapes(model), read_weight)

    def layers(self) -> list[str]:
        return list(self.read.patches)

    def low_rank(self, layer: str) -> LowRank | None:
        """Return a low-rank update as it is; None for another one."""
        parts = self.read.modules.get(layer)
        update = low_rank(parts) if parts else None
        return None if update is None else LowRank(update.down.flatten(1), update.up.flatten(1), update.alpha)

    def hadamard(self, layer: str) -> HadamardUpdate | None:
        """Return a LoHa of matrices as it is; None for another update."""
        parts = self.read.modules.get(layer) or {}
        if parts.keys() != {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", ALPHA}:
            return None
        return HadamardUpdate(
            parts["hada_w1_a"].float(),
            parts["hada_w1_b"].float(),
            parts["hada_w2_a"].float(),
            parts["hada_w2_b"].float(),
            float(parts[ALPHA]),
        )

    def delta(self, layer: str) -> Tensor:
        """Compute delta W (out, in), fp32; zeros for a layer that the LoRA does not change."""
        shape = self.shapes[layer]
        if layer not in self.read.patches:
            return torch.zeros(shape[0], torch.Size(shape[1:]).numel())
        if (update := self.low_rank(layer)) is not None:
            return update.scaled_up @ update.down.float()
        try:
            delta = delta_of(
                self.read.patches[layer], shape, torch.device("cpu"), lambda: self.read_weight(layer).view(shape)
            )
        except ValueError as error:
            raise ValueError(f"{self.name} can't be used ({layer}: {error}); choose another LoRA.") from error
        return delta.flatten(1)

    def notes(self) -> list[str]:
        """Name the parts that are left out of the result."""
        notes = []
        if self.read.text_encoder:
            notes.append(f"{self.name}: {self.read.text_encoder} keys of text encoders are left out.")
        if leftovers := [*self.read.other_weights, *self.read.unknown, *self.read.other_layers]:
            notes.append(f"{self.name}: these parts are left out: {shortlist(leftovers)}.")
        return notes


def lora_model_of(
    updates: Mapping[str, LayerUpdate], shapes: Mapping[str, WeightShape], family: Family, metadata: Mapping[str, str]
) -> LoraModel:
    """Make a LORA_MODEL of updates by native name of the layer; those of convolutions get the shape of kernels."""
    modules = {layer: _tensors(update, shapes[layer]) for layer, update in updates.items()}
    recorded = family.names.recorded()
    return LoraModel.from_tensors(modules, {**metadata, **({MODULES: recorded} if recorded else {})})


def _tensors(update: LayerUpdate, shape: WeightShape) -> dict[str, Tensor]:
    if not isinstance(update, LowRank):
        return update.tensors(shape)
    _, *inner = shape
    kernel = [1] * len(inner[1:])
    down = update.down.reshape(update.rank, *inner)
    up = update.up.reshape(*update.up.shape[:2], *kernel)
    return {DOWN: down, UP: up, ALPHA: torch.tensor(float(update.alpha))}


def all_layers(updates: Sequence[Updates]) -> list[str]:
    """List the layers that any of the LoRAs changes, in the order of the model."""
    changed = {layer for lora in updates for layer in lora.layers()}
    return [layer for layer in updates[0].shapes if layer in changed]
