"""Max-norm regularisation: limit the norm of each layer's delta W after each step."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...models.adapters.base import Adapter


class MaxNorm:
    """Limits the Frobenius norm of each layer's delta W to `limit`.

    With n = ‖delta W‖ and q = min(1, limit / n), each of the k factors of delta W is multiplied by q^(1/k), which
    multiplies delta W by q. For LoRA this scales down and up by √q, as kohya's `scale_weight_norms` (sd-scripts,
    networks/lora.py, apply_max_norm_regularization). LoHa has four factors and LoKr two or three, as in LyCORIS
    (modules/loha.py and modules/lokr.py, apply_max_norm). The constraint is that of Srivastava et al. 2014 (JMLR 15,
    section 5.1).
    """

    def __init__(self, limit: float, adapters: Iterable[Adapter]):
        self.limit, self.adapters = limit, list(adapters)
        self.quotients: list[Tensor] = []
        assert all(adapter.has_norm for adapter in self.adapters)

    @torch.no_grad()
    def apply(self) -> None:
        """Scale the layers above the limit, without a device synchronisation."""
        self.quotients = []
        for adapter in self.adapters:
            quotient = (self.limit / adapter.norm()).clamp(max=1.0)
            matrices = list(adapter.parameters())
            root = quotient ** (1 / len(matrices))
            for matrix in matrices:
                matrix.mul_(root)
            self.quotients.append(quotient)

    def facts(self) -> dict[str, object]:
        """Count the layers that were scaled after the last step, for the run's summary."""
        scaled = sum(int(quotient < 1) for quotient in self.quotients)
        return {"modules_scaled": scaled}
