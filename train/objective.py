"""The objective of rectified flow: which noise levels are drawn, what the model is shown, and what it is to say.

Sigma is the noise level: 0 is the picture, 1 is noise, and on the straight path between them x_t = (1 − sigma)·x0 +
sigma·noise the velocity is noise − x0 (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206, sec. 2).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from ..models.math import resolution_shift
from .options import ObjectiveOptions

LEAST_PART = 1e-4  # of the draws, that a range has to hold


def shift_sigma(sigma: float, shift: float) -> float:
    """s·sigma / (1 + (s − 1)·sigma): moves sigmas towards noise for s > 1 and leaves 0 and 1 in place.

    Esser et al. 2024, arXiv 2403.03206, sec. 5.3.2, with s = sqrt(m / n). FLUX's `time_shift`,
    exp(mu) / (exp(mu) + 1/sigma − 1), is the same with s = exp(mu).
    """
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def draw_sigma(options: ObjectiveOptions, generator: torch.Generator, tokens: int, shift: float = 1.0) -> float:
    """One noise level, 0 to 1, computed in float64 on the host.

    tokens: of the sample's picture, read by `resolution_shifted` only.
    shift: the family's own for training (1 leaves the draw as it is). `options.shift`, where it is above 0, takes its
    place, and takes the place of the resolution's shift too.

    logit_normal: sigmoid(mean + std·n), n from the normal distribution (arXiv 2403.03206, sec. 3.1), then shifted.
    uniform: from [0, 1), then shifted.
    resolution_shifted: logit_normal, then shifted by `resolution_shift(tokens)`.
    Where `min_sigma` or `max_sigma` narrow the range: `cut` draws from the distribution on condition that sigma lies in
    it, by the inverse of its distribution function; `squeeze` maps the drawn sigma to min + (max − min)·sigma.
    """
    shift = _shift_of(options, tokens, shift)
    low, high = options.min_sigma, options.max_sigma
    if (low, high) == (0.0, 1.0) or options.sigma_range == "squeeze":
        if options.timestep_sampling == "uniform":
            sigma = torch.rand((), generator=generator, dtype=torch.float64).item()
        else:
            n = torch.randn((), generator=generator, dtype=torch.float64)
            sigma = torch.sigmoid(options.logit_mean + options.logit_std * n).item()
        return low + (high - low) * shift_sigma(sigma, shift)
    least, most = (_distribution(options, shift_sigma(end, 1.0 / shift)) for end in (low, high))
    part = torch.rand((), generator=generator, dtype=torch.float64).item()
    drawn = shift_sigma(_quantile(options, least + (most - least) * part), shift)
    return min(max(drawn, low), high)


def check_range(options: ObjectiveOptions, tokens: int, shift: float) -> None:
    """Raises ValueError where hardly any sigma of the distribution lies in the range, so that none can be drawn."""
    if options.sigma_range == "squeeze":
        return
    shift = _shift_of(options, tokens, shift)
    ends = (shift_sigma(end, 1.0 / shift) for end in (options.min_sigma, options.max_sigma))
    least, most = (_distribution(options, end) for end in ends)
    if most - least < LEAST_PART:
        raise ValueError(
            f"Less than {LEAST_PART:g} of what timestep_sampling '{options.timestep_sampling}' draws lies between "
            f"min_sigma {options.min_sigma:g} and max_sigma {options.max_sigma:g}; widen them, or set sigma_range to "
            "'squeeze'."
        )


def _shift_of(options: ObjectiveOptions, tokens: int, shift: float) -> float:
    if options.shift > 0:
        return options.shift
    return resolution_shift(tokens) if options.timestep_sampling == "resolution_shifted" else shift


def _distribution(options: ObjectiveOptions, sigma: float) -> float:
    """The part of the draws, before they are shifted, that lies below `sigma`."""
    if not 0.0 < sigma < 1.0:
        return float(sigma > 0.5)
    if options.timestep_sampling == "uniform":
        return sigma
    return NormalDist(options.logit_mean, options.logit_std).cdf(math.log(sigma / (1.0 - sigma)))


def _quantile(options: ObjectiveOptions, part: float) -> float:
    """The sigma, before it is shifted, below which `part` of the draws lies."""
    if options.timestep_sampling == "uniform" or part in (0.0, 1.0):
        return part
    logit = NormalDist(options.logit_mean, options.logit_std).inv_cdf(part)
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -700 else 0.0


def draw_noise(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Normal noise of one sample, fp32 on the host."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_t = (1 − sigma)·x0 + sigma·noise in fp32. x0, noise: (B, …); sigma: (B,)."""
    sigma = sigma.float().reshape(-1, *[1] * (x0.ndim - 1))
    return (1.0 - sigma) * x0.float() + sigma * noise.float()


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """noise − x0 in fp32, the velocity along the path from the picture to noise."""
    return noise.float() - x0.float()


def velocity_loss(prediction: Tensor, target: Tensor, loss: str = "mse", weights: Tensor | None = None) -> Tensor:
    """The loss of each sample, (B,) in fp32: the mean over its tokens and channels. Both inputs are (B, N, C).

    weights: (B, N), how much each token counts; the mean is over the sum of the weights, so that tokens of weight 0
    are as if they were not there.
    """
    assert prediction.shape == target.shape, (prediction.shape, target.shape)
    assert loss == "mse", loss
    squares = (prediction.float() - target.float()).square()
    if weights is None:
        return squares.mean(dim=(1, 2))
    return (squares.mean(dim=2) * weights).sum(dim=1) / weights.sum(dim=1)
