"""Sample of the checks: a whole grid of the data at half the noise, the same in every check."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.rng import generator
from ...data.samples import Sample
from ...models.family import Family, ModelInputs, NoisySample
from ..objective.batch import model_space
from ..objective.noise import sample_noise

LEVEL = 0.5
SMALL = 8  # most tokens a side of an fp32 forward
SMALL_FRAMES = 2


def check_sample(family: Family, patcher: ModelPatcher, sample: Sample) -> tuple[NoisySample, float]:
    """Add noise at `LEVEL` to a sample, as a whole grid. Returns it and the model's sigma."""
    tensors = sample.load()
    latent = model_space(patcher, family, tensors)
    objective = family.sampling.objective(patcher)
    sigma = objective.noise_level(LEVEL)
    noise = sample_noise(latent.shape, generator(0, "check"))
    noisy = objective.add_noise(latent, noise, sigma)
    clean = sample.clean_frames
    if clean:
        noisy[:, :clean] = latent[:, :clean]
    length = family.conditioning.text_length(patcher.model, tensors.text.shape[1])
    tokens = math.prod(sample.grid)
    return NoisySample(noisy, tensors.text, tensors.conditioning, tokens, length, clean), sigma


def cut_to(sample: NoisySample, grid: tuple[int, int, int], side: int, frames: int) -> NoisySample:
    """Crop a sample of this grid, (frames, height, width) in tokens, to its first frames and its upper left corner.

    ComfyUI scales pictures in the conditioning to the sample, but does not cut clips: with a clip, all frames stay.
    """
    depth, height, width = grid
    tensors = [value for value in sample.conditioning.values() if isinstance(value, Tensor)]
    if any(tensor.ndim == 5 and tensor.shape[2] > 1 for tensor in tensors):
        frames = depth
    cell_rows, cell_columns = (s // n for s, n in zip(sample.latent.shape[-2:], (height, width), strict=True))
    depth = min(depth, frames)
    height = min(height, side)
    width = min(width, side)
    latent = sample.latent[..., : height * cell_rows, : width * cell_columns]
    if latent.ndim == 4:
        latent = latent[:, :depth]
    return replace(sample, latent=latent.clone(), tokens=depth * height * width)


def smallest(samples: Sequence[Sample]) -> Sample:
    """Return the sample with the fewest tokens, then the shortest text; the first of several."""
    return min(samples, key=lambda sample: (math.prod(sample.grid), sample.text_length))


def inputs_of(family: Family, patcher: ModelPatcher, sample: NoisySample, sigma: float, guidance: float) -> ModelInputs:
    """Make the model inputs of one sample: on the host, like a training batch, and then copied."""
    return family.forward.inputs(patcher, [sample], sigmas(sigma), guidance).to(patcher.load_device)


def sigmas(sigma: float) -> Tensor:
    """Make the model's sigma of one sample, (1,) fp32, on the host."""
    return torch.tensor([sigma], dtype=torch.float32)
