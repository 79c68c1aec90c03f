"""A frozen Linear with an adapter."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...memory.low_bit.error_meter import ErrorMeter
from ...memory.low_bit.matmul import LowBitMatmul
from ...memory.weights.formats.stored_format import read_format
from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.frozen_linear import FrozenLinear
from ...memory.weights.residency import FrozenModule
from ..adapters.base import Adapter, DropMask
from ..adapters.lora import LoraAdapter, run_loras


class LoraLayer(FrozenModule):
    """A frozen layer with an optional adapter.

    weight: as stored.
    shape: (out, in) of the weight as a matrix.
    storage: text on the weight's format, equal if the compiled graph can be shared.
    kernel: (height, width) of a convolution; None for a Linear.
    """

    kernel: tuple[int, ...] | None = None
    weight: Tensor
    shape: tuple[int, int]
    storage: str
    adapter: Adapter | None

    def attach(self, adapter: Any) -> None:
        """Run this adapter with the layer from now on, none for None. A check may attach a stand-in for an adapter."""
        self.adapter = adapter

    def read_on_device(self) -> FrozenLinear:
        """Return the weights as a matrix on the training device, even if the buffers are slots that hold another
        block."""
        raise AssertionError(f"{type(self).__name__} has no read_on_device")


class LoraLinear(LoraLayer):
    """y = x·Wᵀ + b, with an optional adapter, a LoRA or another one.

    The frozen weight may be stored in a narrower dtype than x, or quantised.
    """

    weight_scale: Tensor | None
    bias: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str):
        super().__init__()
        self._source = (weights, name)
        self.low_bit: LowBitMatmul | None = None
        self.meter: ErrorMeter | None = None  # measures the matmuls while it is set
        self.take()
        self.adapter = None

    def take(self) -> None:
        frozen = self.read()
        self.layout, self.shape = frozen.layout, frozen.shape
        names = () if frozen.layout is None else read_format(frozen.layout).tensors
        self._parts = tuple(f"weight_{name}" for name in names)
        tensors = {"weight": frozen.weight, "weight_scale": frozen.scale, "bias": frozen.bias}
        tensors |= dict(zip(self._parts, frozen.parts, strict=True)) | {"pre_quant_scale": frozen.pre_quant_scale}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._stored = frozen.layout or f"{str(frozen.weight.dtype)[6:]}{' scaled' * (frozen.scale is not None)}"
        self.set_low_bit(self.low_bit)

    def set_low_bit(self, low_bit: LowBitMatmul | None) -> None:
        """Use these low-precision matmuls from now on; None for full precision."""
        self.low_bit = low_bit
        self.storage = self._stored if low_bit is None else f"{self._stored} by {'/'.join(map(str, low_bit))}"

    def exchange_low_bit(self, low_bit: LowBitMatmul | None) -> LowBitMatmul | None:
        """Use these matmuls for a check, under the same `storage`, which keys the graph. Returns the previous ones."""
        previous, self.low_bit = self.low_bit, low_bit
        return previous

    def start_meter(self, device: torch.device) -> ErrorMeter:
        """Measure the errors of its low-precision matmuls from now on."""
        self.meter = ErrorMeter(device)
        return self.meter

    def stop_meter(self) -> None:
        self.meter = None

    def read(self) -> FrozenLinear:
        """Read the weights from the MODEL itself, on their current device."""
        weights, name = self._source
        return weights.linear(name)

    def read_on_device(self) -> FrozenLinear:
        return self.read().to(self._source[0].device)

    def bytes_as_stored(self) -> int | None:
        """Return the bytes of the weight in the MODEL; None for one that `quantize` does not convert."""
        weights, name = self._source
        return weights.bytes_as_stored(name)

    def quantize_seconds(self) -> float:
        """Return the seconds spent on converting weights by `quantize`, over all Linears of the transformer."""
        return self._source[0].quantize_seconds

    def repoint(self, name: str, source: Tensor, target: Tensor) -> bool:
        weights, layer_name = self._source
        if name == "weight_scale" and self.layout is None:
            return True
        return weights.repoint(f"{layer_name}.{'weight' if name in self._parts else name}", source, target)

    def frozen(self) -> FrozenLinear:
        """Return the weights that the buffers hold."""
        if self.layout is None:
            smoothing = self.pre_quant_scale
            return FrozenLinear(
                self.weight,
                self.weight_scale,
                self.bias,
                pre_quant_scale=smoothing,
                low_bit=self.low_bit,
                meter=self.meter,
            )
        parts = tuple(getattr(self, name) for name in self._parts)
        return FrozenLinear(
            self.weight, None, self.bias, parts, self.layout, self.pre_quant_scale, self.low_bit, self.meter
        )

    def forward(self, x: Tensor, mask: DropMask | None = None) -> Tensor:
        frozen = self.frozen()
        return frozen.apply(x) if self.adapter is None else self.adapter(x, frozen, mask)


def run_together(layers: Sequence[LoraLinear], x: Tensor, masks: Sequence[DropMask | None]) -> list[Tensor]:
    """Run Linears that share one input, x (B, T, in); if each has a LoRA, one matmul serves all downs."""
    adapters = [layer.adapter for layer in layers if isinstance(layer.adapter, LoraAdapter)]
    if len(adapters) < len(layers) or not all(adapter.shares_input for adapter in adapters):
        return [layer(x, mask) for layer, mask in zip(layers, masks, strict=True)]
    return run_loras(x, [layer.frozen() for layer in layers], adapters, masks)


Masks = dict[str, DropMask]
"""The dropout masks of a block, or of a part of one, by the names of its Linears."""


def masks_of(prefix: str, masks: Masks) -> Masks:
    """Select the dropout masks of one part of a block, by the names inside it. prefix: of the part, such as `img.`."""
    return {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}
