"""What the model is shown and what it is to say, of one clean latent, its noise and its noise level."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .options import ObjectiveOptions


def draw_noise(shape: Sequence[int], generator: torch.Generator, offset: float = 0.0) -> Tensor:
    """Normal noise of one sample, fp32 on the host. shape: (C, …).

    offset: n + offset·m, with one normal number m per channel, the same at every place and frame, so that the mean of
    a channel is learnt too (Guttenberg 2023, "Diffusion with Offset Noise"; `--noise_offset` of kohya-ss/sd-scripts).
    """
    noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    if not offset:
        return noise
    return noise + offset * torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=generator, dtype=torch.float32)


def perturbed(noise: Tensor, options: ObjectiveOptions, generator: torch.Generator) -> Tensor:
    """The noise that the model is shown: noise + gamma·xi, xi normal, while the target keeps `noise` (input
    perturbation: Ning et al. 2023, arXiv 2301.11706, algorithm 1).

    gamma is `ip_noise_gamma`, or with `ip_noise_gamma_random_strength` that times a number from [0, 1), one per sample
    (kohya-ss/sd-scripts, which draws one per batch). noise: fp32 on the host, as the result.
    """
    gamma = options.ip_noise_gamma
    if not gamma:
        return noise
    if options.ip_noise_gamma_random_strength:
        gamma *= torch.rand((), generator=generator, dtype=torch.float64).item()
    return noise + gamma * torch.randn(noise.shape, generator=generator, dtype=torch.float32)


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """x_t = (1 − sigma)·x0 + sigma·noise in fp32. x0, noise: (B, …); sigma: (B,)."""
    sigma = sigma.float().reshape(-1, *[1] * (x0.ndim - 1))
    return (1.0 - sigma) * x0.float() + sigma * noise.float()


def velocity_target(x0: Tensor, noise: Tensor) -> Tensor:
    """noise − x0 in fp32, the velocity along the path from the picture to noise."""
    return noise.float() - x0.float()
