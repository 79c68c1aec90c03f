"""LoRA of a convolution, as kohya's scripts train it (kohya-ss/sd-scripts, networks/lora.py)."""

from torch import Tensor
from torch.nn.functional import conv2d

from ...memory.weights.frozen_conv import FrozenConv
from ...memory.weights.frozen_linear import FrozenLinear
from .base import AdapterSpec, DropMask
from .lora import LoraAdapter
from .pissa import PissaAdapter


class ConvLoraAdapter(LoraAdapter):
    """delta W = alpha / rank · up · down on the weight as a matrix, (out, in·height·width).

    It runs as two convolutions: down has the kernel, the stride and the padding of the frozen one, up is 1 × 1. The
    master weights are the matrices; a file stores them as (rank, in, height, width) and (out, rank, 1, 1).
    """

    def __init__(self, spec: AdapterSpec, out_features: int, in_features: int, kernel: tuple[int, ...]):
        super().__init__(spec, out_features, in_features)
        self.kernel = kernel

    def forward(self, x: Tensor, frozen: FrozenLinear | FrozenConv, mask: DropMask | None) -> Tensor:
        """Run the convolution with the adapter: x (B, in, H, W) → (B, out, h, w). mask: one row per cell of the h·w
        output."""
        assert isinstance(frozen, FrozenConv)
        y = frozen.apply(x)
        down, up = self.factors(x.dtype)
        activations = frozen.convolve(x, self._as_kernel(down)) * self.scale
        if mask is not None:
            rank_mask = self.expand_mask(mask.update).transpose(1, 2)  # (B, rank or 1, h·w or 1)
            activations = activations * rank_mask.unflatten(
                2, activations.shape[2:] if rank_mask.shape[2] > 1 else (1, 1)
            )
        return y + conv2d(activations, up[:, :, None, None])

    def tensors(self) -> dict[str, Tensor]:
        tensors = super().tensors()
        down, up = tensors["lora_down.weight"], tensors["lora_up.weight"]
        return tensors | {"lora_down.weight": self._as_kernel(down), "lora_up.weight": up[:, :, None, None]}

    def structure(self) -> str:
        return f"conv{self.kernel} {super().structure()}"

    def _as_kernel(self, down: Tensor) -> Tensor:
        return down.unflatten(1, (-1, *self.kernel))


class ConvPissaAdapter(ConvLoraAdapter, PissaAdapter):
    """PiSSA of a convolution."""
