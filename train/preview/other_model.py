"""Previews on another MODEL than the trained one: train on the base, look at what was distilled from it."""

from collections.abc import Sequence
from dataclasses import replace

from comfy.model_patcher import ModelPatcher

from ...lora.options import NetworkOptions
from ...lora.plan import choose_targets
from ...models.convolutions import WeightShape, weight_shapes
from ...models.registry import family_of
from .previewer import Preview
from .sampling import with_lora


def on_other_models(previews: Sequence[Preview], model: ModelPatcher, network: NetworkOptions) -> list[Preview]:
    """Check the MODELs of previews against the trained one, and put `base_lora` on them, as it is on that.

    The training adapter is not put on: it is in no preview.

    Raises ValueError where a layer that is trained is not in such a MODEL, in the same shape.
    """
    if all(preview.model is None for preview in previews):
        return list(previews)
    targets = choose_targets(family_of(model), model.model, network)
    made, with_base = [], dict[int, ModelPatcher]()  # by identity: prompts on one MODEL share what it is loaded as
    for number, preview in enumerate(previews, 1):
        if (other := preview.model) is not None:
            if id(other) not in with_base:
                _check_layers(other, model, targets, number)
                with_base[id(other)] = _with_base(other, network, number)
            preview = replace(preview, model=with_base[id(other)])
        made.append(preview)
    return made


def check_one_model(previews: Sequence[Preview]) -> None:
    """Raise ValueError for previews of two experts with a MODEL of their own: one cannot stand for both."""
    for number, preview in enumerate(previews, 1):
        if preview.model is not None:
            raise ValueError(
                f"preview: prompt {number} has a model of its own, and two experts are trained, which sample together; "
                "disconnect model of that Training Preview, or train the experts one by one without model_low_noise."
            )


def _check_layers(other: ModelPatcher, model: ModelPatcher, targets: Sequence[str], number: int) -> None:
    wanted, there = weight_shapes(model.model), weight_shapes(other.model)
    for name in targets:
        if there.get(name) != wanted[name]:
            held = f"one of {_text(there[name])}" if name in there else "no such layer"
            raise ValueError(
                f"preview: model of prompt {number} does not take this LoRA: it trains {name} of "
                f"{_text(wanted[name])}, and that MODEL has {held}; connect one of the architecture that is trained."
            )


def _text(shape: WeightShape) -> str:
    return " x ".join(map(str, shape))


def _with_base(other: ModelPatcher, network: NetworkOptions, number: int) -> ModelPatcher:
    base = network.base_lora
    if base is None:
        return other
    clone, changed = with_lora(other, base.tensors(), network.base_strength)
    if not changed:
        raise ValueError(
            f"{base.input('base_lora')}: {base.name} changes nothing in the model of prompt {number} of preview; "
            "connect a MODEL that it fits."
        )
    return clone
