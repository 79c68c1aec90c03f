"""Conditioning of any length for the tiny models, and a picture sampled as core's KSampler node samples it."""

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..data.encoders import CLIP_WIDTH, T5_WIDTH
from .qwen_image import QWEN_TEXT_WIDTH
from .sdxl import SDXL_TEXT_WIDTH

Conditioning = list[list[Any]]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a tiny model. `cell` is the picture's pixels per latent cell; `frames_per_latent` 0 is a picture."""

    text_width: int
    pooled_width: int = 0
    channels: int = 16
    cell: int = 8
    frames_per_latent: int = 0


INPUTS = {
    "flux": Inputs(T5_WIDTH, CLIP_WIDTH),
    "schnell": Inputs(T5_WIDTH, CLIP_WIDTH),
    "flux2": Inputs(T5_WIDTH, channels=128, cell=16),
    "chroma": Inputs(T5_WIDTH),
    "wan": Inputs(T5_WIDTH, frames_per_latent=4),
    "wan_vace": Inputs(T5_WIDTH, frames_per_latent=4),
    "qwen_image": Inputs(QWEN_TEXT_WIDTH),
    "sdxl": Inputs(SDXL_TEXT_WIDTH, CLIP_WIDTH, channels=4),
}


def _random(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(crc32(f"{seed}:{name}".encode()))
    return torch.randn(shape, generator=generator)


def conditioning(name: str, length: int, seed: int = 0) -> Conditioning:
    """Core's CONDITIONING for the tiny model `name` (a key of INPUTS): one random text of `length` tokens."""
    inputs = INPUTS[name]
    extra = {"pooled_output": _random((1, inputs.pooled_width), seed, "pooled")} if inputs.pooled_width else {}
    return [[_random((1, length, inputs.text_width), seed, "text"), extra]]


def empty_latent(name: str, width: int, height: int, batch: int = 1, frames: int = 1) -> Tensor:
    """Latent of core's empty latent node of this family; `width` and `height` in pixels, `frames` of a video."""
    inputs = INPUTS[name]
    if frames != 1 and not inputs.frames_per_latent:
        raise ValueError(f"frames is {frames}; {name} makes pictures, so take 1.")
    times = ((frames - 1) // inputs.frames_per_latent + 1,) if inputs.frames_per_latent else ()
    return torch.zeros(batch, inputs.channels, *times, height // inputs.cell, width // inputs.cell)


def sample(
    model: Any,
    name: str,
    *,
    width: int = 64,
    height: int = 64,
    length: int = 16,
    batch: int = 1,
    steps: int = 2,
    cfg: float = 1.0,
    seed: int = 0,
    frames: int = 1,
    negative_length: int | None = None,
) -> Tensor:
    """The latent that core's KSampler gives for a random prompt of `length` tokens, under inference mode as there.

    With `cfg` other than one, a negative prompt of the same length goes into the model in one call with the positive
    one, and one of another `negative_length` in a call of its own (except for SDXL, whose texts are repeated to fit).
    """
    import comfy.sample

    with torch.inference_mode():
        latent = comfy.sample.fix_empty_latent_channels(model, empty_latent(name, width, height, batch, frames))
        positive = conditioning(name, length, seed)
        negative = conditioning(name, length if negative_length is None else negative_length, seed + 1)
    return sample_prompts(model, positive, negative, latent, steps=steps, cfg=cfg, seed=seed)


def sample_prompts(
    model: Any,
    positive: Conditioning,
    negative: Conditioning,
    latent: Tensor,
    *,
    steps: int = 2,
    cfg: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """The same for these prompts and this empty latent."""
    import comfy.sample

    with torch.inference_mode():
        noise = comfy.sample.prepare_noise(latent, seed)
        return comfy.sample.sample(
            model, noise, steps, cfg, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=seed
        )


def unload_outside_inference_mode(model: Any) -> list[Tensor]:
    """As ComfyUI's Unload Models does between two prompts; the quantised weights, which are ordinary copies then."""
    import comfy.model_management
    from comfy.quant_ops import QuantizedTensor

    with torch.inference_mode():
        comfy.model_management.load_models_gpu([model])
    comfy.model_management.unload_all_models()
    weights = [weight for weight in model.model.parameters() if isinstance(weight, QuantizedTensor)]
    assert weights and not any(weight.is_inference() for weight in weights)
    return weights
