"""Where a sampler's call of the model finds no memory although the number of swapped blocks was chosen automatically,
resident weights make room for it and the call is made again. Memory that spills is told here too."""

from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.hooks import HookGroup
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ..host.sysmem_fallback import SpillWatch
from .again import kept_for_another

KEY = "tessera.make_room"
PART = 4  # of the resident weights a quarter goes at a time
LEAST = 512 * 2**20  # bytes
TOLD = (
    "The memory did not suffice although blocks_to_swap is -1, so ComfyUI streams a part of the other weights too, "
    "which is slower; set blocks_to_swap to a number above the one that was chosen."
)


def part_of(resident: int) -> int:
    """How many of so many bytes of weights on the device are given up for another try."""
    return max(LEAST, resident // PART)


class MakeRoom:
    """Stands around each call of the model. automatic: whether weights may leave the device; say: takes sentences for
    the user, any number of times."""

    def __init__(self, device: torch.device, automatic: bool, say: Callable[[str], None]):
        self.automatic, self.say = automatic, say
        self.spill = SpillWatch(device)

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        smaller = False
        while True:
            mine = _control_kept(args, kwargs) if self.automatic else (args, kwargs)
            try:
                result = executor(*mine[0], **mine[1])
                break
            except Exception as error:
                if not self.automatic or not comfy.model_management.is_oom(error):
                    raise
                patcher = executor.class_obj.current_patcher
                if patcher is None:
                    raise
                hooks = _take_off_hooks(patcher)
                if not _free_some(patcher):
                    raise
            # Outside the handler, which holds the first try's activations.
            comfy.model_management.soft_empty_cache()
            if hooks is not None:
                patcher.patch_hooks(hooks)
            smaller = True
        if smaller:
            self.say(TOLD)
        if (told := self.spill.told()) is not None:
            self.say(told)
        return result


def _control_kept(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `apply_model` for one of several tries; another wrapper may have handed control on by name."""
    named = {key: kept_for_another(value) if key == "control" else value for key, value in kwargs.items()}
    return (*args[:4], *(kept_for_another(control) for control in args[4:5]), *args[5:]), named


def _take_off_hooks(patcher: ModelPatcher) -> HookGroup | None:
    """The hooks whose weights are in force. ComfyUI takes them off where it unloads a part of a patched model, and
    keeps weights for them, and for hooks that are not in force now, in which the patches are that it then applies at
    each use."""
    hooks = patcher.current_hooks
    patcher.clear_cached_hook_weights()
    return hooks


def _free_some(patcher: ModelPatcher) -> int:
    """Bytes of weights that have left the device; ComfyUI brings each in again where it is used."""
    return patcher.partially_unload(patcher.offload_device, part_of(patcher.loaded_size()))


def make_room(patcher: ModelPatcher, automatic: bool, say: Callable[[str], None]) -> None:
    """Puts `MakeRoom` around the model's calls on this MODEL and its clones."""
    room = MakeRoom(patcher.load_device, automatic, say)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, room)
