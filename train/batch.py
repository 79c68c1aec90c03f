"""Makes one batch: draws noise and sigma for its samples and hands both sides of the loss over as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..models.family import Family, ModelInputs, NoisySample
from .data import Sample, SampleTensors
from .draws import generator
from .objective import draw_noise, draw_sigma, noised, velocity_target
from .options import ObjectiveOptions


@dataclass(frozen=True)
class Batch:
    """inputs: as the transformer takes them; target: the velocity (B, N, C·patch), fp32."""

    inputs: ModelInputs
    target: Tensor


def make_batch(
    patcher: ModelPatcher,
    family: Family,
    samples: Sequence[tuple[Sample, SampleTensors]],
    objective: ObjectiveOptions,
    device: torch.device,
    seed: int,
    draw: tuple[int, int],
) -> Batch:
    """`draw` is (step, micro-batch): with the seed and a sample's place in the batch it fixes every random number."""
    noisy: list[NoisySample] = []
    targets: list[Tensor] = []
    sigmas: list[float] = []
    for place, (sample, tensors) in enumerate(samples):
        latent = _model_space(patcher, tensors, device)
        sigma = draw_sigma(objective, generator(seed, "sigma", *draw, place), sample.tokens, family.default_shift)
        noise = draw_noise(latent.shape, generator(seed, "noise", *draw, place)).to(device)
        level = torch.tensor([sigma], dtype=torch.float32, device=device)
        x_t = noised(latent[None], noise[None], level)[0]
        noisy.append(NoisySample(x_t, tensors.text, tensors.conditioning, sample.tokens))
        targets.append(family.cut(velocity_target(latent, noise), sample.tokens).tokens)
        sigmas.append(sigma)
    levels = torch.tensor(sigmas, dtype=torch.float32, device=device)
    inputs = family.inputs(patcher, noisy, levels, objective.guidance)
    return Batch(inputs, torch.stack(targets))


def _model_space(patcher: ModelPatcher, tensors: SampleTensors, device: torch.device) -> Tensor:
    """The clean latent (C, H, W) as the model works on it, fp32."""
    assert tensors.latent.ndim == 3, tensors.latent.shape
    return patcher.model.process_latent_in(tensors.latent[None].to(device=device, dtype=torch.float32))[0]
