"""A frozen LoRA beneath the one that is trained: it is a part of the weights, as one that stands on the MODEL is."""

from comfy.model_patcher import ModelPatcher

from ..models.family import Family, linear_shapes
from ..models.registry import family_of
from .lora_reader import DoesNotFit, check_shape, read_patches
from .options import NetworkOptions


def put_under(patcher: ModelPatcher, options: NetworkOptions, family: Family) -> list[str]:
    """Patches the weights of `patcher`, a clone made for training, with `base_lora`; what a user should know of it
    comes back, a sentence each. Raises ValueError where it is a LoRA of another model."""
    if options.base_lora is None:
        if options.base_strength != 1:
            return ["base_strength has no effect without base_lora."]
        return []
    name = options.base_lora.name
    patches, unknown = read_patches(options.base_lora.tensors(), family, patcher.model)
    if not patches:
        raise ValueError(
            f"base_lora: {name} has no update for {family.title}; choose a LoRA that was trained on this model."
        )
    shapes = linear_shapes(patcher.model)
    for target, patch in patches.items():
        try:
            check_shape(target, patch, shapes)
        except DoesNotFit as error:
            raise ValueError(
                f"base_lora: {name} does not fit this model ({error}); choose a LoRA of this model."
            ) from error
    patcher.add_patches(patches, options.base_strength)
    notes = [f"Trained on top of {name} at strength {options.base_strength:g}; the saved LoRA holds what is new."]
    if options.algorithm in ("dora", "oft"):
        notes.append(f"{options.algorithm} multiplies the weight: load {name} before the new LoRA when you use both.")
    if unknown:
        notes.append(f"base_lora has {len(unknown)} keys of no layer of this model, such as {unknown[0]}.")
    return notes


def with_base(model: ModelPatcher, options: NetworkOptions) -> ModelPatcher:
    """The MODEL that is trained on, as previews sample it: a clone with `base_lora` on it, or itself without one."""
    if options.base_lora is None:
        return model
    clone = model.clone()
    put_under(clone, options, family_of(clone))
    return clone
