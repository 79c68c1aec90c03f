"""One sample of a training step of FLUX in fp64, written out: its draws, its tokens, the reference's velocity."""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

flux_forward = runpy.run_path(str(Path(__file__).parents[2] / "reference" / "flux.py"))["flux_forward"]


class ReferenceRow:
    """A sample at its place in micro-batch `micro` of step 0, as the run with these settings draws it.

    weights: of the model, fp64. target: (1, tokens, 64), noise − x0.
    """

    def __init__(
        self, settings: Any, weights: Mapping[str, Tensor], drawn_sample: Any, read: Any, micro: int, place: int
    ):
        from tessera.common.rng import generator
        from tessera.train.objective.noise import sample_noise
        from tessera.train.objective.timestep_sampling import sample_sigma

        self.weights = weights
        self.grid = drawn_sample.grid[1:]
        self.guidance = settings.objective.guidance
        x0 = (read.latent.double() - 0.1159) * 0.3611
        sigma = sample_sigma(
            settings.objective, generator(settings.seed, "sigma", 0, micro, place), drawn_sample.tokens
        )
        self.sigma = float(torch.tensor(sigma, dtype=torch.float32))
        noise = sample_noise(x0.shape, generator(settings.seed, "noise", 0, micro, place)).double()
        rows, columns = torch.meshgrid(*(torch.arange(side) for side in self.grid), indexing="ij")
        self.ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(1, -1, 3)
        self.noisy, self.target = self._tokens((1 - self.sigma) * x0 + self.sigma * noise), self._tokens(noise - x0)

    def _tokens(self, latent: Tensor) -> Tensor:
        height, width = self.grid
        return latent.reshape(16, height, 2, width, 2).permute(1, 3, 0, 2, 4).reshape(1, height * width, 64)

    def velocity(self, prompt: Any, lora: Mapping[str, Any]) -> Tensor:
        """(1, tokens, 64): velocity of the model for this caption, with this LoRA."""
        text, pooled = prompt.text.double(), prompt.conditioning["pooled_output"].double()
        level, guidance = (torch.tensor([value], dtype=torch.float64) for value in (self.sigma, self.guidance))
        return flux_forward(self.weights, self.noisy, self.ids, text, pooled, level, guidance, num_heads=1, lora=lora)
