"""Samples for Wan, made by hand: random latents, texts, start pictures and CLIP vision states."""

from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from .encoders import T5_WIDTH
from .wan import VISION_WIDTH, WAN_CHANNELS

VISION_TOKENS = 257


def wan_sample(
    name: str,
    grid: tuple[int, int, int],
    variant: str = "2.1-t2v",
    *,
    keep: int | None = None,
    text: int = 7,
    text_length: int = 10,
    clean_frames: int = 0,
    repeats: int = 1,
    scale: float = 1.0,
    pictures: int = 1,
) -> Any:
    """A sample whose numbers are a function of its name. grid: (frames, height, width) in tokens; keep: tokens kept of
    each frame; text: tokens of the caption, text_length: what it is padded to; pictures: how many CLIP vision saw."""
    from tessera.data.samples import Sample, SampleTensors

    frames, height, width = grid
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    channels, channels_in = WAN_CHANNELS[variant]
    size = (frames, 2 * height, 2 * width)
    latent = scale * torch.randn(channels, *size, generator=generator)
    encoded = torch.randn(1, text, T5_WIDTH, generator=generator)
    conditioning: dict[str, Any] = {"pooled_output": None}
    if channels_in > channels:
        # The mask of core's WanImageToVideo: one over the frames that are not given.
        mask = torch.ones(1, 1, *size)
        mask[:, :, :1] = 0
        picture = torch.randn(1, channels, *size, generator=generator)
        conditioning |= {"concat_latent_image": picture, "concat_mask": mask}
    if variant == "2.1-i2v":
        states = torch.randn(1, pictures * VISION_TOKENS, VISION_WIDTH, generator=generator)
        conditioning["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=states)
    tensors = SampleTensors(latent, encoded, conditioning)
    return Sample(
        name,
        grid,
        frames * (keep or height * width),
        text_length,
        lambda *_: tensors,
        repeats,
        clean_frames=clean_frames,
        conditioning=frozenset(conditioning),
    )
