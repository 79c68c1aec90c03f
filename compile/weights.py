"""Uniform weights for compiled blocks, so that a LoRA does not cause a recompile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from comfy.model_patcher import LowVramPatch
from torch import Tensor, nn

from ..common.core import casts_weights
from ..memory.weights.frozen import share_outside_inference_mode


def keep_flags_on_modules(modules: Iterable[nn.Module]) -> None:
    """Store on each layer instance whether it casts its weights.

    ComfyUI keeps that flag on the layer's class until it first streams the layer; a guard distinguishes the two, so a
    model that was once partly loaded would recompile completely.
    """
    for module in modules:
        flag = casts_weights(module)
        if flag is not None:
            vars(module).setdefault("comfy_cast_weights", flag)


def leave_inference_mode(modules: list[nn.Module]) -> None:
    """Replace every weight that was made under inference mode by an ordinary tensor over the same memory.

    ComfyUI's nodes run under inference mode, so weights with a LoRA in them, and all weights of some loaders, are
    inference tensors, and others are not. A guard distinguishes the two, so a LoRA would recompile every block.
    """
    for module in modules:
        parameters = module._parameters
        for name, parameter in parameters.items():
            if parameter is not None and type(parameter) is nn.Parameter and parameter.is_inference():
                if type(parameter.data) is not Tensor:
                    continue
                with torch.inference_mode(False):
                    alias = share_outside_inference_mode(parameter)
                    parameters[name] = nn.Parameter(alias, requires_grad=False)


# The patches of weights that ComfyUI streams, by number, as long as they are referenced.
_patches: "WeakValueDictionary[int, OpaquePatch]" = WeakValueDictionary()


@torch.library.custom_op("tessera::patched_weight", mutates_args=())
def patched_weight(weight: Tensor, number: Tensor) -> Tensor:
    """Apply the patch of this number (an int64 scalar on the CPU) to the weight.

    Opaque, with the number as data: a compiled block that traced the patch would be specialised for this LoRA, key and
    strength.
    """
    return _patches[int(number)].patch(weight.clone())  # ComfyUI adds in place


@patched_weight.register_fake
def _(weight, number):
    return torch.empty_like(weight)


class OpaquePatch:
    """Stand-in for a LowVramPatch in a module's `weight_function` while a compiled block runs."""

    _count = 0

    def __init__(self, patch: LowVramPatch):
        self.patch = patch
        OpaquePatch._count += 1
        _patches[OpaquePatch._count] = self
        with torch.inference_mode(False):
            self.number = torch.tensor(OpaquePatch._count)

    def __call__(self, weight: Tensor) -> Tensor:
        return patched_weight(weight, self.number)


@contextmanager
def opaque_patches(modules: list[nn.Module]) -> Iterator[None]:
    """Hide LoRAs that ComfyUI applies at each use of a streamed weight from the compiler, within the context."""
    replaced: list[tuple[Any, str, list[Any]]] = []
    try:
        for module in modules:
            for name in ("weight_function", "bias_function"):
                functions = getattr(module, name, None)
                if functions and any(type(f) is LowVramPatch for f in functions):
                    replaced.append((module, name, functions))
                    setattr(module, name, [_as_opaque(f) for f in functions])
        yield
    finally:
        for module, name, functions in replaced:
            setattr(module, name, functions)


def _as_opaque(function: Any) -> Any:
    if type(function) is not LowVramPatch:
        return function
    if not hasattr(function, "tessera_opaque"):
        function.tessera_opaque = OpaquePatch(function)
    return function.tessera_opaque
