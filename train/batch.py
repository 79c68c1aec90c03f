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
    """inputs: as the transformer takes them; target: the velocity (B, N, C·patch), fp32; weights: (B, N), how much each
    token counts in the loss, or None where all count alike."""

    inputs: ModelInputs
    target: Tensor
    weights: Tensor | None


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
        size = sample.tokens // sample.grid[0]  # of one picture: what shifts by resolution go by
        latent = _model_space(patcher, tensors, device)
        shift = family.shift(patcher.model, size)
        sigma = draw_sigma(objective, generator(seed, "sigma", *draw, place), size, shift)
        noise = draw_noise(latent.shape, generator(seed, "noise", *draw, place)).to(device)
        level = torch.tensor([sigma], dtype=torch.float32, device=device)
        x_t = noised(latent[None], noise[None], level)[0]
        if sample.clean_frames:
            x_t[:, : sample.clean_frames] = latent[:, : sample.clean_frames]
        noisy.append(
            NoisySample(x_t, tensors.text, tensors.conditioning, sample.tokens, sample.text_length, sample.clean_frames)
        )
        targets.append(family.cut(velocity_target(latent, noise), sample.tokens).tokens)
        sigmas.append(sigma)
    levels = torch.tensor(sigmas, dtype=torch.float32, device=device)
    inputs = family.inputs(patcher, noisy, levels, objective.guidance)
    return Batch(inputs, torch.stack(targets), _weights([sample for sample, _ in samples], device))


def _model_space(patcher: ModelPatcher, tensors: SampleTensors, device: torch.device) -> Tensor:
    """The clean latent as the model works on it, fp32: (C, H, W), or (C, T, H, W) for a model of clips."""
    latent = tensors.latent.to(device=device, dtype=torch.float32)
    if patcher.model.latent_format.latent_dimensions == 3 and latent.ndim == 3:
        latent = latent.unsqueeze(1)  # a picture is a clip of one frame
    return patcher.model.process_latent_in(latent[None])[0]


def _weights(samples: Sequence[Sample], device: torch.device) -> Tensor | None:
    """(B, N): 0 for the tokens of clean frames, which the model is given, 1 for all others."""
    if not any(sample.clean_frames for sample in samples):
        return None
    weights = torch.ones(len(samples), samples[0].tokens, device=device)
    for row, sample in zip(weights, samples, strict=True):
        row[: sample.clean_frames * sample.tokens // sample.grid[0]] = 0
    return weights
