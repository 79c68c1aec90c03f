"""A frozen Linear with an adapter beside it."""

from torch import Tensor

from ..memory.frozen import FrozenLinear, FrozenWeights
from ..memory.residency import FrozenModule
from .adapters import Adapter, DropMask


class LoraLinear(FrozenModule):
    """y = x·Wᵀ + b, and what its adapter makes of it, a LoRA or another one, where it has one.

    The frozen weight may be stored in a narrower dtype than x.
    """

    weight: Tensor
    weight_scale: Tensor | None
    bias: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str):
        super().__init__()
        self._source = (weights, name)
        self.take()
        self.adapter: Adapter | None = None

    def take(self) -> None:
        frozen = self.read()
        self.register_buffer("weight", frozen.weight, persistent=False)
        self.register_buffer("weight_scale", frozen.scale, persistent=False)
        self.register_buffer("bias", frozen.bias, persistent=False)

    def read(self) -> FrozenLinear:
        """The weights from the MODEL itself, where they lie."""
        weights, name = self._source
        return weights.linear(name)

    def read_on_device(self) -> FrozenLinear:
        """The weights on the training device, also where the buffers are slots that hold another block."""
        device = self._source[0].device
        return FrozenLinear(*(None if t is None else t.to(device) for t in self.read()))  # type: ignore[arg-type]

    def moved(self, name: str, source: Tensor, moved: Tensor) -> bool:
        weights, own = self._source
        return name == "weight_scale" or weights.moved(f"{own}.{name}", source, moved)

    def forward(self, x: Tensor, mask: DropMask | None = None) -> Tensor:
        frozen = FrozenLinear(self.weight, self.weight_scale, self.bias)
        return frozen.apply(x) if self.adapter is None else self.adapter(x, frozen, mask)


Masks = dict[str, DropMask]
"""The dropout masks of a block, or of a part of one, by the names of its Linears."""


def masks_of(prefix: str, masks: Masks) -> Masks:
    """The dropout masks of one part of a block, by the names inside it. prefix: of the part, such as `img.`."""
    return {name.removeprefix(prefix): mask for name, mask in masks.items() if name.startswith(prefix)}
