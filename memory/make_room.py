"""Where a sampler's call of the model finds no memory although the number of swapped blocks was chosen automatically,
resident weights make room for it and the call is made again. Memory that spills is told here too."""

from collections.abc import Callable
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from .spill import SpillWatch

KEY = "tessera.make_room"
PART = 4  # of the resident weights a quarter goes at a time
LEAST = 512 * 2**20  # bytes


class MakeRoom:
    """Stands around each call of the model. automatic: whether weights may leave the device; say: takes sentences for
    the user, any number of times."""

    def __init__(self, device: torch.device, automatic: bool, say: Callable[[str], None]):
        self.automatic, self.say = automatic, say
        self.spill = SpillWatch(device)

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                result = executor(*args, **kwargs)
                break
            except Exception as error:
                if not self.automatic or not comfy.model_management.is_oom(error):
                    raise
                patcher = executor.class_obj.current_patcher
                if patcher is None or not _free_some(patcher):
                    raise
            # Outside the handler, which holds the first try's activations.
            comfy.model_management.soft_empty_cache()
            self.say(
                "The memory did not suffice although blocks_to_swap is -1, so ComfyUI streams a part of the other "
                "weights too, which is slower; set blocks_to_swap to a number above the one that was chosen."
            )
        if (told := self.spill.told()) is not None:
            self.say(told)
        return result


def _free_some(patcher: ModelPatcher) -> int:
    """Bytes of weights that have left the device; ComfyUI brings each in again where it is used."""
    return patcher.partially_unload(patcher.offload_device, max(LEAST, patcher.loaded_size() // PART))


def make_room(patcher: ModelPatcher, automatic: bool, say: Callable[[str], None]) -> None:
    """Puts `MakeRoom` around the model's calls on this MODEL and its clones."""
    room = MakeRoom(patcher.load_device, automatic, say)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, room)
