"""The objective of any ComfyUI model, from its own `model_sampling`."""

import math
from functools import cached_property
from typing import Any

import comfy.model_sampling as core
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

# At 0 the output has no effect on the denoised latent, so the target is undefined.
LEAST_FLOW_SIGMA = 1e-6
_REFUSED = (core.IMG_TO_IMG, core.IMG_TO_IMG_FLOW, core.StableCascadeSampling)


def objective_of(patcher: ModelPatcher) -> "SamplingObjective":
    """Return the objective of a MODEL, by the sampling patched onto it, if any.

    Raises ValueError for a sampling that training does not support.
    """
    sampling = patcher.get_model_object("model_sampling")
    kind = type(patcher.model).__name__
    if isinstance(sampling, _REFUSED):
        raise ValueError(
            f"model is a {kind} and samples by {_title(sampling)}, which Train LoRA can't train; connect another MODEL."
        )
    return SamplingObjective(sampling)


def _title(sampling: Any) -> str:
    return next(kind.__name__ for kind in _REFUSED if isinstance(sampling, kind))


def default_shift(model: Any) -> float:
    """Return the shift of the class's own schedule, as `objective.shift_sigma` applies it: 1 without one.

    model: a ComfyUI BaseModel.
    """
    sampling = model.model_sampling
    if isinstance(sampling, core.ModelSamplingFlux):
        return math.exp(sampling.shift)  # the shift is a logarithm, as in `flux_time_shift`
    return float(sampling.shift) if isinstance(sampling, core.ModelSamplingDiscreteFlow) else 1.0


class SamplingObjective:
    """Noising and target of one sample by ComfyUI's `model_sampling`.

    Levels are sigmas of flow matching if the model is trained so, else fractions of its noise schedule: of the T
    timesteps for a model with timesteps, of the steps in log sigma for one without.
    """

    def __init__(self, sampling: Any):
        self.sampling = sampling

    @property
    def is_flow(self) -> bool:
        return isinstance(self.sampling, core.CONST | core.COSMOS_RFLOW)

    def noise_level(self, level: float) -> float:
        """Return sigma at a level in 0 to 1.

        Models with timesteps get one of their schedule's sigmas, each for an equal share of the levels: core passes the
        model the nearest timestep, which between two of them would not match the noise in x_t.
        """
        if isinstance(self.sampling, core.CONST):
            return max(level, LEAST_FLOW_SIGMA)
        if isinstance(self.sampling, core.COSMOS_RFLOW):
            low, high = float(self.sampling.sigma_min), float(self.sampling.sigma_max)
            return min(max(level / (1.0 - level), low), high) if level < 1.0 else high
        count = len(self._table)
        if isinstance(self.sampling, core.ModelSamplingDiscrete):
            return self._table[min(int(level * count), count - 1)]
        place = level * (count - 1)
        lower = min(int(place), count - 2)
        logs = math.log(self._table[lower]), math.log(self._table[lower + 1])
        return math.exp(logs[0] + (place - lower) * (logs[1] - logs[0]))

    @cached_property
    def _table(self) -> list[float]:
        """The sigmas of the schedule, ascending."""
        return list(self.sampling.sigmas.detach().double().tolist())

    def add_noise(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """Compute x_t in fp32. latent, noise: (C, …)."""
        return self._noised(latent.float(), noise.float(), sigma)

    def target(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """Solve calculate_denoised(sigma, target, x_t) = latent for the target. latent, noise: (C, …).

        It is affine in the output. In fp64, since x_t and the latent differ by little at low noise.
        """
        latent, noise = latent.double(), noise.double()
        x_t = self._noised(latent, noise, sigma)
        zeros, ones = torch.zeros_like(x_t), torch.ones_like(x_t)
        slope = self._denoised(ones, zeros, sigma) - self._denoised(zeros, zeros, sigma)
        return ((latent - self._denoised(zeros, x_t, sigma)) / slope).float()

    def noise_ratio(self, sigma: float) -> float:
        ones, zeros = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        noise, signal = self._noised(zeros, ones, sigma).item(), self._noised(ones, zeros, sigma).item()
        return noise / signal if signal else math.inf

    def output_scale(self, sigma: float) -> float:
        ones, zeros = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        return abs(self._denoised(ones, zeros, sigma).item() - self._denoised(zeros, zeros, sigma).item())

    def _noised(self, latent: Tensor, noise: Tensor, sigma: float) -> Tensor:
        level = torch.tensor([sigma], dtype=latent.dtype, device=latent.device)
        # Copies: core writes into its arguments.
        x_t = self.sampling.noise_scaling(level, noise[None].clone(), latent[None].clone())[0]
        # Only CogVideoX's x is x_t of DDPM, by its `calculate_input` and `calculate_denoised`, and not x0 +
        # sigma·noise, as in its `noise_scaling`.
        return x_t / (1.0 + level**2) ** 0.5 if isinstance(self.sampling, core.V_PREDICTION_DDPM) else x_t

    def _denoised(self, output: Tensor, x_t: Tensor, sigma: float) -> Tensor:
        level = torch.tensor([sigma], dtype=x_t.dtype, device=x_t.device)
        return self.sampling.calculate_denoised(level, output[None].clone(), x_t[None].clone())[0]
