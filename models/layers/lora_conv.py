"""A frozen convolution with an adapter."""

from torch import Tensor, nn

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.frozen_conv import FrozenConv
from ...memory.weights.frozen_linear import FrozenLinear
from ..adapters.base import DropMask
from .lora_linear import LoraLayer


class LoraConv(LoraLayer):
    """A convolution of the MODEL plus the update of its adapter, if it has one."""

    bias: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str, module: nn.Conv2d):
        super().__init__()
        self._source = (weights, name)
        self.kernel = module.kernel_size
        self._geometry = module.stride, module.padding, module.dilation
        self._has_bias = module.bias is not None
        self.take()
        self.shape = module.out_channels, self.weight[0].numel()
        self.storage = str(self.weight.dtype)[6:]
        self.adapter = None

    def take(self) -> None:
        weights, name = self._source
        self.register_buffer("weight", weights.stored(f"{name}.weight"), persistent=False)
        bias = weights.stored(f"{name}.bias") if self._has_bias else None
        self.register_buffer("bias", bias, persistent=False)

    def read_on_device(self) -> FrozenLinear:
        weights, name = self._source
        weight = weights.stored(f"{name}.weight")
        assert weight is not None, name
        return FrozenLinear(weight.flatten(1), None, None).to(weights.device)

    def repoint(self, name: str, source: Tensor, target: Tensor) -> bool:
        weights, layer_name = self._source
        return weights.repoint(f"{layer_name}.{name}", source, target)

    def frozen(self) -> FrozenConv:
        """Return the weights that the buffers hold."""
        return FrozenConv(self.weight, self.bias, *self._geometry)

    def forward(self, x: Tensor, mask: DropMask | None = None) -> Tensor:
        frozen = self.frozen()
        return frozen.apply(x) if self.adapter is None else self.adapter(x, frozen, mask)
