"""Small frozen layers that the transformers of several families share, each over ComfyUI's own weights."""

from torch import Tensor
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ...memory.weights.residency import FrozenModule


class FrozenTensors(FrozenModule):
    """Small tensors of one module of the model, in the compute dtype, under the model's own names."""

    def __init__(self, weights: FrozenWeights, prefix: str, *names: str):
        super().__init__()
        self._source = (weights, prefix, names)
        self.take()

    def take(self) -> None:
        weights, prefix, names = self._source
        for name in names:
            self.register_buffer(name, weights.tensor(f"{prefix}.{name}"), persistent=False)

    def repoint(self, name: str, source: Tensor, target: Tensor) -> None:
        weights, prefix, _ = self._source
        weights.repoint(f"{prefix}.{name}", source, target)


class RMSNorm(FrozenTensors):
    """RMS norm over the last axis (arXiv 1910.07467)."""

    weight: Tensor | None

    def __init__(self, weights: FrozenWeights, prefix: str, eps: float | None):
        super().__init__(weights, prefix, "weight")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class LayerNorm(FrozenTensors):
    """Layer norm with weights over the last axis."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weights: FrozenWeights, prefix: str, eps: float):
        super().__init__(weights, prefix, "weight", "bias")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
