"""Training data of sliders and erasures whose prompts are random numbers, a function of their texts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from .runs import sample, training_data

PAIR = {"positive": "an old person", "negative": "a young person", "neutral": "a person"}
ERASED = {"erase": "a red car", "target": "a car", "keep": "a bus\na tree"}


def slider_of(**changes: Any) -> Any:
    from tessera.data.concepts.prompts import slider

    return slider(**{**PAIR, "attributes": "", "keep": "", "guidance_scale": 2.0, **changes})


def erasure_of(**changes: Any) -> Any:
    from tessera.data.concepts.prompts import erasure

    return erasure(**{**ERASED, "guidance_scale": 1.0, **changes})


def pictures() -> Any:
    """Three samples of one token count in three shapes."""
    return training_data(sample("a", 4, 4), sample("b", 2, 8), sample("c", 8, 2))


def encoded(texts: Sequence[str], lengths: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Encode prompts of 16 tokens, or as many as `lengths` says."""
    from tessera.data.encode.prompts import EncodedPrompt
    from tessera.data.samples import Prompt

    prompts = {}
    for text in texts:
        read = sample(f"prompt {text}", 1, 1, (lengths or {}).get(text, 16)).load()
        prompts[text] = EncodedPrompt(f"key of {text}", Prompt(read.text, read.conditioning))
    return prompts


def concept_data(concept: Any, data: Any = None, lengths: Mapping[str, int] | None = None, policy: Any = None) -> Any:
    """Data with the prompts of a concept, by default for FLUX.1."""
    from tessera.data.concepts.prompt_data import with_prompts
    from tessera.models.flux.text import Flux1Text

    return with_prompts(data or pictures(), concept, encoded(concept.texts, lengths), policy or Flux1Text())


def slider_data() -> Any:
    """A slider of two pairs with a kept prompt."""
    return concept_data(slider_of(attributes="male\nfemale", keep="a dog"))


def erasure_data() -> Any:
    return concept_data(erasure_of())


def picture_data(count: int = 3) -> Any:
    """A slider from pairs of pictures that differ by one pattern, with one caption for all."""
    from tessera.data.concepts.picture_pairs import pair_pictures

    ends = [training_data(*(_picture(number, size) for number in range(count))) for size in (2.0, 0.0)]
    return pair_pictures(*ends)


def _picture(number: int, size: float) -> Any:
    """A picture of 16 tokens in one of three shapes, with the pattern of this size added to each of its cells."""
    plain = sample(f"picture {number}", *((4, 4), (2, 8), (8, 2))[number % 3])
    pattern = torch.randn(16, 1, 1, generator=torch.Generator().manual_seed(5))
    read, caption = plain.load(), sample("caption", 1, 1).load()
    tensors = replace(read, latent=read.latent + size * pattern, text=caption.text, conditioning=caption.conditioning)
    return replace(plain, load=lambda *_: tensors)
