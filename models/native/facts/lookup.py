"""The facts about a model: named ones, and those derived by rule for all others."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

from ...blocks import linear_shapes
from ...family import UNET, UsualSettings
from .images import IMAGES
from .model_facts import ModelFacts
from .newer import NEWER
from .stable_diffusion import STABLE_DIFFUSION
from .targets import default_targets
from .videos import VIDEOS

NAMED = (*IMAGES, *STABLE_DIFFUSION, *VIDEOS, *NEWER)


def named_titles() -> tuple[str, ...]:
    """Return the names of the models that have a row, for pages."""
    return tuple(facts.title for facts in NAMED)


def facts_of(model: Any) -> ModelFacts:
    """Return the facts about a model, with those default targets that the model has.

    model: a ComfyUI BaseModel.
    """
    facts = named_facts(model)
    if facts is None:
        title = type(model).__name__
        return ModelFacts(
            name=title.lower(),
            title=title,
            model_classes=(title,),
            default_targets=default_targets(model),
            usual=UNET if isinstance(model.diffusion_model, UNetModel) else UsualSettings(),
        )
    names = list(linear_shapes(model))
    targets = tuple(pattern for pattern in facts.default_targets if any(fnmatchcase(name, pattern) for name in names))
    return replace(facts, default_targets=targets or default_targets(model))


def is_tested(model: Any) -> bool:
    """Return whether our tests run the model's own class: a row names it, and it is in the ComfyUI that they run."""
    facts = named_facts(model)
    return facts is not None and facts not in NEWER


def named_facts(model: Any) -> ModelFacts | None:
    """Return the row of a model, the closest of several; None if no row names it. A pack's class with the same name as
    core's is not core's."""
    if type(model).__module__ != "comfy.model_base":
        return None
    matching = [facts for facts in NAMED if _matches(facts, model)]
    return max(matching, key=lambda facts: len(facts.unet_config), default=None)


def _matches(facts: ModelFacts, model: Any) -> bool:
    config = getattr(model, "model_config", None)
    entries = getattr(config, "unet_config", None) or {}
    return (
        type(model).__name__ in facts.model_classes
        and (not facts.configs or type(config).__name__ in facts.configs)
        and all(entries.get(name) == value for name, value in facts.unet_config)
    )
