"""The patches of a LoRA that a model can take, checked before ComfyUI applies them."""

from typing import Any

import comfy.utils

from ...models.blocks import linear_shapes
from .key_map import layer_of
from .patches import DoesNotFit, Patch
from .reader import LoraPatches, Patches, name_of


def fitting_patches(read: LoraPatches, model: Any) -> tuple[list[Patches], list[str]]:
    """Return the patches of weights that the model has, by group, and the names of the others.

    Weights other than those of layers, such as the convolution that takes the picture of a Wan I2V model, may be of
    another shape in a sibling of the model; they count as missing. Raises DoesNotFit if ComfyUI would leave a layer
    unchanged and only log it.
    """
    linears = linear_shapes(model)
    groups: list[Patches] = []
    missing: list[str] = []
    for group in read.groups:
        fitting: Patches = {}
        for target, content in group.items():
            key, patch = Patch.from_entry(target, content)
            linear = linears.get(layer_of(key)) if key.endswith(".weight") else None
            shape = linear or _shape(model, key)
            if shape is None or not _fits(patch, layer_of(key), shape, is_layer=linear is not None):
                missing.append(name_of(key))
            else:
                fitting[target] = content
        groups.append(fitting)
    return groups, missing


def _fits(patch: Patch, layer: str, shape: tuple[int, ...], is_layer: bool) -> bool:
    """Return whether a patch fits a weight. Raises DoesNotFit if it does not fit a layer."""
    try:
        patch.check(layer, shape)
    except DoesNotFit:
        if is_layer:
            raise
        return False
    return True


def _shape(model: Any, key: str) -> tuple[int, ...] | None:
    """Return the shape of a weight of the model; None if it has none of that name."""
    try:
        weight = comfy.utils.get_attr(model, key)
    except AttributeError:
        return None
    return None if weight is None else tuple(weight.shape)
