"""Block swap in inference: while a swapped block runs, its modules hold the weights in its slot.

Between calls the MODEL's modules point at the flat weights on the host, so saving, unloading and cloning never see a
slot. The modules themselves are unchanged: everything other nodes have added to them (replaced forwards, bypass LoRAs,
hooks, weight wrappers) runs as on a block that is not swapped.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import comfy.lora
import comfy.model_management
import torch
from comfy.model_patcher import move_weight_functions, wipe_lowvram_weight
from torch import nn

from ...common.notes import Notes
from ..host.flat_weights import BlockWeights, HostBuffers, plain_tensors, weight_refs
from ..host.mapped_file import MappedWeights
from ..host.pinning import unpinned_message
from .forward import install_forwards, remove_forwards
from .slot_patches import Patches, SlotPatches, SlotTensors
from .slot_ring import SlotRing

# The blocks currently swapped in each model: two patchers of one model may swap different ones.
_attached: "WeakKeyDictionary[nn.Module, weakref.ref[SwappedBlocks]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class StreamOptions:
    """Options of the stream of blocks from the host.

    prefetch: number of blocks copied ahead.
    pinned: their flat buffers are page-locked.
    from_file: weights in the mapped file stay there.
    automatic: the number of blocks was chosen automatically.
    """

    prefetch: int
    pinned: bool
    from_file: bool = False
    automatic: bool = False


class SwappedBlocks:
    """Swapped blocks of one model.

    base: ComfyUI's BaseModel.
    weights: of the swapped blocks.
    rest: the other weights in the mapped file.
    host: the memory that the blocks stream from.
    ring: the slots that they stream through, once the model has been loaded.
    tensors: the blocks' tensors over the slots.
    notes: sentences for the user.
    """

    def __init__(self, base: Any, blocks: Mapping[str, nn.Module], options: StreamOptions):
        """blocks: modules by their names in the MODEL's state dict, in the order of the forward."""
        self.base: Callable[[], Any] = weakref.ref(base)
        self.options = options
        self.notes = Notes()
        self.weights = BlockWeights(blocks)
        modules = self.weights.modules
        outside = [ref for ref in weight_refs("", base) if id(ref.owner) not in modules] if options.from_file else []
        self.rest = MappedWeights(outside)
        self.host = HostBuffers(self.weights, options.pinned, options.from_file)
        self.ring: SlotRing | None = None
        self.tensors = SlotTensors(self.weights)

    def __del__(self) -> None:
        self.release()

    def for_model(self, base: nn.Module) -> "SwappedBlocks":
        """Return the blocks of the same names in another model."""
        return SwappedBlocks(base, {name: base.get_submodule(name) for name in self.weights.blocks}, self.options)

    def resident_bytes(self) -> int:
        """Return the bytes of the model without the swapped blocks."""
        size = comfy.model_management.module_size
        return size(self.base()) - sum(size(block) for block in self.weights.blocks.values())

    def slot_count(self) -> int:
        return min(self.options.prefetch + 1, len(self.weights.blocks))

    def slot_bytes(self) -> int:
        """Return the bytes that the slots take on the device while the model is loaded."""
        return self.slot_count() * self.weights.largest()

    def held_bytes(self) -> int:
        """Return the bytes that the slots take on the device now."""
        return self.ring.slots.held_bytes() if self.ring is not None else 0

    @property
    def attached(self) -> bool:
        return self.held_bytes() > 0

    def attach(self, device: torch.device, patching: SlotPatches) -> None:
        """Allocate the slots and make the blocks run from them, with these patches on top of the flat weights.

        Raises ValueError for a patch that does not fit into a slot.
        """
        base = self.base()
        assert base is not None
        _check_shapes(self.weights, patching)
        previous = _attached.get(base)
        other = previous() if previous is not None else None
        if other is not None and other is not self:
            other.release()
        if self.attached and self.ring is not None and self.ring.device != device:
            self.release()
        if not self.attached:
            self._take(device, patching)
            _attached[base] = weakref.ref(self)
            base.model_loaded_weight_memory += self.held_bytes()
        if patching.identity != self.tensors.patching.identity:
            self.invalidate()
        self.tensors.set_patches(patching)
        _flag_modules(self.weights, patching, device)
        install_forwards(self)

    def _take(self, device: torch.device, patching: SlotPatches) -> None:
        buffers, refused = self.host.collect(patching.replaced)
        if (note := unpinned_message(refused, len(buffers))) is not None:
            self.notes.add(note)
        if self.ring is None or self.ring.device != device or not self.ring.accepts(buffers):
            self.ring = SlotRing(buffers, device, self.options.prefetch, self.tensors.patch)
        self.ring.replace(buffers)
        try:
            self.ring.take()
        except BaseException:  # only the modules may keep the flat weights alive
            self.ring.replace([])
            raise
        self.tensors.make(self.ring.slots)

    def release(self) -> None:
        """End the swap and free slots and patches.

        From here on only the modules own the flat weights, which are freed or moved with them.
        """
        remove_forwards(self)
        if self.ring is None or not self.attached:
            return
        base, freed_bytes = self.base(), self.held_bytes()
        self.ring.release()
        self.ring.replace([])
        self.tensors.drop()
        for block in self.weights.blocks.values():
            for module in block.modules():
                if id(module) in self.weights.modules:
                    wipe_lowvram_weight(module)
        if base is not None:
            base.model_loaded_weight_memory -= freed_bytes

    def enters_slot(self, j: int) -> bool:
        return self.attached and j not in self.tensors.running

    @contextmanager
    def in_slot(self, j: int) -> Iterator[None]:
        """Point block j at the weights in its slot, which are its flat weights, patched.

        Raises RuntimeError as `SlotTensors.replaceable`.
        """
        assert self.ring is not None
        originals = self.tensors.replaceable(j)
        self.ring.forward(j)
        with self.tensors.installed(j, originals):
            yield

    def invalidate(self) -> None:
        """Have every block copied and patched again."""
        if self.ring is not None and self.attached:
            # Copies in flight may still read the patches to be freed.
            self.ring.stream.settle()
            self.ring.invalidate()

    def set_hook_patches(self, patches: Patches) -> None:
        """Apply the weight patches of hooks on top of the others from here on."""
        if patches or self.tensors.hooks:
            self.invalidate()
        self.tensors.set_hooks(patches)


def _check_shapes(weights: BlockWeights, patching: SlotPatches) -> None:
    """Raise ValueError if a weight, or a patch of it, does not fit into a slot."""
    for name, refs, layout in zip(weights.blocks, weights.refs, weights.layouts, strict=True):
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


def _flag_modules(weights: BlockWeights, patching: SlotPatches, device: torch.device) -> None:
    """Set the flags that ComfyUI's load sets on modules that it moves to the device."""
    for name, block in weights.blocks.items():
        for inner, module in block.named_modules(prefix=name):
            if id(module) not in weights.modules or not hasattr(module, "comfy_cast_weights"):
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
