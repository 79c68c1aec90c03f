"""Singular components of an update, and the LoRA of the largest of them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...models.adapters.pissa import largest_parts
from ..files.lora_model import LowRank
from ..files.patches import EMPTY


@dataclass(frozen=True)
class Size:
    """Size of the LoRA that is made.

    rank: the largest rank of a layer; 0 for as many as the update has.
    energy: share of the squared norm that is enough, above 0 to 1; a layer may need fewer ranks for it.
    """

    rank: int
    energy: float = 1.0


@dataclass(frozen=True)
class Components:
    """Singular components of delta W, the largest first.

    left: (out, r) fp32, left singular vectors.
    sizes: (r,) fp32, singular values.
    right: (r, in) fp32, right singular vectors.
    total: squared Frobenius norm of delta W, which may hold more than these components.
    """

    left: Tensor
    sizes: Tensor
    right: Tensor
    total: float

    def rank_for(self, energy: float) -> int:
        """Return the smallest rank that holds this share of the squared norm, 1 or more; all if none does."""
        filled = int((self.sizes > EMPTY * self.sizes[0]).sum()) if len(self.sizes) else 0
        if energy >= 1:
            return max(1, filled)
        shares = self.sizes.double().square().cumsum(0) / max(self.total, torch.finfo(torch.float64).tiny)
        enough = int((shares < energy).sum()) + 1
        return max(1, min(enough, filled, len(self.sizes)))

    def truncated(self, rank: int) -> tuple[LowRank, float]:
        """Return the LoRA of the `rank` largest components, alpha = rank, and the share of the norm that is lost
        (Frobenius; Eckart & Young 1936: no LoRA of this rank loses less)."""
        root = self.sizes[:rank].sqrt()
        energy = float(self.sizes[:rank].double().square().sum())
        loss = math.sqrt(max(0.0, 1.0 - energy / self.total)) if self.total else 0.0
        down, up = self.right[:rank] * root[:, None], self.left[:, :rank] * root
        return LowRank(down.contiguous(), up.contiguous(), float(len(down))), loss


def components_of(update: LowRank) -> Components:
    """Compute all components of a low-rank update, from QR factors: delta W itself is never computed."""
    rows, upper = torch.linalg.qr(update.scaled_up.double())
    columns, lower = torch.linalg.qr(update.down.double().T)
    left, sizes, right = torch.linalg.svd(upper @ lower.T)
    count = len(sizes)
    return Components(
        (rows @ left[:, :count]).float(),
        sizes.float(),
        (columns @ right[:count].T).T.float(),
        _energy(sizes.float()),
    )


def largest_components(delta: Tensor, rank: int, source: torch.Generator) -> Components:
    """Compute the `rank` largest components of delta W (out, in), or all of them if there are not so many.

    A matrix of at most four times the rank is decomposed whole; a larger one by subspace iteration from a start that is
    drawn from `source`.
    """
    if min(delta.shape) <= 4 * rank:
        left, sizes, right = torch.linalg.svd(delta.float(), full_matrices=False)
        return Components(left[:, :rank], sizes[:rank], right[:rank], _energy(sizes))
    return Components(*largest_parts(delta.float(), rank, source), _energy(delta))


def relative_loss(delta: Tensor, update: Tensor) -> float:
    """Return the share of delta W's norm (Frobenius) that an update leaves out."""
    return float((delta - update).norm() / delta.norm())


def _energy(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
