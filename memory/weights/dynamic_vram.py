"""Reload a MODEL under ComfyUI's dynamic VRAM without it.

Dynamic VRAM keeps weights in buffers that are allocated and freed by calls into C: neither a compiled graph nor a slot
can hold them. Core's own Compile Model does the same.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...common.core import can_leave_dynamic_vram, clone_without_dynamic_vram, intended_dtype
from ..host.mapped_file import KeepMapped, copy_into_ram, protect_from_hooks

# A model under dynamic VRAM → the state from which its clones share one model loaded without it.
_loaded_states: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()


def without_dynamic_vram(patcher: ModelPatcher) -> ModelPatcher | None:
    """Clone the MODEL without dynamic VRAM; None if its loader can't load it so.

    All nodes behind the same loader share the loaded model. Hooks are kept from writing into weights in a mapped file.
    """
    clone = patcher.clone() if not patcher.is_dynamic() else _loaded_without(patcher)
    if clone is not None:
        protect_from_hooks(clone)
    return clone


def _loaded_without(patcher: ModelPatcher) -> ModelPatcher | None:
    if not can_leave_dynamic_vram(patcher):
        return None
    # As the executor loads: quantised weights created outside inference mode can't be moved under it.
    with torch.inference_mode():
        with KeepMapped():
            clone, loaded = clone_without_dynamic_vram(patcher, _loaded_states.get(patcher.model))
        cast_as_asked(clone.model)
        copy_into_ram(clone.model)
    _loaded_states[patcher.model] = loaded
    return clone


def cast_as_asked(model: nn.Module) -> None:
    """Cast each weight to the dtype that its module was created with.

    While dynamic VRAM is on, core's Linear keeps a file's weight in the file's dtype and defers the cast to each use,
    even in a MODEL that is loaded without dynamic VRAM, in which nothing casts it.
    """
    for module in model.modules():
        for name, weight in module._parameters.items():
            dtype = intended_dtype(module, name)
            if weight is None or dtype is None or type(weight.data) is not torch.Tensor or weight.dtype == dtype:
                continue
            module._parameters[name] = nn.Parameter(weight.data.to(dtype), requires_grad=weight.requires_grad)
