"""The facts about a model: the named ones, and what a rule says about all others."""

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ...blocks import linear_shapes
from .images import IMAGES
from .model_facts import ModelFacts
from .newer import NEWER
from .stable_diffusion import STABLE_DIFFUSION
from .targets import default_targets
from .videos import VIDEOS

NAMED = (*IMAGES, *STABLE_DIFFUSION, *VIDEOS, *NEWER)


def named_titles() -> tuple[str, ...]:
    """Names of the models that have a row, for pages."""
    return tuple(facts.title for facts in NAMED)


def facts_of(model: Any) -> ModelFacts:
    """The facts about a model, with those of its default targets that it has.

    model: a ComfyUI BaseModel.
    """
    named = named_facts(model)
    if named is None:
        title = type(model).__name__
        return ModelFacts(
            name=title.lower(), title=title, model_classes=(title,), default_targets=default_targets(model)
        )
    names = list(linear_shapes(model))
    there = tuple(pattern for pattern in named.default_targets if any(fnmatchcase(name, pattern) for name in names))
    return replace(named, default_targets=there or default_targets(model))


def named_facts(model: Any) -> ModelFacts | None:
    """The row of a model; None where no row names it. Classes of packs that have a name of core's are not core's."""
    kind, config = type(model), type(getattr(model, "model_config", None))
    if kind.__module__ != "comfy.model_base":
        return None
    for facts in NAMED:
        if kind.__name__ in facts.model_classes and (not facts.configs or config.__name__ in facts.configs):
            return facts
    return None
