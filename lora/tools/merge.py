"""Merge the updates of one layer: weighted sums, TIES and DARE, as `peft.utils.merge_utils` defines them."""

from collections.abc import Sequence

import torch
from torch import Tensor

WEIGHTED = "weighted"
TIES = "ties"
DARE = "dare"
DARE_TIES = "dare ties"
METHODS = (WEIGHTED, TIES, DARE, DARE_TIES)


def merge(deltas: Sequence[Tensor], weights: Sequence[float], method: str, density: float, seed: int) -> Tensor:
    """Merge updates of one shape.

    weighted: Σ wᵢ·Δᵢ (task arithmetic, Ilharco et al. 2022, arXiv 2212.04089).
    ties: of each update the `density` largest entries by magnitude; at each entry the sign with the larger sum; the
        mean of wᵢ·Δᵢ over the updates that have that sign (Yadav et al. 2023, arXiv 2306.01708).
    dare: of each update a share `density` of the entries, drawn at random and divided by it, then Σ wᵢ·Δᵢ (Yu et al.
        2023, arXiv 2311.03099).
    dare ties: drawn as in dare, joined as in ties.
    """
    source = torch.Generator().manual_seed(seed)
    if density < 1:
        if method == TIES:
            deltas = [_largest_part(delta, density) for delta in deltas]
        elif method in (DARE, DARE_TIES):
            deltas = [_random_part(delta, density, source) for delta in deltas]
    weighted = torch.stack([weight * delta for weight, delta in zip(weights, deltas, strict=True)])
    if method in (WEIGHTED, DARE):
        return weighted.sum(0)
    stacked = torch.stack(list(deltas))
    majority = torch.where(stacked.sum(0) >= 0, 1, -1)
    mask = stacked.sign() == majority
    return (weighted * mask).sum(0) / mask.sum(0).clamp(min=1)


def _largest_part(delta: Tensor, density: float) -> Tensor:
    flat = delta.flatten()
    places = flat.abs().topk(int(density * flat.numel())).indices
    mask = torch.zeros_like(flat)
    mask[places] = 1
    return (flat * mask).view_as(delta)


def _random_part(delta: Tensor, density: float, source: torch.Generator) -> Tensor:
    mask = torch.bernoulli(torch.full_like(delta, density), generator=source)
    return delta * mask / density
