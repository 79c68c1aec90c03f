"""Block swap in inference: while a swapped block runs, its modules hold the weights in its slot.

Between calls the MODEL's modules point at the flat weights on the host, so saving, unloading and cloning never see a
slot. The modules themselves are unchanged: everything other nodes have added to them (replaced forwards, bypass LoRAs,
hooks, weight wrappers) runs as on a block that is not swapped.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import comfy.lora
import comfy.model_management
import torch
from comfy.model_patcher import move_weight_functions, wipe_lowvram_weight
from torch import Tensor, nn

from ..host.flat_buffer import Layout, ScatteredBuffer
from ..host.flat_weights import (
    Put,
    WeightRef,
    into_flat,
    parts_of,
    plain_tensors,
    point_at,
    same_memory,
    scattered,
    shared_flat,
    weight_refs,
    with_parts,
)
from ..host.mapped_file import MappedWeights
from ..host.pinning import unpinned_message
from .forward import SwappedForward
from .slot_patches import NO_PATCHES, Patches, SlotPatches, patch_weight, patch_weight_by_hook
from .slot_ring import SlotRing

log = logging.getLogger(__name__)

# The blocks currently swapped in each model: two patchers of one model may swap different ones.
_attached: "WeakKeyDictionary[nn.Module, weakref.ref[SwappedBlocks]]" = WeakKeyDictionary()


class SwappedBlocks:
    """Swapped blocks of one model.

    base: ComfyUI's BaseModel.
    blocks: their modules by their names in the MODEL's state dict, such as diffusion_model.single_blocks.3, in the
        order of the forward.
    notes: sentences for the user, each once.
    from_file: weights in the mapped file stay there.
    automatic: the number of blocks was chosen automatically.
    """

    ring: SlotRing | None = None
    keep_in_place = False  # stream host weights in place, as a training run holds them

    def __init__(
        self,
        base: Any,
        blocks: Mapping[str, nn.Module],
        prefetch: int,
        pinned: bool,
        from_file: bool = False,
        automatic: bool = False,
    ):
        self.base: Callable[[], Any] = weakref.ref(base)
        self.blocks = dict(blocks)
        self.prefetch = prefetch
        self.pinned = pinned
        self.from_file = from_file
        self.automatic = automatic
        self.notes: list[str] = []
        self.modules = {id(module) for block in self.blocks.values() for module in block.modules()}
        self.refs = [weight_refs(name, block) for name, block in self.blocks.items()]
        self.keys = {ref.key for refs in self.refs for ref in refs}
        self.layouts = [Layout.from_tensors(plain_tensors(refs)) for refs in self.refs]
        # A quantised weight consists of several tensors.
        self.quantised = any(len(lay.fields) > len(p) for lay, p in zip(self.layouts, self.refs, strict=True))
        outside = [p for p in weight_refs("", base) if id(p.owner) not in self.modules] if from_file else []
        self.rest = MappedWeights(outside)
        self.running: set[int] = set()
        self._unpinnable = False
        self._patching = NO_PATCHES
        self._hooks: Patches = {}
        self._unpatched: list[list[Tensor | None]] = []  # the modules' own tensors, per block
        self._slots: list[list[Tensor]] = []  # the same tensors over the blocks' slots

    def __del__(self) -> None:
        self.release()

    def for_model(self, base: nn.Module) -> "SwappedBlocks":
        """Return the blocks of the same names in another model."""
        blocks = {name: base.get_submodule(name) for name in self.blocks}
        return SwappedBlocks(base, blocks, self.prefetch, self.pinned, self.from_file, self.automatic)

    def note(self, sentence: str) -> None:
        """Add a sentence for the user, once, and log it."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            log.info(sentence)

    def resident_bytes(self) -> int:
        """Return the bytes of the model without the swapped blocks."""
        size = comfy.model_management.module_size
        return size(self.base()) - sum(size(block) for block in self.blocks.values())

    def slots(self) -> int:
        return min(self.prefetch + 1, len(self.layouts))

    def slot_bytes(self) -> int:
        """Return the bytes that the slots take on the device while the model is loaded."""
        return self.slots() * max(layout.size for layout in self.layouts)

    def held_bytes(self) -> int:
        """Return the bytes that the slots take on the device now."""
        return self.ring.held_bytes() if self.ring is not None else 0

    @property
    def attached(self) -> bool:
        return self.held_bytes() > 0

    def attach(self, device: torch.device, patching: SlotPatches) -> None:
        """Allocate the slots and make the blocks run from them, with these patches on top of the flat weights.

        Raises ValueError for a patch that does not fit into a slot.
        """
        base = self.base()
        assert base is not None
        self._check(patching)
        previous = _attached.get(base)
        other = previous() if previous is not None else None
        if other is not None and other is not self:
            other.release()
        if self.attached and self.ring is not None and self.ring.device != device:
            self.release()
        if not self.attached:
            self._take(device, patching.replaced)
            _attached[base] = weakref.ref(self)
            base.model_loaded_weight_memory += self.held_bytes()
        if patching.identity != self._patching.identity:
            self.invalidate()
        self._patching = patching
        self._flag_modules(device)
        self.install_forwards()

    def _check(self, patching: SlotPatches) -> None:
        for name, refs, layout in zip(self.blocks, self.refs, self.layouts, strict=True):
            actual = [(key, tuple(part.shape), part.dtype) for key, part in plain_tensors(refs)]
            if actual != [(field.name, field.shape, field.dtype) for field in layout.fields]:
                raise ValueError(
                    f"Another node has put weights of other shapes or dtypes into {name} since Block Swap; put Block "
                    "Swap behind that node."
                )
            for ref in refs:
                weight = ref.tensor()
                if weight is None or ref.key not in patching.patches:
                    continue
                shape = comfy.lora.calculate_shape(patching.patches[ref.key], weight, ref.key)
                if tuple(shape) != tuple(weight.shape):
                    raise ValueError(
                        f"A LoRA changes the shape of {ref.key} from {tuple(weight.shape)} to {tuple(shape)}, and a "
                        f"block that streams has no room for that; leave {name} out of block swap, or the LoRA."
                    )

    def _take(self, device: torch.device, replaced: Collection[str]) -> None:
        pinned = self.pinned and not self._unpinnable
        flats: list[Tensor | ScatteredBuffer] = []
        for refs, layout in zip(self.refs, self.layouts, strict=True):
            if self.from_file:
                flats.append(scattered(refs, layout))
                continue
            flat = shared_flat(refs, layout, replaced)
            if self.keep_in_place:
                flats.append(scattered(refs, layout) if flat is None else flat)
                continue
            if flat is None or (pinned and not flat.is_pinned()):
                flat = into_flat(refs, layout, pinned, _point_at_but(replaced))
            flats.append(flat)
        plain = sum(not weights.is_pinned() for weights in flats) if pinned and not self.keep_in_place else 0
        if (note := unpinned_message(plain, len(flats))) is not None:
            self._unpinnable = True
            self.note(note)
        if self.ring is None or self.ring.device != device or not self.ring.accepts(flats):
            swap_ref = weakref.ref(self)

            def finish(j: int) -> None:
                swap = swap_ref()
                assert swap is not None
                swap._patch(j)

            self.ring = SlotRing(flats, device, self.prefetch, finish)
        self.ring.flat_weights = flats
        try:
            self.ring.take()
        except BaseException:  # only the modules may keep the flat weights alive
            self.ring.flat_weights = []
            raise
        self._unpatched = [[ref.tensor() for ref in refs] for refs in self.refs]
        self._slots = [
            _over_slot(refs, layout, self.ring.slot_of(j))
            for j, (refs, layout) in enumerate(zip(self.refs, self.layouts, strict=True))
        ]

    def _flag_modules(self, device: torch.device) -> None:
        """Set the flags that ComfyUI's load sets on modules that it moves to the device."""
        patching = self._patching
        for name, block in self.blocks.items():
            for inner, module in block.named_modules(prefix=name):
                if id(module) not in self.modules or not hasattr(module, "comfy_cast_weights"):
                    continue
                wipe_lowvram_weight(module)
                module.comfy_force_cast_weights = patching.force_cast  # type: ignore[assignment]
                if patching.force_cast:
                    module.prev_comfy_cast_weights = module.comfy_cast_weights
                    module.comfy_cast_weights = True  # type: ignore[assignment]
                for attribute in ("weight", "bias"):
                    if (functions := patching.wrappers.get(f"{inner}.{attribute}")) is not None:
                        setattr(module, f"{attribute}_function", list(functions))
                move_weight_functions(module, device)

    def install_forwards(self) -> None:
        """Make the blocks run from their slots, wrapping any forwards that other nodes have installed."""
        if not self.attached:
            return
        for j, block in enumerate(self.blocks.values()):
            forward = vars(block).get("forward")
            if isinstance(forward, SwappedForward) and forward.swap() is self:
                continue
            while isinstance(forward, SwappedForward):
                forward = forward.inner
            # ComfyUI leaves the class's forward on the instance when it undoes an object patch.
            is_class_forward = forward == MethodType(type(block).forward, block)
            vars(block)["forward"] = SwappedForward(self, j, block, None if is_class_forward else forward)

    def remove_forwards(self) -> None:
        """Restore the previous forwards; the slots stay."""
        for block in self.blocks.values():
            forward = vars(block).get("forward")
            if isinstance(forward, SwappedForward) and forward.swap() in (self, None):
                if forward.inner is None:
                    del vars(block)["forward"]
                else:
                    vars(block)["forward"] = forward.inner

    def release(self) -> None:
        """End the swap and free slots and patches.

        From here on only the modules own the flat weights, which are freed or moved with them.
        """
        self.remove_forwards()
        if self.ring is None or not self.attached:
            return
        base, freed_bytes = self.base(), self.held_bytes()
        self.ring.release()
        self.ring.flat_weights = []
        self._unpatched, self._slots = [], []
        self._patching, self._hooks = NO_PATCHES, {}
        for block in self.blocks.values():
            for module in block.modules():
                if id(module) in self.modules:
                    wipe_lowvram_weight(module)
        if base is not None:
            base.model_loaded_weight_memory -= freed_bytes

    @contextmanager
    def in_slot(self, j: int) -> Iterator[None]:
        """Point block j at the weights in its slot, which are its flat weights, patched.

        Raises RuntimeError if a weight is neither the flat weight nor an object patch's replacement: it would run
        without its LoRA and on the host.
        """
        assert self.ring is not None
        originals = [
            self._swapped_now(ref, unpatched) for ref, unpatched in zip(self.refs[j], self._unpatched[j], strict=True)
        ]
        self.ring.forward(j)
        self.running.add(j)
        try:
            for ref, tensor, slot in zip(self.refs[j], originals, self._slots[j], strict=True):
                if tensor is not None:
                    ref.table[ref.attribute] = slot
            yield
        finally:
            for ref, tensor in zip(self.refs[j], originals, strict=True):
                if tensor is not None:
                    ref.table[ref.attribute] = tensor
            self.running.discard(j)

    def _swapped_now(self, ref: WeightRef, unpatched: Tensor | None) -> Tensor | None:
        """Return the module's current tensor, which the slot's is to replace.

        None for a tensor installed by an object patch. It may be another object over the same memory: compiling a block
        replaces inference tensors.
        """
        tensor = ref.tensor()
        if tensor is unpatched or (tensor is not None and unpatched is not None and same_memory(tensor, unpatched)):
            return tensor
        if ref.key in self._patching.replaced:
            return None
        raise RuntimeError(
            f"Another node replaced {ref.key} while its block streams from RAM; put Block Swap behind that node, or "
            "leave it out."
        )

    def invalidate(self) -> None:
        """Have every block copied and patched again."""
        if self.ring is not None and self.attached:
            # Copies in flight may still read the patches to be freed.
            self.ring.stream.settle()
            self.ring.invalidate()

    def set_hook_patches(self, patches: Patches) -> None:
        """Apply the weight patches of hooks on top of the others from here on."""
        if patches or self._hooks:
            self.invalidate()
        self._hooks = patches

    def _patch(self, j: int) -> None:
        """Apply the weight patches in the slot, then those of hooks."""
        assert self.ring is not None
        device = self.ring.device
        for ref, unpatched, weight in zip(self.refs[j], self._unpatched[j], self._slots[j], strict=True):
            if (patches := self._patching.patches.get(ref.key)) is not None:
                patch_weight(ref, weight, patches, device)
            if (patches := self._hooks.get(ref.key)) is not None:
                patch_weight_by_hook(ref, weight, unpatched, patches, device)


def _point_at_but(replaced: Collection[str]) -> Put:
    """Return `point_at` for all keys except those that another node has replaced temporarily."""

    def put(ref: WeightRef, tensor: Tensor, parts: list[Tensor]) -> None:
        if ref.key not in replaced:
            point_at(ref, tensor, parts)

    return put


def _over_slot(refs: list[WeightRef], layout: Layout, slot: Tensor) -> list[Tensor]:
    """Make the tensors of a block over the memory of its slot."""
    fields = iter(layout.fields)
    tensors = []
    for ref in refs:
        tensor = ref.tensor()
        assert tensor is not None
        tensors.append(with_parts(tensor, [next(fields).tensor_in(slot) for _ in parts_of(tensor)]))
    return tensors
