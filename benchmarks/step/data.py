"""Data of the step benchmark: random latents and texts of the shapes that the family's VAE and encoders give."""

from importlib import import_module
from typing import Any

import torch
from families import Picture


def random_data(patcher: Any, picture: Picture, count: int) -> Any:
    """`count` pictures or clips with their texts as our trainer takes them, fp32 on the host."""
    family = import_module("tessera.models.catalogue.registry").family_of(patcher)
    generator = torch.Generator().manual_seed(1)
    samples = [_sample(family, patcher.model, picture, f"sample {i}", generator) for i in range(count)]
    return import_module("tessera.data.samples").TrainingData(tuple(samples), "random")


def _sample(family: Any, model: Any, picture: Picture, name: str, generator: torch.Generator) -> Any:
    data = import_module("tessera.data.samples")
    policy = family.sampling.latents(model)
    clips = model.latent_format.latent_dimensions == 3
    frames = (picture.frames - 1) // policy.frames_per_latent + 1 if clips else 1
    height, width = (side // policy.pixels_per_latent for side in (picture.height, picture.width))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    latent = normal(policy.channels, *((frames,) if clips else ()), height, width)
    text = normal(1, picture.length, family.conditioning.text_width(model))
    pooled = family.conditioning.pooled_width(model)
    conditioning = {"pooled_output": normal(1, pooled)} if pooled else {}
    tensors = data.SampleTensors(latent, text, conditioning)
    grid = (frames, height // policy.patch, width // policy.patch)
    sample = data.Sample(
        name,
        grid,
        grid[0] * grid[1] * grid[2],
        family.conditioning.text_length(model, picture.length),
        lambda *_: tensors,
        conditioning=frozenset(conditioning),
    )
    family.check(model, sample.facts())
    return sample


def for_core(data: Any) -> tuple[list[dict[str, Any]], list[list[list[Any]]]]:
    """(latents, positive) of core's TrainLoraNode: the same samples."""
    tensors = [sample.load() for sample in data.samples]
    latents = [{"samples": t.latent[None]} for t in tensors]
    return latents, [[[t.text, {**t.conditioning, "guidance": 1.0}]] for t in tensors]
