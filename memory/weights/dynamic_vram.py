"""A MODEL under ComfyUI's dynamic VRAM, loaded once more without it.

Dynamic VRAM keeps weights in buffers that come and go through calls into C: neither a compiled graph nor a slot can
hold them. Core's own Compile Model does the same.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...common.core import can_leave_dynamic_vram, clone_without_dynamic_vram, intended_dtype
from ..host.mapped_file import KeepMapped, copy_into_ram, protect_from_hooks

# A model under dynamic VRAM → what a clone needs to stand on the same model loaded without it.
_without: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()


def without_dynamic_vram(patcher: ModelPatcher) -> ModelPatcher | None:
    """Clone the MODEL off dynamic VRAM; None where its loader can't load it so.

    All nodes behind the same loader share what is loaded. Where weights lie in a mapped file, hooks don't write there.
    """
    clone = patcher.clone() if not patcher.is_dynamic() else _loaded_without(patcher)
    if clone is not None:
        protect_from_hooks(clone)
    return clone


def _loaded_without(patcher: ModelPatcher) -> ModelPatcher | None:
    if not can_leave_dynamic_vram(patcher):
        return None
    # As the executor loads: quantised weights that were made outside of inference mode can't be moved under it.
    with torch.inference_mode():
        with KeepMapped():
            clone, loaded = clone_without_dynamic_vram(patcher, _without.get(patcher.model))
        cast_as_asked(clone.model)
        copy_into_ram(clone.model)
    _without[patcher.model] = loaded
    return clone


def cast_as_asked(model: nn.Module) -> None:
    """Cast each weight to the dtype that its module was made with.

    Where dynamic VRAM is on, core's Linear takes a file's weight in the file's dtype and leaves the cast to each use,
    also in a MODEL that was loaded without dynamic VRAM, where nothing casts it any more.
    """
    for module in model.modules():
        for name, weight in module._parameters.items():
            wanted = intended_dtype(module, name)
            if weight is None or wanted is None or type(weight.data) is not torch.Tensor or weight.dtype == wanted:
                continue
            module._parameters[name] = nn.Parameter(weight.data.to(wanted), requires_grad=weight.requires_grad)
