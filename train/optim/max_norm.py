"""Max-norm regularisation: after each step, updates that have grown too large are scaled down."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...models.adapters.base import Adapter


class MaxNorm:
    """Keeps the Frobenius norm of each layer's delta W at `limit` or below.

    After a step, with n = ‖delta W‖ and q = min(1, limit / n), each of the k matrices whose product delta W is, is
    multiplied by q^(1/k), and delta W so by q: down and up by √q, as kohya's `scale_weight_norms` (sd-scripts,
    networks/lora.py, apply_max_norm_regularization), the four of LoHa and the two or three of LoKr by that root, as
    LyCORIS (modules/loha.py and modules/lokr.py, apply_max_norm); after the max-norm constraint of Srivastava et al.
    2014 (JMLR 15, section 5.1).
    """

    def __init__(self, limit: float, adapters: Iterable[Adapter]):
        self.limit, self.adapters = limit, list(adapters)
        self.quotients: list[Tensor] = []
        assert all(adapter.has_norm for adapter in self.adapters)

    @torch.no_grad()
    def apply(self) -> None:
        """Scales what is over the limit; nothing is waited for."""
        self.quotients = []
        for adapter in self.adapters:
            quotient = (self.limit / adapter.norm()).clamp(max=1.0)
            matrices = list(adapter.parameters())
            root = quotient ** (1 / len(matrices))
            for matrix in matrices:
                matrix.mul_(root)
            self.quotients.append(quotient)

    def facts(self) -> dict[str, object]:
        """How many layers were scaled down after the last step."""
        scaled = sum(int(quotient < 1) for quotient in self.quotients)
        return {"modules_scaled": scaled}
