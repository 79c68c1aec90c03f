"""A frozen Linear with an adapter beside it."""

from torch import Tensor

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.frozen_linear import FrozenLinear, read_format
from ...memory.weights.residency import FrozenModule
from ..adapters.base import Adapter, DropMask


class LoraLinear(FrozenModule):
    """y = x·Wᵀ + b, and what its adapter makes of it, a LoRA or another one, where it has one.

    The frozen weight may be stored in a narrower dtype than x, or quantised. shape: (out, in) of the weight that is
    stored; storage: how it is, in words that are equal where the graph can be.
    """

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str):
        super().__init__()
        self._source = (weights, name)
        self.take()
        self.adapter: Adapter | None = None

    def take(self) -> None:
        frozen = self.read()
        self.layout, self.shape = frozen.layout, frozen.shape
        names = () if frozen.layout is None else read_format(frozen.layout).tensors
        self._parts = tuple(f"weight_{name}" for name in names)
        held = {"weight": frozen.weight, "weight_scale": frozen.scale, "bias": frozen.bias}
        held |= dict(zip(self._parts, frozen.parts, strict=True)) | {"pre_quant_scale": frozen.pre_quant_scale}
        for name, tensor in held.items():
            self.register_buffer(name, tensor, persistent=False)
        self.storage = frozen.layout or f"{str(frozen.weight.dtype)[6:]}{' scaled' * (frozen.scale is not None)}"

    def read(self) -> FrozenLinear:
        """The weights from the MODEL itself, where they lie."""
        weights, name = self._source
        return weights.linear(name)

    def read_on_device(self) -> FrozenLinear:
        """The weights on the training device, also where the buffers are slots that hold another block."""
        return self.read().to(self._source[0].device)

    def moved(self, name: str, source: Tensor, moved: Tensor) -> bool:
        weights, own = self._source
        if name == "weight_scale" and self.layout is None:
            return True
        return weights.moved(f"{own}.{'weight' if name in self._parts else name}", source, moved)

    def frozen(self) -> FrozenLinear:
        """The weights that the buffers hold."""
        if self.layout is None:
            return FrozenLinear(self.weight, self.weight_scale, self.bias, pre_quant_scale=self.pre_quant_scale)
        parts = tuple(getattr(self, name) for name in self._parts)
        return FrozenLinear(self.weight, None, self.bias, parts, self.layout, self.pre_quant_scale)

    def forward(self, x: Tensor, mask: DropMask | None = None) -> Tensor:
        frozen = self.frozen()
        return frozen.apply(x) if self.adapter is None else self.adapter(x, frozen, mask)


Masks = dict[str, DropMask]
"""The dropout masks of a block, or of a part of one, by the names of its Linears."""


def masks_of(prefix: str, masks: Masks) -> Masks:
    """The dropout masks of one part of a block, by the names inside it. prefix: of the part, such as `img.`."""
    return {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}
