"""Loss of the model's output, and the weight of each noise level."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory.host.to_device import to_device
from .options import FLOW_WEIGHTINGS, LOSSES, ObjectiveOptions

# Lower bound for sigma_sqrt, which is infinite at 0: the smallest sigma in diffusers' table of 1000.
MIN_SIGMA = 1e-3


@dataclass(frozen=True)
class Signal:
    """Noise and signal of a batch whose noise levels are not flow matching sigmas, which determine both.

    noise_ratio: noise over signal in x_t, (B,).
    output_scale: error of x0 for an error of 1 in the output, (B,).
    """

    noise_ratio: Tensor
    output_scale: Tensor

    def to(self, device: torch.device) -> "Signal":
        """Copy both to `device`."""
        return Signal(to_device(self.noise_ratio, device), to_device(self.output_scale, device))


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
    elementwise = _losses(prediction.float() - target.float(), loss, threshold)
    if weights is None:
        return elementwise.mean(dim=(1, 2))
    return (elementwise.mean(dim=2) * weights).sum(dim=1) / weights.sum(dim=1)


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


def huber_threshold(options: ObjectiveOptions, level: Tensor, signal: Signal | None = None) -> Tensor:
    """Compute c of the Huber losses for each noise level, (B,) → (B,) (kohya-ss/sd-scripts, `--huber_schedule`).

    constant: huber_c.
    exponential: exp(t·ln(huber_c)) with timestep t from 0 to 1, hence huber_c^level: 1 at level 0, huber_c at level 1.
    snr: (1 − huber_c) / (1 + noise/signal)² + huber_c. On the straight path noise/signal is sigma / (1 − sigma), hence
    (1 − huber_c)·(1 − sigma)² + huber_c.
    """
    c = options.huber_c
    if options.huber_schedule == "exponential":
        return torch.exp(math.log(c) * level)
    if options.huber_schedule == "snr":
        return (1.0 - c) * ((1.0 - level) if signal is None else 1.0 / (1.0 + signal.noise_ratio)).square() + c
    return torch.full_like(level, c)


def sigma_weight(options: ObjectiveOptions, level: Tensor, signal: Signal | None = None) -> Tensor:
    """Compute the loss weight of each noise level, (B,) → (B,).

    none: 1.
    sigma_sqrt: sigma^−2, with sigma at least 0.001 (diffusers, compute_loss_weighting_for_sd3).
    cosmap: 2 / (π·(1 − 2·sigma + 2·sigma²)) (Esser et al. 2024, arXiv 2403.03206, sec. 3.1; diffusers, same function).
    min_snr: Hang et al. 2023, arXiv 2303.09556, sec. 3.4, weight the error of x0 by min(SNR, gamma), and hence that of
    the output by output_scale²·min(SNR, gamma): min(SNR, gamma)/SNR if it is the noise, min(SNR, gamma)/(SNR + 1) if it
    is v. On the straight path SNR = ((1 − sigma)/sigma)² and x0 = x_t − sigma·v, so that the weight of the
    velocity's squared error is sigma²·min(SNR, gamma) = min((1 − sigma)², gamma·sigma²).

    sigma_sqrt and cosmap are for flow matching only, with sigma as the level: `flow_options` rejects them otherwise.
    """
    assert signal is None or options.weighting not in FLOW_WEIGHTINGS, options.weighting
    if options.weighting == "sigma_sqrt":
        return level.clamp_min(MIN_SIGMA).pow(-2)
    if options.weighting == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * level + 2.0 * level.square()))
    if options.weighting == "min_snr" and signal is not None:
        return signal.output_scale.square() * signal.noise_ratio.pow(-2).clamp_max(options.min_snr_gamma)
    if options.weighting == "min_snr":
        return torch.minimum((1.0 - level).square(), options.min_snr_gamma * level.square())
    return torch.ones_like(level)


def training_loss(
    options: ObjectiveOptions,
    prediction: Tensor,
    target: Tensor,
    level: Tensor,
    weights: Tensor | None,
    signal: Signal | None = None,
) -> Tensor:
    """Compute the weighted training loss of each sample, (B,).

    prediction, target: (B, N, C).
    level: noise levels in 0 to 1, (B,), fp32.
    weights: weights of the tokens, (B, N), or None.
    signal: None for flow matching.
    """
    threshold = huber_threshold(options, level, signal) if options.loss in ("huber", "pseudo_huber") else None
    loss = velocity_loss(prediction, target, options.loss, weights, threshold)
    return loss if options.weighting == "none" else loss * sigma_weight(options, level, signal)
