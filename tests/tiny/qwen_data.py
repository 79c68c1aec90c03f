"""Samples of Qwen-Image as data nodes give them: random latents, captions of any length, reference pictures."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch

from .qwen_image import QWEN_TEXT_WIDTH


def qwen_sample(
    name: str,
    height: int,
    width: int,
    text_length: int = 16,
    references: Sequence[tuple[int, int]] = (),
    method: str | None = None,
    tokens: int | None = None,
    text_width: int = QWEN_TEXT_WIDTH,
) -> Any:
    """A sample of height x width tokens whose numbers are a function of its name. references: (height, width) of each
    in latent cells. The caption is padded as the family does."""
    from tessera.data.samples import Sample, SampleTensors
    from tessera.models.text import padded_length

    generator = torch.Generator().manual_seed(crc32(name.encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    conditioning: dict[str, Any] = {}
    tensors = SampleTensors(normal(16, 1, 2 * height, 2 * width), normal(1, text_length, text_width), conditioning)
    if references:
        conditioning["reference_latents"] = [normal(1, 16, 1, *side) for side in references]
    if method is not None:
        conditioning["reference_latents_method"] = method
    return Sample(
        name,
        (1, height, width),
        tokens or height * width,
        padded_length(text_length),
        lambda *_: tensors,
        references=tuple(-(-h // 2) * -(-w // 2) for h, w in references),
        conditioning=frozenset(conditioning),
    )
