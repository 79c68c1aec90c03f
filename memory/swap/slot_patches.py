"""Apply weight patches to the weights in a slot, with ComfyUI's own arithmetic and rounding."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ...common.core import weight_conversion
from ..host.flat_weights import WeightRef, parts_of

Patches = Mapping[str, list[Any]]


@dataclass(frozen=True)
class SlotPatches:
    """Patches of a patcher on the weights of swapped blocks. Keys are names in the state dict of the MODEL.

    patches: LoRAs and the like.
    identity: changes with them.
    wrappers: functions applied at each use of a weight.
    replaced: keys currently replaced by object patches.
    force_cast: each use casts to the compute dtype.
    """

    patches: Patches
    identity: Any
    wrappers: Mapping[str, list[Any]]
    replaced: Collection[str]
    force_cast: bool


NO_PATCHES = SlotPatches({}, None, {}, (), False)


def patch_weight(ref: WeightRef, weight: Tensor, patches: list[Any], device: torch.device) -> None:
    """Patch a weight in its slot as `ModelPatcher.patch_weight_to_device` does; its shape and dtype stay."""
    _apply(ref, weight, patches, device, comfy.model_management.lora_compute_dtype(device), None)


def patch_weight_by_hook(
    ref: WeightRef, weight: Tensor, unpatched: Any, patches: list[Any], device: torch.device
) -> None:
    """Patch a weight in its slot as `ModelPatcher.patch_hook_weight_to_device` does. unpatched: the flat weight."""
    original = {ref.key: [(unpatched, weight_conversion(ref.owner, ref.attribute)[0] or _as_it_is)]}
    _apply(ref, weight, patches, device, torch.float32, original)


def _as_it_is(weight: Tensor, **_: Any) -> Tensor:
    return weight


def _apply(ref: WeightRef, weight: Tensor, patches: list[Any], device: torch.device, dtype: Any, original: Any) -> None:
    """Patch a weight in-place. original: the unpatched weights, in the form that weight-replacing patches need."""
    seed = comfy.utils.string_to_seed(ref.key)
    patched = comfy.model_management.cast_to_device(weight, device, dtype, copy=True)
    convert, store = weight_conversion(ref.owner, ref.attribute)
    if convert is not None:
        patched = convert(patched, inplace=True)
    patched = comfy.lora.calculate_weight(patches, patched, ref.key, original_weights=original)
    if store is not None:
        stored = store(patched, inplace_update=False, seed=seed, return_weight=True)
    else:
        stored = comfy.float.stochastic_rounding(patched, weight.dtype, seed=seed)
    for target, value in zip(parts_of(weight), parts_of(stored), strict=True):
        assert target.shape == value.shape, ref.key
        target.copy_(value)
