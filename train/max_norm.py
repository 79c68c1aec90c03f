"""Max-norm regularisation: after each step, updates that have grown too large are scaled down."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Pair = tuple[nn.Parameter, nn.Parameter, float]
"""down (rank, in), up (out, rank) and alpha / rank."""


class MaxNorm:
    """Keeps the Frobenius norm of each module's delta W = s·up·down at `limit` or below.

    After a step, with n = ‖delta W‖ and q = min(1, limit / n), down and up are each multiplied by √q: kohya's
    `scale_weight_norms` (sd-scripts, networks/lora.py, apply_max_norm_regularization), after the max-norm constraint of
    Srivastava et al. 2014 (JMLR 15, section 5.1).
    """

    def __init__(self, limit: float, pairs: Iterable[Pair]):
        self.limit, self.pairs = limit, list(pairs)
        self.quotients: list[Tensor] = []

    @torch.no_grad()
    def apply(self) -> None:
        """Scales what is over the limit; nothing is waited for."""
        self.quotients = []
        for down, up, scale in self.pairs:
            quotient = (self.limit / (scale * norm_of_product(up, down))).clamp(max=1.0)
            down.mul_(quotient.sqrt())
            up.mul_(quotient.sqrt())
            self.quotients.append(quotient)

    def facts(self) -> dict[str, object]:
        """How many modules were scaled down after the last step."""
        scaled = sum(int(quotient < 1) for quotient in self.quotients)
        return {"modules_scaled": scaled}


def norm_of_product(up: Tensor, down: Tensor) -> Tensor:
    """‖up·down‖ (Frobenius) from the Gram matrices, ‖up·down‖² = ⟨upᵀ·up, down·downᵀ⟩: delta W is never made."""
    return ((up.T @ up).double() * (down @ down.T)).sum().clamp(min=0).sqrt().float()
