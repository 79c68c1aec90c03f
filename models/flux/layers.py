"""Layers of FLUX's transformers over frozen weights."""

from torch import Tensor, nn
from torch.nn import functional as F

from ...memory.frozen import FrozenWeights
from ...memory.residency import FrozenModule
from ..lora_linear import LoraLinear


class QKNorm(FrozenModule):
    """RMS norm of queries and keys over the head dimension."""

    query_scale: Tensor | None
    key_scale: Tensor | None

    def __init__(self, weights: FrozenWeights, name: str, eps: float | None):
        super().__init__()
        self._source = (weights, name)
        self.take()
        self.eps = eps

    def take(self) -> None:
        weights, name = self._source
        self.register_buffer("query_scale", weights.tensor(f"{name}.query_norm.weight"), persistent=False)
        self.register_buffer("key_scale", weights.tensor(f"{name}.key_norm.weight"), persistent=False)

    def moved(self, name: str, source: Tensor, moved: Tensor) -> None:
        weights, own = self._source
        weights.moved(f"{own}.{name.removesuffix('_scale')}_norm.weight", source, moved)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        head = q.shape[-1:]
        return F.rms_norm(q, head, self.query_scale, self.eps), F.rms_norm(k, head, self.key_scale, self.eps)


class Embedder(nn.Module):
    """Two Linears with SiLU between, for time, guidance and the pooled text."""

    def __init__(self, weights: FrozenWeights, name: str):
        super().__init__()
        self.in_layer = LoraLinear(weights, f"{name}.in_layer")
        self.out_layer = LoraLinear(weights, f"{name}.out_layer")

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gated_silu(x: Tensor) -> Tensor:
    """(…, 2·D) → (…, D): SiLU of the first half times the second (SwiGLU, arXiv 2002.05202)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value
