"""Frozen LoRAs under the trained one, applied as weight patches like a LoRA loaded on the MODEL.

The base LoRA counts as part of the model. The training adapter is active only during training: on a distilled model it
removes the distillation, so that the trained LoRA does not learn to.
"""

from comfy.model_patcher import ModelPatcher

from ..common.text import shortlist
from ..models.adapters.registry import algorithms_with
from ..models.catalogue.registry import family_of
from ..models.family import Family
from .files.comfyui_loader import read_otherwise
from .files.coverage import check_finite, no_layer_met, reading_notes
from .files.fit import fitting_patches
from .files.patches import DoesNotFit, Patch
from .files.reader import read_patches
from .options import NetworkOptions
from .source import LoraSource


def apply_base_lora(patcher: ModelPatcher, options: NetworkOptions, family: Family) -> list[str]:
    """Patch the weights of `patcher`, a clone made for training, with `base_lora`. Returns notes for the user, one
    sentence each. Raises ValueError if it is a LoRA of another model."""
    if options.base_lora is None:
        return []
    name = options.base_lora.name
    notes = [f"Trained on top of {name} at strength {options.base_strength:g}; the saved LoRA has only what is new."]
    if options.kind.multiplies_weight:
        notes.append(f"{options.algorithm} multiplies the weight: load {name} before the new LoRA when you use both.")
    return notes + _apply(patcher, options.base_lora, "base_lora", options.base_strength, family)


def apply_training_adapter(patcher: ModelPatcher, options: NetworkOptions, family: Family) -> list[str]:
    """Patch the weights of `patcher`, a clone made for training, with `training_adapter`. Returns notes for the user,
    one sentence each. Raises ValueError if it is a LoRA of another model."""
    if options.training_adapter is None:
        return []
    name, strength = options.training_adapter.name, options.training_adapter_strength
    notes = [f"Trained with {name} at strength {strength:g} on the model; previews and the saved LoRA don't have it."]
    if options.training_adapter == options.base_lora:
        notes.append(f"{name} is also base_lora, so training would use it twice; set one of the two to none.")
    if options.kind.multiplies_weight:
        notes.append(
            f"{options.algorithm} multiplies the weight, and {name} is part of it only while it trains; algorithm "
            f"{algorithms_with('fits_any')[0]} carries over better."
        )
    return notes + _apply(patcher, options.training_adapter, "training_adapter", strength, family)


def _apply(patcher: ModelPatcher, source: LoraSource, default: str, strength: float, family: Family) -> list[str]:
    """Patch the weights with a LoRA; returns a note for each part of it that the model does not have.

    default: name of the input in messages, if the source does not name it.
    """
    name, input_name = source.name, source.input(default)
    lora = source.tensors()
    check_finite(lora, f"{input_name}: {name}")
    try:
        read = read_patches(lora, family.names, patcher.model)
        fitting, missing = fitting_patches(read, patcher.model)
    except DoesNotFit as error:
        raise ValueError(
            f"{input_name}: {name} does not fit this model ({error}); choose a LoRA of this model."
        ) from error
    if not any(fitting):
        raise ValueError(no_layer_met(f"{input_name}: {name}", read.other_layers, missing, family, patcher.model))
    for group in fitting:
        patcher.add_patches(group, strength)
    notes = []
    if missing:
        notes.append(
            f"{input_name} also changes parts that this model doesn't have, such as {missing[0]}; they are ignored."
        )
    notes += reading_notes(input_name, read)
    if differing := read_otherwise(lora, read, patcher.model):
        count = len({Patch.from_entry(*entry)[0] for entry in read.entries()})
        notes.append(
            f"ComfyUI's LoRA loaders read {name} otherwise: {len(differing)} of {count} weights that {input_name} "
            f"changes here differ ({shortlist(differing)}). Convert it with Load LoRA File and Save LoRA, and use "
            "that file here and when you sample."
        )
    return notes


def with_base(model: ModelPatcher, options: NetworkOptions) -> ModelPatcher:
    """Return the MODEL that previews sample: a clone with `base_lora` on it, or itself without one; never with the
    training adapter."""
    if options.base_lora is None:
        return model
    clone = model.clone()
    apply_base_lora(clone, options, family_of(clone))
    return clone
