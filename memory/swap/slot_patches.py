"""Weights of blocks in their slots, with weight patches applied by ComfyUI's own arithmetic and rounding."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
import torch
from torch import Tensor

from ...common.core import weight_conversion
from ..host.flat_buffer import Layout
from ..host.flat_weights import BlockWeights, WeightRef, parts_of, same_memory, with_parts
from .slot_ring import Slots

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


class SlotTensors:
    """The tensors of the blocks over their slots, while the model is loaded.

    originals: the modules' own tensors, of each block.
    over_slots: the same tensors over the memory of the slots.
    patching: weight patches on top of the flat weights.
    hooks: weight patches of hooks on top of those.
    running: the blocks that run from their slots now.
    """

    def __init__(self, weights: BlockWeights):
        self.weights = weights
        self.originals: list[list[Tensor | None]] = []
        self.over_slots: list[list[Tensor]] = []
        self.patching = NO_PATCHES
        self.hooks: Patches = {}
        self.running: set[int] = set()
        self.device = torch.device("cpu")

    def make(self, slots: Slots) -> None:
        """Make the tensors over these slots."""
        self.device = slots.device
        self.originals = [[ref.tensor() for ref in refs] for refs in self.weights.refs]
        self.over_slots = [
            _over_slot(refs, layout, slots.tensor(j))
            for j, (refs, layout) in enumerate(zip(self.weights.refs, self.weights.layouts, strict=True))
        ]

    def drop(self) -> None:
        """Drop the tensors, which hold the slots, and the patches."""
        self.originals, self.over_slots = [], []
        self.patching, self.hooks = NO_PATCHES, {}

    def set_patches(self, patching: SlotPatches) -> None:
        self.patching = patching

    def set_hooks(self, hooks: Patches) -> None:
        self.hooks = hooks

    def patch(self, j: int) -> None:
        """Patch the weights of block j, which have just been copied to its slot."""
        for ref, original, weight in zip(self.weights.refs[j], self.originals[j], self.over_slots[j], strict=True):
            if (patches := self.patching.patches.get(ref.key)) is not None:
                patch_weight(ref, weight, patches, self.device)
            if (patches := self.hooks.get(ref.key)) is not None:
                patch_weight_by_hook(ref, weight, original, patches, self.device)

    def replaceable(self, j: int) -> list[Tensor | None]:
        """List the present tensors of the block's modules; None for one that an object patch has installed.

        Raises RuntimeError if a weight is neither the flat weight nor an object patch's replacement: it would run
        without its LoRA and on the host.
        """
        return [
            self._replaceable(ref, original)
            for ref, original in zip(self.weights.refs[j], self.originals[j], strict=True)
        ]

    def _replaceable(self, ref: WeightRef, original: Tensor | None) -> Tensor | None:
        """It may be another object over the same memory: compiling a block replaces inference tensors."""
        tensor = ref.tensor()
        if tensor is original or (tensor is not None and original is not None and same_memory(tensor, original)):
            return tensor
        if ref.key in self.patching.replaced:
            return None
        raise RuntimeError(
            f"Another node replaced {ref.key} while its block streams from RAM; put Block Swap behind that node, or "
            "leave it out."
        )

    @contextmanager
    def installed(self, j: int, originals: list[Tensor | None]) -> Iterator[None]:
        """Put the tensors over the slot into the modules of block j, in place of `originals` (from `replaceable`)."""
        refs = self.weights.refs[j]
        self.running.add(j)
        try:
            for ref, tensor, over_slot in zip(refs, originals, self.over_slots[j], strict=True):
                if tensor is not None:
                    ref.table[ref.attribute] = over_slot
            yield
        finally:
            for ref, tensor in zip(refs, originals, strict=True):
                if tensor is not None:
                    ref.table[ref.attribute] = tensor
            self.running.discard(j)


def _over_slot(refs: list[WeightRef], layout: Layout, slot: Tensor) -> list[Tensor]:
    """Make the tensors of a block over the memory of its slot."""
    fields = iter(layout.fields)
    tensors = []
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        tensors.append(with_parts(tensor, [next(fields).tensor_in(slot) for _ in parts_of(tensor)]))
    return tensors
