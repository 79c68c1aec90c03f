"""Previews on another MODEL than the trained one, such as a model distilled from the trained base."""

from collections.abc import Sequence
from dataclasses import replace

from comfy.model_patcher import ModelPatcher

from ...lora.options import NetworkOptions
from ...lora.plan import choose_targets
from ...models.catalogue.registry import family_of
from ...models.convolutions import WeightShape, weight_shapes
from ..preview.sampling import with_lora
from .previewer import Preview


def on_other_models(previews: Sequence[Preview], model: ModelPatcher, network: NetworkOptions) -> list[Preview]:
    """Check the MODELs of previews against the trained one, and apply `base_lora` to them, as to that.

    The training adapter is not applied: it is in no preview.

    Raises ValueError if such a MODEL does not have a trained layer in the same shape.
    """
    if all(preview.model is None for preview in previews):
        return list(previews)
    targets = choose_targets(family_of(model), model.model, network)
    results, with_base = [], dict[int, ModelPatcher]()  # by identity: prompts on one MODEL share its clone
    for number, preview in enumerate(previews, 1):
        if (other := preview.model) is not None:
            if id(other) not in with_base:
                _check_layers(other, model, targets, number)
                with_base[id(other)] = _with_base(other, network, number)
            preview = replace(preview, model=with_base[id(other)])
        results.append(preview)
    return results


def check_one_model(previews: Sequence[Preview]) -> None:
    """Raise ValueError for previews of two experts with a MODEL of their own: one cannot replace both."""
    for number, preview in enumerate(previews, 1):
        if preview.model is not None:
            raise ValueError(
                f"preview: prompt {number} has a model of its own, and two experts are trained, which sample together; "
                "disconnect model of that Training Preview, or train the experts one by one without model_low_noise."
            )


def _check_layers(other: ModelPatcher, model: ModelPatcher, targets: Sequence[str], number: int) -> None:
    trained_shapes, other_shapes = weight_shapes(model.model), weight_shapes(other.model)
    for name in targets:
        if other_shapes.get(name) != trained_shapes[name]:
            other_text = f"one of {_text(other_shapes[name])}" if name in other_shapes else "no such layer"
            raise ValueError(
                f"preview: model of prompt {number} does not take this LoRA: it trains {name} of "
                f"{_text(trained_shapes[name])}, and that MODEL has {other_text}; connect one of the architecture "
                "that is trained."
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
