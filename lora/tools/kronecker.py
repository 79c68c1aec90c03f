"""LoKr of any update: the nearest Kronecker product of two matrices."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...models.adapters.base import AdapterSpec, factorize
from ...models.adapters.lokr import LokrAdapter
from ...models.convolutions import WeightShape
from ..files.lora_model import LowRank
from ..files.spellings import ALPHA
from .components import Components, Size, largest_components, relative_loss

_LEADING, _ITERATIONS = 8, 16  # several components at once, so that the first of them converges fast
_ROUNDS = 16


@dataclass(frozen=True)
class KroneckerUpdate:
    """One layer's update, delta W = w1 ⊗ w2, in the tensors of `LokrAdapter`.

    w1: (l, m).
    w2: (k, n), as a matrix or of low rank; for a convolution n counts the kernel too.
    """

    w1: Tensor
    w2: Tensor | LowRank

    @property
    def rank(self) -> int:
        """Rank of w2; of a whole matrix the largest that it can have."""
        return self.w2.rank if isinstance(self.w2, LowRank) else min(self.w2.shape)

    def tensors(self, shape: WeightShape) -> dict[str, Tensor]:
        """Return the tensors of a file by suffix. shape: of the layer's weight."""
        alpha = {ALPHA: torch.tensor(float(self.rank))}
        if isinstance(self.w2, LowRank):
            return {"lokr_w1": self.w1, "lokr_w2_a": self.w2.up, "lokr_w2_b": self.w2.down, **alpha}
        return {"lokr_w1": self.w1, "lokr_w2": self.w2.reshape(len(self.w2), -1, *shape[2:]), **alpha}


def nearest_kronecker(
    delta: Tensor, shape: WeightShape, factor: int, size: Size, source: torch.Generator
) -> tuple[KroneckerUpdate, float]:
    """Find the Kronecker product that is nearest to delta W (out, in·kernel). Also returns the share of the norm that
    is lost.

    With the blocks of delta W as the rows of a matrix, each a multiple of w2, w1 and w2 are its largest singular
    component (Van Loan & Pitsianis 1993, *Approximation with Kronecker products*). A w2 of low rank is found by turns:
    for one w1 the truncated sum of the blocks is the best w2, for one w2 the projections of the blocks on it are the
    best w1. No turn makes the loss larger.

    shape: of the layer's weight, cut by `factor` as `LokrAdapter` does. size: its rank is that of w2, which is stored
    whole under the condition of `LokrAdapter.is_full_matrix`. source: of the start of the iteration.
    """
    rows, columns, *kernel = shape
    (low, k), (m, n) = factorize(rows, factor), factorize(columns, factor)
    blocks = delta.float().view(low, k, m, n * torch.Size(kernel).numel()).transpose(1, 2).flatten(2).flatten(0, 1)
    w1 = _leading(blocks, source)
    total = float(blocks.double().square().sum())
    components = _components(w1 @ blocks, k, total, size.rank or min(k, blocks.shape[1] // k), source)
    rank = min(components.rank_for(size.energy), len(components.sizes))
    if LokrAdapter.is_full_matrix(AdapterSpec(LokrAdapter.algorithm, rank, rank, factor), rows, columns):
        w2 = w1 @ blocks
        loss = relative_loss(blocks, torch.outer(w1, w2))
        w1, w2 = _balanced(w1, w2)
        return KroneckerUpdate(w1.view(low, m), w2.view(k, -1)), loss
    for _ in range(_ROUNDS):
        w1 = blocks @ _truncated(components, rank)
        w1 = w1 / w1.norm()
        components = _components(w1 @ blocks, k, total, rank, source)
    w2 = _truncated(components, rank)
    loss = relative_loss(blocks, torch.outer(w1, w2))
    w1, w2 = _balanced(w1, w2)
    update, _ = _components(w2, k, total, rank, source).truncated(rank)
    return KroneckerUpdate(w1.view(low, m), update), loss


def _leading(blocks: Tensor, source: torch.Generator) -> Tensor:
    """Compute the first left singular vector of a matrix with far more columns than rows, by subspace iteration."""
    basis = torch.randn(len(blocks), min(_LEADING, len(blocks)), generator=source)
    for _ in range(_ITERATIONS):
        basis, _ = torch.linalg.qr(blocks @ (blocks.T @ basis))
    projected = basis.T @ blocks
    return basis @ torch.linalg.eigh(projected @ projected.T).eigenvectors[:, -1]


def _components(w2: Tensor, rows: int, total: float, rank: int, source: torch.Generator) -> Components:
    """Compute components of w2, a vector of its rows. total: squared norm of delta W."""
    return replace(largest_components(w2.view(rows, -1), rank, source), total=total)


def _truncated(components: Components, rank: int) -> Tensor:
    """Return the sum of the largest components as a vector."""
    return (components.left[:, :rank] * components.sizes[:rank] @ components.right[:rank]).flatten()


def _balanced(w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Scale two vectors to the same mean square, with the same product: so both suit 16 bits."""
    scale = (w2.square().mean() / w1.square().mean()) ** 0.25
    return w1 * scale, w2 / scale
