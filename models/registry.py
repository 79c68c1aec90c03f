"""The families that can be trained."""

from comfy.model_patcher import ModelPatcher

from .family import Family
from .flux.flux1 import Flux
from .flux.flux2 import Flux2
from .qwen_image.family import QwenImage
from .wan.family import Wan

FAMILIES: list[Family] = [Flux(), Flux2(), QwenImage(), Wan()]


def family_of(patcher: ModelPatcher) -> Family:
    """The family of a MODEL. Raises ValueError, naming what it is, where it cannot be trained."""
    for family in FAMILIES:
        if family.matches(patcher.model):
            return family
    known = ", ".join(family.title for family in FAMILIES)
    raise ValueError(
        f"model is a {type(patcher.model).__name__}, which Train LoRA cannot train; connect one of these or a "
        f"fine-tune of one: {known}."
    )
