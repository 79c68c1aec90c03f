"""Samples for FLUX.1 Kontext and FLUX.2, made by hand: random latents, texts and reference pictures."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from .encoders import CLIP_WIDTH, T5_WIDTH

# (latent channels, latent cells along a side of a token, the least that captions are padded to)
SHAPES = {"flux": (16, 2, 0), "flux2": (128, 1, 512)}


def flux_sample(
    name: str,
    height: int,
    width: int,
    text: int = 7,
    references: Sequence[tuple[int, int]] = (),
    *,
    family: str = "flux2",
    method: str | None = None,
    tokens: int | None = None,
    repeats: int = 1,
    scale: float = 1.0,
) -> Any:
    """A sample whose numbers are a function of its name. height, width: in tokens; text: tokens of the caption;
    references: (height, width) of each, in latent cells; tokens: how many are kept."""
    from tessera.data.samples import Sample, SampleTensors

    channels, patch, least = SHAPES[family]
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    latent = scale * torch.randn(channels, patch * height, patch * width, generator=generator)
    encoded = torch.randn(1, text, T5_WIDTH, generator=generator)
    conditioning: dict[str, Any] = {"pooled_output": None}
    if family == "flux":
        conditioning = {"pooled_output": torch.randn(1, CLIP_WIDTH, generator=generator)}
    if references:
        conditioning["reference_latents"] = [torch.randn(1, channels, h, w, generator=generator) for h, w in references]
    if method is not None:
        conditioning["reference_latents_method"] = method
    tensors = SampleTensors(latent, encoded, conditioning)
    return Sample(
        name,
        (1, height, width),
        tokens or height * width,
        max(least, text),
        lambda *_: tensors,
        repeats,
        references=tuple(-(-h // patch) * -(-w // patch) for h, w in references),
        conditioning=frozenset(conditioning),
    )
