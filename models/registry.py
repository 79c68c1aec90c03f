"""The families that can be trained."""

from comfy.model_patcher import ModelPatcher

from .family import Family
from .flux import Flux

FAMILIES: list[Family] = [Flux()]


def family_of(patcher: ModelPatcher) -> Family:
    """The family of a MODEL. Raises ValueError, naming what it is, where it cannot be trained."""
    for family in FAMILIES:
        if family.matches(patcher.model):
            return family
    raise ValueError(
        f"model is a {type(patcher.model).__name__}, which Train LoRA cannot train; connect a FLUX.1 model (dev, "
        "schnell or a fine-tune of them)."
    )
