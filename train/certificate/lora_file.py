"""Check of a LoRA file: ComfyUI's own loader takes every layer, and computes the trained update."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.text import quantity, shortlist
from ...lora.files.lora_model import LoraModel
from ...lora.files.patches import Patch
from ...lora.network import LoraNetwork
from ...memory.weights.frozen_linear import FrozenLinear
from ...models.adapters.base import Adapter
from ...models.layers.lora_conv import LoraConv
from ...models.layers.lora_linear import LoraLayer

# Relative to a layer's update: files are in fp32, and another order of matmuls differs by less.
SAME = 1e-3
_ROWS = 4


@dataclass(frozen=True)
class FileCheck:
    """Result of loading a file with ComfyUI's loader.

    layers: trained layers.
    missing: layers that ComfyUI doesn't load.
    other: layers that it loads to another update.
    difference: the largest, relative to a layer's update.
    """

    layers: int
    missing: tuple[str, ...]
    other: tuple[str, ...]
    difference: float

    @property
    def fault(self) -> str | None:
        """Return a sentence if the file differs from the trained LoRA, else None."""
        if self.missing:
            return f"ComfyUI loads {self.text}: not {shortlist(self.missing)}."
        if self.other:
            return f"ComfyUI reads another update than was trained of {shortlist(self.other)} in the LoRA file."
        return None

    @property
    def text(self) -> str:
        return f"{self.layers - len(self.missing)} of {quantity(self.layers, 'layer')} of the LoRA file"

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json."""
        return {
            "layers": self.layers,
            "layers_loaded": self.layers - len(self.missing),
            "layers_that_differ": len(self.other),
            "largest_difference": float(f"{self.difference:.3g}"),
        }


def loaded_by_core(path: Path, patcher: ModelPatcher) -> dict[str, list[Any]]:
    """Read a LoRA file as ComfyUI's loader does. Returns the patches of each weight of the model by its key."""
    tensors = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(str(path), safe_load=True))
    loaded = comfy.lora.load_lora(tensors, comfy.lora.model_lora_keys_unet(patcher.model, {}))
    patches: dict[str, list[Any]] = {}
    for target, content in loaded.items():
        key, patch = Patch.from_entry(target, content)
        patches.setdefault(key, []).append((1.0, patch.content, 1.0, patch.place, patch.function))
    return patches


@torch.no_grad()
def check_file(
    path: Path,
    lora: LoraModel,
    patcher: ModelPatcher,
    network: LoraNetwork,
    linears: Mapping[str, LoraLayer],
    device: torch.device,
) -> FileCheck:
    """Load a file with ComfyUI's loader and compare the update of every layer with the trained one.

    lora: the trained LoRA, with the names of `network`, which may hold other weights than their average.

    One layer's update is in memory at a time, in fp32.
    """
    patches = loaded_by_core(path, patcher)
    trained = {lora.name(flat): tensors for flat, tensors in lora.parts().items()}
    missing = []
    other = []
    largest = 0.0
    for name, adapter in network.adapters.items():
        entries = patches.get(f"diffusion_model.{name}.weight")
        if entries is None:
            missing.append(name)
            continue
        reference = copy.deepcopy(adapter)
        reference.casts.clear()
        reference.load(trained[name])
        difference = _difference(name, reference.to(device), entries, linears[name], device)
        largest = max(largest, difference)
        if not difference <= SAME:
            other.append(name)
    return FileCheck(len(network.adapters), tuple(missing), tuple(other), largest)


def _difference(name: str, adapter: Adapter, entries: list[Any], layer: LoraLayer, device: torch.device) -> float:
    """Compare both updates of the layer's output for random inputs, relative to the adapter's."""
    if any(Patch(entry[1]).needs_weight for entry in entries):
        weight = layer.read_on_device().full().to(device)
    else:
        weight = torch.zeros(layer.shape, device=device)
    frozen: Any = FrozenLinear(weight, None, None)
    shape, size = [_ROWS, layer.shape[1]], tuple(weight.shape)
    if isinstance(layer, LoraConv):
        assert layer.kernel is not None
        size = (layer.shape[0], -1, *layer.kernel)
        weight = weight.view(size)
        shape = [1, weight.shape[1], *(2 * side + 2 for side in layer.kernel)]
        frozen = layer.frozen()._replace(weight=weight, bias=None)
    patched = comfy.lora.calculate_weight(entries, weight.clone(), name).view(size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    if isinstance(layer, LoraConv):
        return _relative(frozen.convolve(x, patched - weight), adapter(x, frozen, None) - frozen.apply(x), weight)
    return _relative(x @ (patched - weight).T, adapter(x[None], frozen, None)[0] - frozen.apply(x), weight)


def _relative(actual: Tensor, expected: Tensor, weight: Tensor) -> float:
    """Compute ‖actual − expected‖ / ‖expected‖; an update below the fp32 rounding of the weight counts as none."""
    size = max(float(expected.norm()), 1e-5 * float(weight.norm()), 1e-12)
    return float((actual - expected).norm()) / size
