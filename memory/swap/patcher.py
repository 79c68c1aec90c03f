"""ModelPatcher of a MODEL whose swapped blocks are never on the device all at once."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any
from uuid import uuid4

import comfy.model_management
import torch
from comfy.hooks import HookGroup
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...common.core import PartialPatcher, replaced_keys
from ...common.gguf_tensor import is_gguf
from ...common.notes import Notes
from ...common.text import quantity
from ..host.flat_weights import restore_inference_mode
from .forward import install_forwards, remove_forwards
from .inference import StreamOptions, SwappedBlocks
from .oom_retry import RETRIED, bytes_to_free
from .selection import all_on_device
from .slot_patches import SlotPatches

KEY = "tessera.swapped_blocks"
EVERYTHING = 1e32  # what core passes for "no limit"


class SwapPatcher(PartialPatcher):
    """ComfyUI's patcher for the resident blocks; swapped blocks are handled by `swap`.

    It loads, patches and unloads the rest as ComfyUI does, and reports the bytes really on the device to ComfyUI's
    memory management: the rest and the slots. Clones share `swap`.
    """

    size: int
    _dying = False

    @property
    def swap(self) -> SwappedBlocks:
        return self.attachments[KEY]

    @property
    def notes(self) -> Notes:
        """Return the swap's sentences for the user."""
        return self.swap.notes

    def clone(self, *args: Any, **kwargs: Any) -> "ModelPatcher":
        clone = super().clone(*args, **kwargs)
        if clone.model is not self.model:
            clone.set_attachments(KEY, self.swap.for_model(clone.model))
        return clone

    def __del__(self) -> None:
        self._dying = True
        super().__del__()

    # Called by ComfyUI's loading and memory management.

    def model_size(self):
        if self.size <= 0:
            self.size = self.swap.resident_bytes() + self.swap.slot_bytes()
        return self.size

    def left_out(self, module: nn.Module) -> bool:
        # By identity: a module that an object patch has put into a swapped block is loaded like any other.
        return id(module) in self.swap.weights.modules

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.swap.rest.drop_replaced(self._replaced())
        # A full load ends with `model.to(device)`, which would move the swapped blocks too.
        memory = EVERYTHING if full_load else max(0.1, lowvram_model_memory - self.swap.slot_bytes())
        super().load(device_to, memory, force_patch_weights, full_load=False)
        if not self.model.model_lowvram:
            for module in self.model.modules():
                if id(module) not in self.swap.weights.modules:
                    self._move_own(module, device_to)
            self.model.model_loaded_weight_memory = self.model_size() - self.swap.slot_bytes()
        self.model.model_loaded_weight_memory += self.swap.held_bytes()
        self._attach(device_to)

    @staticmethod
    def _move_own(module: nn.Module, device: torch.device | None) -> None:
        """Move the parameters and buffers of a module that has submodules or no parameters.

        Core moves these in a full load only.
        """
        if device is None or (module._parameters and not any(True for _ in module.children())):
            return
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)

    def _attach(self, device: torch.device | None) -> None:
        self.swap.attach(
            device if device is not None else self.load_device,
            SlotPatches(
                patches=self.patches,
                identity=self.patches_uuid,
                wrappers=self.weight_wrapper_patches,
                replaced=self.object_patches_backup.keys(),
                force_cast=self.force_cast_weights,
            ),
        )
        self._hook_swapped(self.current_hooks)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Load as ComfyUI requests.

        On OOM, if the number of blocks was chosen automatically, fewer of the other weights are loaded, in steps until
        they fit. Raises torch.OutOfMemoryError with a sentence for the user if no fewer can be loaded.
        """
        try:
            return self._load_what_fits(device_to, extra_memory, force_patch_weights)
        except BaseException:
            self.detach()  # ComfyUI injects on its way out, even if the load failed
            raise

    def _load_what_fits(self, device_to: torch.device, extra_memory: float, force_patch_weights: bool) -> int:
        room = min(self.model_size(), self.loaded_size() + extra_memory)
        smaller = False
        while True:
            try:
                loaded = self._partially_load(device_to, extra_memory, force_patch_weights)
                break
            except Exception as error:
                if not comfy.model_management.is_oom(error):
                    raise
                other_bytes = max(0, room - self.swap.slot_bytes())
                if not self.swap.options.automatic or other_bytes == 0:
                    raise torch.OutOfMemoryError(self._no_room()) from error
            # Outside the handler, whose exception holds the tensors already placed.
            self.detach()
            comfy.model_management.soft_empty_cache()
            smaller = True
            self.model_patches_to(device_to)
            self.model_patches_to(self.model_dtype())
            extra_memory = room = self.swap.slot_bytes() + max(0, other_bytes - bytes_to_free(other_bytes))
        if smaller:
            self.swap.notes.add(RETRIED)
        return loaded

    def _no_room(self) -> str:
        swap, options = self.swap, self.swap.options
        sizes = f"{swap.slot_bytes() / 2**30:.2f} GiB for {quantity(swap.slot_count(), 'block')} at a time"
        if options.automatic:
            return (
                f"blocks_to_swap is -1, but the GPU doesn't even have room for {sizes}; close other programs on this "
                "GPU."
            )
        return (
            f"blocks_to_swap is {len(swap.weights.blocks)} and prefetch_blocks is {options.prefetch}, and the GPU has "
            f"no room for {sizes} and {swap.resident_bytes() / 2**30:.2f} GiB of other weights; set blocks_to_swap to "
            "-1 or higher, or close other programs on this GPU."
        )

    def _partially_load(self, device_to: torch.device, extra_memory: float, force_patch_weights: bool) -> int:
        unchanged = self.model.current_weight_patches_uuid == self.patches_uuid and not force_patch_weights
        if unchanged and extra_memory < self.swap.slot_bytes() and self.loaded_size() > 0 and not self.swap.attached:
            # `detach` freed the slots; they need room again, if necessary taken from the rest, which ComfyUI's load
            # cannot shrink.
            extra_memory -= self.swap.slot_bytes()
        loaded = super().partially_load(device_to, extra_memory, force_patch_weights)
        if not self.swap.attached:  # core found all of the rest on the device
            try:
                self._attach(device_to)
            except BaseException:
                self.detach()
                raise
        return loaded

    def patch_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().patch_model(*args, **kwargs)
        install_forwards(self.swap)
        return model

    def pre_run(self):
        install_forwards(self.swap)  # injections may have replaced a forward after loading
        super().pre_run()

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        # Remove wrappers of a block's forward in reverse order, so that none restores a forward that has ended.
        self.eject_model()
        self.swap.release() if unpatch_weights else remove_forwards(self.swap)
        if unpatch_weights and self.swap.rest:
            self.unpatch_hooks()
            self.swap.rest.restore(self._replaced())
        # Outside inference mode ComfyUI's move to a device copies quantised weights even if they are already on it:
        # they would leave their flat buffers, which small tensors keep alive.
        with torch.inference_mode() if self.swap.weights.quantised else nullcontext():
            if unpatch_weights:
                # ComfyUI removes the functions that apply a LoRA at each use only after a completed partial load, and
                # not if modules only look partially loaded because they are cast to another dtype.
                self.model.model_lowvram = True
            super().unpatch_model(device_to, unpatch_weights)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        freed = super().partially_unload(device_to, memory_to_free, force_patch_weights)
        self.swap.rest.restore(self._replaced(), device_type="cpu")
        return freed

    def _replaced(self) -> set[str]:
        """Return the keys that ComfyUI itself restores when the model is unloaded."""
        return replaced_keys(self)

    def pin_weight_to_device(self, key):
        # Page-locking pages of a mapped file would copy them.
        if key not in self.swap.rest:
            super().pin_weight_to_device(key)

    def detach(self, unpatch_all=True):
        # Another patcher of the same model, without slots, may be loaded next. Not if a clone is garbage-collected: its
        # siblings run on.
        if not self._dying:
            self.eject_model()
            self.swap.release()
        return super().detach(unpatch_all)

    # Hooks: core writes a hook's weights into the modules, which for swapped blocks are the flat weights.

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, *args: Any, **kwargs: Any) -> None:
        if key not in self.swap.weights.keys:
            self.swap.rest.copy_out(key)  # it is patched in-place, and the file's mapping is read-only
            super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kwargs)

    def patch_cached_hook_weights(self, cached_weights, key, memory_counter) -> None:
        self.swap.rest.copy_out(key)
        super().patch_cached_hook_weights(cached_weights, key, memory_counter)

    def patch_hooks(self, hooks: HookGroup) -> None:
        super().patch_hooks(hooks)
        self._hook_swapped(hooks)

    def unpatch_hooks(self, whitelist_keys_set: set[str] | None = None) -> None:
        super().unpatch_hooks(whitelist_keys_set)  # type: ignore[arg-type]
        if not whitelist_keys_set:
            self.swap.set_hook_patches({})

    def _hook_swapped(self, hooks: HookGroup | None) -> None:
        combined = self.get_combined_hook_patches(hooks) if hooks is not None else {}
        self.swap.set_hook_patches({key: patches for key, patches in combined.items() if key in self.swap.weights.keys})

    # Saving.

    def model_state_dict_for_saving(self, model=None, prefix=""):
        state = super().model_state_dict_for_saving(model, prefix)
        # Core bakes weights and biases; other patched tensors it takes from the loaded modules.
        for name, value in state.items():
            key = f"{prefix}{name}"
            if key in self.swap.weights.keys and key in self.patches and type(value) in (torch.Tensor, nn.Parameter):
                patched = self.patch_weight_to_device(key, device_to=self.load_device, return_weight=True)
                state[name] = patched.to("cpu")
        return state


def swap_model(
    patcher: ModelPatcher,
    blocks: Mapping[str, nn.Module],
    prefetch: int,
    pinned: bool,
    from_file: bool = False,
    automatic: bool = False,
) -> SwapPatcher:
    """Clone the MODEL so that its `blocks` (by name in its state dict) stream from the host when it runs.

    from_file: weights in the mapped file stream directly from it.
    automatic: other weights may be offloaded too if the device has no room for them.
    Raises ValueError if the model can't be swapped. The clone's `notes` has the messages for the user.
    """
    if not blocks:
        raise ValueError("blocks_to_swap: this model has no blocks to swap; set it to 0.")
    if any(is_gguf(weight) for weight in patcher.model.parameters()):
        # The loader of GGUF files moves each module, including the blocks, to the device and back when it first loads
        # the MODEL, and attaches LoRAs to tensors that a slot would replace.
        raise ValueError(
            "model is a GGUF file, whose loader moves weights by itself; leave Block Swap out (ComfyUI streams what "
            "doesn't fit; to train, set blocks_to_swap on Training Memory), or load a safetensors file with Load "
            "Diffusion Model (Block Swap) and quantize at int8."
        )
    if type(patcher) not in (ModelPatcher, SwapPatcher):
        raise ValueError(
            "model: block swap doesn't work with this loader, which moves weights by itself "
            f"({type(patcher).__name__}); leave Block Swap out (Training Memory swaps while it trains), or use "
            "ComfyUI's own loader."
        )
    if any(key.startswith(tuple(f"{name}." for name in blocks)) for key in patcher.object_patches_backup):
        # The blocks hold another node's replacements for as long as the model is loaded.
        comfy.model_management.unload_model_and_clones(patcher)
        restore_inference_mode(patcher.model)
    clone = patcher.clone()
    # Change only its class, as all other state of a clone is needed.
    clone.__class__ = SwapPatcher
    assert isinstance(clone, SwapPatcher)
    swap = SwappedBlocks(clone.model, blocks, StreamOptions(max(1, prefetch), pinned, from_file, automatic))
    clone.set_attachments(KEY, swap)
    clone.offload_device = torch.device("cpu")
    clone.size = 0
    # ComfyUI would not reload a sibling with the same patches, although other weights are on the device.
    clone.patches_uuid = uuid4()
    if prefetch < 1:
        swap.notes.add(f"prefetch_blocks is {prefetch}, but at least one block must be copied ahead, so 1 is used.")
    elif (message := all_on_device(prefetch, len(blocks))) is not None:
        swap.notes.add(message)
    return clone
