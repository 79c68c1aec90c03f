"""A training step written out in fp64 by plain autograd over a family's formulas, nothing recomputed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..models.family_case import FamilyCase
from .training import reference_masters

Gradients = dict[str, Tensor]
Velocity = Callable[[Any, Tensor, float], Tensor]
"""(sample, its noisy latent in the model's space, sigma) → (N, C)."""


def written_out_loss(
    case: FamilyCase, settings: Any, samples: Sequence[Any], velocity: Velocity, rng_key: tuple[int, int] = (0, 0)
) -> Tensor:
    """The loss of a micro-batch, a scalar in fp64; rng_key: (step, micro-batch).

    It is the mean over samples of mean((v − (noise − x0))²), which leaves out the tokens of clean frames.
    """
    from tessera.common.rng import generator
    from tessera.train.objective.noise import sample_noise
    from tessera.train.objective.timestep_sampling import sample_sigma

    total = torch.zeros((), dtype=torch.float64)
    for place, sample in enumerate(samples):
        x0 = case.in_model_space(sample.load().latent.double())
        sigma_draw = generator(settings.seed, "sigma", *rng_key, place)
        sigma = sample_sigma(settings.objective, sigma_draw, sample.tokens, case.shift(sample))
        sigma = float(torch.tensor(sigma, dtype=torch.float32))
        noise = sample_noise(x0.shape, generator(settings.seed, "noise", *rng_key, place)).double()
        x_t = (1 - sigma) * x0 + sigma * noise
        clean = sample.clean_frames
        if clean:
            x_t[:, :clean] = x0[:, :clean]
        error = velocity(sample, x_t, sigma) - case.tokens(noise - x0, sample)
        total = total + error[clean * sample.tokens // sample.grid[0] :].square().mean() / len(samples)
    return total


def reference_gradients(
    case: FamilyCase, trainer: Any, tensors: Mapping[str, Tensor], batch: Sequence[int]
) -> tuple[float, Gradients]:
    """The loss of the samples at `batch` and its gradients, by the names of the LoRA's state."""
    lora, masters = reference_masters(trainer)
    guidance = trainer.settings.objective.guidance

    def velocity(sample: Any, x_t: Tensor, sigma: float) -> Tensor:
        return case.reference_velocity(tensors, sample, x_t, sigma, guidance, lora)

    samples = [trainer.context.data.samples[index] for index in batch]
    loss = written_out_loss(case, trainer.settings, samples, velocity)
    loss.backward()
    return float(loss.detach()), {name: gradient(p) for name, p in masters.items()}


def gradient(p: Tensor) -> Tensor:
    """Return the gradient in fp64, zeros if there is none."""
    return torch.zeros_like(p).double() if p.grad is None else p.grad.double()


def lora_gradients(trainer: Any) -> Gradients:
    """By the same names."""
    pairs = trainer.network.pairs.items()
    return {f"{name}.{side}": gradient(p) for name, pair in pairs for side, p in zip(("down", "up"), pair, strict=True)}
