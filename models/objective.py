"""The objective of a model: its noise levels, noising, and the target of its output."""

import math
from typing import Protocol

import torch
from torch import Tensor


class Objective(Protocol):
    """Noising and target of one sample, whose latent and noise have shape (C, …).

    Training samples a *level* from 0 (the image) to 1 (noise). `noise_level` turns it into the model's own sigma, which
    all other methods take.

    is_flow: True if the level is the sigma of flow matching, which some training options are defined for.
    """

    @property
    def is_flow(self) -> bool: ...

    def noise_level(self, level: float) -> float:
        """Return the model's sigma at a level."""
        ...

    def add_noise(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """Compute x_t in fp32, (C, …)."""
        ...

    def target(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """Compute the output in fp32, (C, …), from which a sampler recovers `latent`, at the x_t of this noise."""
        ...

    def noise_ratio(self, sigma: float) -> float:
        """Return noise over signal in x_t."""
        ...

    def output_scale(self, sigma: float) -> float:
        """Return the error of the denoised latent for an error of 1 in the output."""
        ...


class FlowMatching:
    """Flow matching: the straight path from the image to noise; the output is the velocity."""

    is_flow = True

    def noise_level(self, level: float) -> float:
        return level

    def add_noise(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """Compute x_t = (1 − sigma)·x0 + sigma·noise in fp32, all (C, …)."""
        # As a tensor: 1 − sigma has to be rounded in fp32, like the model's timestep.
        level = torch.tensor(sigma, dtype=torch.float32)
        return (1.0 - level) * latent.float() + level * noise.float()

    def target(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """Compute the velocity noise − x0 in fp32, all (C, …): the derivative of x_t with respect to sigma."""
        return noise.float() - latent.float()

    def noise_ratio(self, sigma: float) -> float:
        return sigma / (1.0 - sigma) if sigma < 1.0 else math.inf

    def output_scale(self, sigma: float) -> float:
        """Return sigma, by x0 = x_t − sigma·v."""
        return sigma
