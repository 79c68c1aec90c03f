"""Random noise of training samples; the family's objective (`models/objective.py`) adds it to the latent."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .options import ObjectiveOptions


def sample_noise(shape: Sequence[int], generator: torch.Generator, offset: float = 0.0) -> Tensor:
    """Sample the normal noise of one sample, fp32 on the host.

    shape: (C, …).
    offset: gives n + offset·m with one normal number m per channel, equal at all positions and frames, so that the mean
        of a channel is learnt too (Guttenberg 2023, "Diffusion with Offset Noise"; `--noise_offset` of
        kohya-ss/sd-scripts).
    """
    noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)
    if not offset:
        return noise
    return noise + offset * torch.randn((shape[0], *[1] * (len(shape) - 1)), generator=generator, dtype=torch.float32)


def perturb_noise(noise: Tensor, options: ObjectiveOptions, generator: torch.Generator) -> Tensor:
    """Perturb the noise of the model's input: noise + gamma·xi, xi normal; the target retains `noise`.

    noise: fp32 on the host, like the result.

    This is input perturbation (Ning et al. 2023, arXiv 2301.11706, algorithm 1). gamma is `ip_noise_gamma`. With
    `ip_noise_gamma_random_strength` it is multiplied by a uniform number from [0, 1), one per sample
    (kohya-ss/sd-scripts samples one per batch).
    """
    gamma = options.ip_noise_gamma
    if not gamma:
        return noise
    if options.ip_noise_gamma_random_strength:
        gamma *= torch.rand((), generator=generator, dtype=torch.float64).item()
    return noise + gamma * torch.randn(noise.shape, generator=generator, dtype=torch.float32)
