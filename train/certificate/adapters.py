"""Temporary changes to a run's adapters, for checks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.lora
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...models.adapters.base import DropMask
from ..placement.placed_model import PlacedModel

PERTURBED = 0.02


@contextmanager
def without_adapters(placed: PlacedModel) -> Iterator[None]:
    """Remove the adapters from their layers inside the context."""
    linears = placed.weights.transformer.linears()
    try:
        for layer in linears.values():
            layer.attach(None)
        yield
    finally:
        for layer in linears.values():
            layer.attach(None)
        placed.network.attach(linears)


@contextmanager
def perturbed(placed: PlacedModel, names: Sequence[str] | None = None) -> Iterator[None]:
    """Fill zero weights, such as a LoRA's up, with noise inside the context, so that each has an effect.

    names: layers whose adapters are filled; all other adapters are zeroed. None fills all.
    """
    network = placed.network
    weights = [p.detach() for p in network.parameters()]
    saved = [weight.clone() for weight in weights]
    generator = torch.Generator().manual_seed(0)
    try:
        for name, adapter in network.adapters.items():
            for parameter in adapter.parameters():
                weight = parameter.detach()
                if names is not None and name not in names:
                    weight.zero_()
                elif not weight.any():
                    noise = PERTURBED * torch.randn(weight.shape, generator=generator)
                    weight.copy_(noise.to(weight.dtype))
        network.flat.write_casts()
        yield
    finally:
        torch._foreach_copy_(weights, saved)
        network.flat.write_casts()


class CorePatch(nn.Module):
    """ComfyUI's patches of one weight in place of an adapter: the layer as ComfyUI runs it with a LoRA file.

    entries: patches as a patcher stores them.
    patcher: MODEL with the patches, whose weight is read as in sampling, rounded to its storage format; None adds the
        update in fp32.
    """

    def __init__(self, key: str, entries: list[Any], layer: Any, patcher: ModelPatcher | None = None):
        super().__init__()
        self.key = key
        self.entries = entries
        self.patcher = patcher
        self.layer = [layer]  # in a list: not a submodule

    def forward(self, x: Tensor, frozen: Any, mask: DropMask | None) -> Tensor:
        weight = self.weight(x.device).to(x.dtype)
        layer = self.layer[0]
        if layer.kernel is not None:
            bias = frozen.bias
            out: Tensor = frozen.convolve(x, weight.view(layer.shape[0], -1, *layer.kernel), bias)
            return out
        bias = None if frozen.bias is None else frozen.bias.to(x.dtype)
        if frozen.pre_quant_scale is not None:
            x = x * frozen.pre_quant_scale.to(x.dtype)
        return nn.functional.linear(x, weight.view(layer.shape), bias)

    def weight(self, device: torch.device) -> Tensor:
        """Read the patched weight in fp32: (out, in), or (out, in, height, width) of a convolution."""
        if self.patcher is None:
            plain = self.layer[0].read_on_device()._replace(pre_quant_scale=None).full().to(device)
            kernel = self.layer[0].kernel
            shape = plain.shape if kernel is None else (self.layer[0].shape[0], -1, *kernel)
            return comfy.lora.calculate_weight(self.entries, plain.clone().view(shape), self.key)
        read = ModelPatcher.patch_weight_to_device(self.patcher, self.key, device_to=device, return_weight=True)
        read = read.dequantize() if hasattr(read, "dequantize") and type(read) is not Tensor else read
        return read.float()

    def structure(self) -> str:
        return f"patch({self.key})"


@contextmanager
def patched_by_core(
    placed: PlacedModel, patches: Mapping[str, list[Any]], sampled: ModelPatcher | None = None
) -> Iterator[None]:
    """Replace the adapters by ComfyUI's patches inside the context."""
    linears = placed.weights.transformer.linears()
    with without_adapters(placed):
        for name in placed.network.adapters:
            key = f"diffusion_model.{name}.weight"
            if key in patches:
                linears[name].attach(CorePatch(key, patches[key], linears[name], sampled))
        yield
