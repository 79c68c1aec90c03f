"""OOM retry: if a sampler's call of the model runs out of memory, offload resident weights and repeat it.

Active only if the number of swapped blocks was chosen automatically. NVIDIA's system memory fallback, which raises no
error, is also reported here.
"""

from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.hooks import HookGroup
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..comfy_compiler import without_comfy_compiler
from ..host.sysmem_fallback import SysmemMonitor

KEY = "tessera.oom_retry"
FRACTION = 4  # each retry offloads a quarter of the resident weights
LEAST = 512 * 2**20  # bytes
RETRIED = (
    "Even with blocks_to_swap -1 the memory was not enough, so ComfyUI also streams some of the other weights, which "
    "is slower; set blocks_to_swap to a number above the one that was chosen."
)


def bytes_to_free(resident: int) -> int:
    """Return the bytes to free before a retry. resident: bytes of weights on the device."""
    return max(LEAST, resident // FRACTION)


def copy_containers(value: Any) -> Any:
    """Copy the lists and dicts of a call's arguments, not the tensors in them.

    A UNet pops a ControlNet's outputs from their lists, so a second call with the same arguments would lack them.
    """
    return tree_map_only(Tensor, lambda tensor: tensor, value)


class OomRetry:
    """Wrapper around each call of the model.

    automatic: weights may be offloaded. note: called with sentences for the user, any number of times.
    """

    def __init__(self, device: torch.device, automatic: bool, note: Callable[[str], None]):
        self.automatic, self.note = automatic, note
        self.sysmem = SysmemMonitor(device)

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        retried = False
        while True:
            call_args = _copy_control(args, kwargs) if self.automatic else (args, kwargs)
            try:
                with without_comfy_compiler(*call_args):
                    result = executor(*call_args[0], **call_args[1])
                break
            except Exception as error:
                if not self.automatic or not comfy.model_management.is_oom(error):
                    raise
                patcher = executor.class_obj.current_patcher
                if patcher is None:
                    raise
                # Before the unload, which would bake hooks into the weights that it offloads.
                hooks = _remove_hooks(patcher)
                if not _unload_some(patcher):
                    raise
            # Outside the handler: the error's traceback holds the failed call's activations.
            comfy.model_management.soft_empty_cache()
            if hooks is not None:
                patcher.patch_hooks(hooks)
            retried = True
        if retried:
            self.note(RETRIED)
        if (message := self.sysmem.message()) is not None:
            self.note(message)
        return result


def _copy_control(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the arguments of `apply_model` for one of several tries; another wrapper may pass control by keyword."""
    keyword_args = {key: copy_containers(value) if key == "control" else value for key, value in kwargs.items()}
    return (*args[:4], *(copy_containers(control) for control in args[4:5]), *args[5:]), keyword_args


def _remove_hooks(patcher: ModelPatcher) -> HookGroup | None:
    """Remove the hooks whose weight patches are active, and return them.

    If ComfyUI unloads a part of a patched model it removes them itself, but keeps cached weights, also for inactive
    hooks, that already contain the patches which it then applies at each use.
    """
    hooks = patcher.current_hooks
    patcher.clear_cached_hook_weights()
    return hooks


def _unload_some(patcher: ModelPatcher) -> int:
    """Offload weights and return their bytes; ComfyUI streams each at its next use."""
    return patcher.partially_unload(patcher.offload_device, bytes_to_free(patcher.loaded_size()))


def retry_on_oom(patcher: ModelPatcher, automatic: bool, note: Callable[[str], None]) -> None:
    """Wrap the model's calls on this MODEL and its clones in an `OomRetry`."""
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, OomRetry(patcher.load_device, automatic, note))
