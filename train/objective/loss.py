"""Loss of the velocity prediction, and the weight of each noise level."""

import math

import torch
from torch import Tensor

from .options import LOSSES, ObjectiveOptions

# Lower bound for sigma_sqrt, which is infinite at 0: the smallest sigma in diffusers' table of 1000.
MIN_SIGMA = 1e-3


def velocity_loss(
    prediction: Tensor,
    target: Tensor,
    loss: str = "mse",
    weights: Tensor | None = None,
    threshold: Tensor | None = None,
) -> Tensor:
    """Compute the loss of each sample, (B,) in fp32: the mean over its tokens and channels.

    prediction, target: (B, N, C).
    loss: one of LOSSES.
    weights: weights of the tokens, (B, N). The mean is divided by their sum, so that tokens of weight 0 are left out.
    threshold: c of the Huber losses, (B,).

    With e = prediction − target:
    mse: e².
    l1: |e|.
    huber: e² up to |e| = c, 2·c·|e| − c² beyond (twice Huber 1964, so that small errors count as in mse).
    pseudo_huber: 2·c·(sqrt(e² + c²) − c) (kohya-ss/sd-scripts, `--loss_type huber`), from e² to 2·c·|e|.
    """
    assert prediction.shape == target.shape, (prediction.shape, target.shape)
    each = _losses(prediction.float() - target.float(), loss, threshold)
    if weights is None:
        return each.mean(dim=(1, 2))
    return (each.mean(dim=2) * weights).sum(dim=1) / weights.sum(dim=1)


def _losses(error: Tensor, loss: str, threshold: Tensor | None) -> Tensor:
    assert loss in LOSSES, loss
    if loss == "mse":
        return error.square()
    if loss == "l1":
        return error.abs()
    assert threshold is not None, loss
    c = threshold.float().reshape(-1, 1, 1)
    if loss == "huber":
        return torch.where(error.abs() <= c, error.square(), 2 * c * error.abs() - c.square())
    # sqrt(e² + c²) − c written as e² / (sqrt(e² + c²) + c), which avoids cancellation for small e
    return 2 * c * error.square() / ((error.square() + c.square()).sqrt() + c)


def huber_threshold(options: ObjectiveOptions, sigma: Tensor) -> Tensor:
    """Compute c of the Huber losses for each sigma, (B,) → (B,) (kohya-ss/sd-scripts, `--huber_schedule`).

    constant: huber_c.
    exponential: exp(t·ln(huber_c)) with timestep t from 0 to 1, hence huber_c^sigma: 1 at sigma 0, huber_c at sigma 1.
    snr: (1 − huber_c) / (1 + noise/signal)² + huber_c. On the straight path noise/signal is sigma / (1 − sigma), hence
    (1 − huber_c)·(1 − sigma)² + huber_c.
    """
    c = options.huber_c
    if options.huber_schedule == "exponential":
        return torch.exp(math.log(c) * sigma)
    if options.huber_schedule == "snr":
        return (1.0 - c) * (1.0 - sigma).square() + c
    return torch.full_like(sigma, c)


def sigma_weight(options: ObjectiveOptions, sigma: Tensor) -> Tensor:
    """Compute the loss weight of each sigma, (B,) → (B,).

    none: 1.
    sigma_sqrt: sigma^−2, with sigma at least 0.001 (diffusers, compute_loss_weighting_for_sd3).
    cosmap: 2 / (π·(1 − 2·sigma + 2·sigma²)) (Esser et al. 2024, arXiv 2403.03206, sec. 3.1; diffusers, same function).
    min_snr: Hang et al. 2023, arXiv 2303.09556, sec. 3.4, weight the error of x0 by min(SNR, gamma). On the straight
    path SNR = ((1 − sigma)/sigma)² and x0 = x_t − sigma·v, so that the weight of the velocity's squared error is
    sigma²·min(SNR, gamma) = min((1 − sigma)², gamma·sigma²).
    """
    if options.weighting == "sigma_sqrt":
        return sigma.clamp_min(MIN_SIGMA).pow(-2)
    if options.weighting == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma.square()))
    if options.weighting == "min_snr":
        return torch.minimum((1.0 - sigma).square(), options.min_snr_gamma * sigma.square())
    return torch.ones_like(sigma)


def training_loss(
    options: ObjectiveOptions, prediction: Tensor, target: Tensor, sigma: Tensor, weights: Tensor | None
) -> Tensor:
    """Compute the weighted training loss of each sample, (B,).

    prediction, target: (B, N, C).
    sigma: noise levels, (B,), fp32.
    weights: weights of the tokens, (B, N), or None.
    """
    threshold = huber_threshold(options, sigma) if options.loss in ("huber", "pseudo_huber") else None
    loss = velocity_loss(prediction, target, options.loss, weights, threshold)
    return loss if options.weighting == "none" else loss * sigma_weight(options, sigma)
