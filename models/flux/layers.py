"""Layers of FLUX's transformers over frozen weights."""

from torch import Tensor, nn
from torch.nn import functional as F

from ...memory.weights.frozen import FrozenWeights
from ..layers.frozen import RMSNorm
from ..layers.lora_linear import LoraLinear


class QKNorm(nn.Module):
    """RMS norms of queries and keys over the head dimension, which `norm_rope` applies."""

    def __init__(self, weights: FrozenWeights, name: str, eps: float | None):
        super().__init__()
        self.query = RMSNorm(weights, f"{name}.query_norm", eps)
        self.key = RMSNorm(weights, f"{name}.key_norm", eps)


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
    """Compute SiLU of the first half times the second, (…, 2·D) → (…, D) (SwiGLU, arXiv 2002.05202)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value
