"""Error of low-bit matmuls against full precision."""

import torch
from torch import Tensor

_AT_ONCE = 1 << 22  # elements of a result compared at once, in fp32
_LEAST_SQUARE = 1e-30  # in place of a norm of zero


class ErrorMeter:
    """Measures the error of a layer's low-precision matmuls against full precision, over all calls.

    sums: ‖low − full‖² and ‖full‖² of each channel of the outputs, without bias, and of the input's gradients, (2, n)
        each; on the device.
    """

    def __init__(self, device: torch.device):
        self.sums = [torch.zeros(2, 1, device=device), torch.zeros(2, 1, device=device)]

    @torch.no_grad()
    def add(self, back: bool, low: Tensor, full: Tensor) -> None:
        """Add a call, (…, n), unless its full result is not finite, as fp16 gradients may be at first."""
        channels = full.shape[-1]
        rows = max(1, _AT_ONCE // channels)
        squares = self.sums[back].new_zeros(2, channels)
        splits = (tensor.reshape(-1, channels).split(rows) for tensor in (low, full))
        for part, reference in zip(*splits, strict=True):
            wide = reference.float()
            squares += torch.stack(((part.float() - wide).square().sum(0), wide.square().sum(0)))
        self.sums[back] = self.sums[back] + torch.where(squares[1].sum().isfinite(), squares, 0.0)

    def errors(self) -> tuple[float, float]:
        """Return the error of forward and backward; 0 if nothing was measured, NaN if not finite.

        The larger of two: ‖low − full‖ / ‖full‖ over all channels, and the mean of the same per channel, each clamped
        to 1. One channel a thousand times larger would dominate the first, whatever the error of the others.
        """
        forward, backward = (_error(*sums.double().cpu()) for sums in self.sums)
        return forward, backward


def _error(errors: Tensor, sizes: Tensor) -> float:
    """Return the relative error. errors, sizes: squares per channel, (n,)."""
    together = (errors.sum() / sizes.sum().clamp(min=_LEAST_SQUARE)).sqrt()
    # A channel of zeros that stays zeros is exact.
    apart = (errors / sizes.clamp(min=_LEAST_SQUARE)).sqrt().clamp(max=1.0).mean()
    return float(torch.maximum(together, apart))
