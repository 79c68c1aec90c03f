"""A training step on ComfyUI's own forward by plain autograd: nothing recomputed, swapped, compiled or out of place."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from .row import NativeRow, core_conds


def plain_model(patcher: Any) -> Any:
    """Give a MODEL made for this its BaseModel with weights that autograd may save; `apply_model` returns the raw
    output."""
    model = patcher.model
    with torch.inference_mode(False):
        for module in model.diffusion_model.modules():
            for name, value in list(module._parameters.items()):
                if value is not None:
                    module._parameters[name] = nn.Parameter(value.clone(), requires_grad=False)
            for name, value in list(module._buffers.items()):
                if value is not None:
                    module._buffers[name] = value.clone()
    return plain_output(patcher)


def plain_output(patcher: Any) -> Any:
    """Give a MODEL made for this its BaseModel, whose `apply_model` returns the raw output."""
    vars(patcher.model.model_sampling)["calculate_denoised"] = lambda sigma, output, x: output
    return patcher.model


def raw_output(model: Any, row: NativeRow, sample: Any, x: Tensor, sigma: Tensor, guidance: float | None) -> Tensor:
    """Run core's forward of one sample. x: (C, …) noisy latent in the model's space; sigma: (1,)."""
    noisy, conds = core_conds(model, row, sample, x[None], guidance)
    options = {"sigmas": sigma, "sample_sigmas": torch.cat((sigma, sigma)), "cond_or_uncond": [0]}
    out = model.apply_model(noisy, sigma, transformer_options=options, **conds)
    return out if row.audio is None else out.flatten()[: prod(row.latent)].view(1, *row.latent)


def tokens(latent: Tensor, count: int) -> Tensor:
    """(C, H, W) or (C, T, H, W) → (count, C·p·p), frame after frame in row order."""
    frames = latent if latent.ndim == 4 else latent[:, None]
    side = round((frames[0].numel() / count) ** 0.5)
    cut = frames.unfold(2, side, side).unfold(3, side, side)  # C, T, h, w, p, p
    return cut.permute(1, 2, 3, 0, 4, 5).reshape(count, -1)


class _Retained(WeakKeyDictionary[Any, Tensor]):
    """Keeps the values deleted from it."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __delitem__(self, key: Any) -> None:
        self.tensors.append(self[key])
        super().__delitem__(key)


class _CopyBeforeWrite(TorchDispatchMode):
    """Copies each saved tensor before a write to any part of its memory; torch looks only for those that begin where
    the written one does, so that a first write to a later slice would change what autograd has saved."""

    def __init__(self, context: Any):
        super().__init__()
        self.context = context

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                outputs = kwargs[argument.name] if argument.name in kwargs else args[number]
                for tensor in outputs if isinstance(outputs, list | tuple) else [outputs]:
                    self._copy(tensor.untyped_storage().data_ptr())
        return function(*args, **kwargs)

    def _copy(self, address: int) -> None:
        saved, copies = self.context.original, self.context.cloned
        for handle, tensor in list(saved.items()):
            if tensor.untyped_storage().data_ptr() == address:
                copies[handle] = tensor.clone()
                del saved[handle]


@contextmanager
def writing_allowed() -> Iterator[None]:
    """Let code write into tensors that autograd has saved, of which it keeps copies.

    Torch knows a saved tensor by its id, address and version, and lets it go once it has a copy. Another tensor may
    then get the same address and be taken for it: one gradient in five of wan-dancer, whose sequence of music is empty,
    failed because of this.
    """
    with allow_mutation_on_saved_tensors() as context:
        context.original = _Retained()
        with _CopyBeforeWrite(context):
            yield


@contextmanager
def with_lora(model: Any, lora: dict[str, tuple[Tensor, Tensor, float]]) -> Iterator[None]:
    """Add the LoRA to the output of each Linear. lora: (down, up, scale) by its name in the diffusion model."""

    def lora_hook(down: Tensor, up: Tensor, scale: float) -> Any:
        return lambda module, args, out: out + scale * (args[0] @ down.T) @ up.T

    hooks = [
        model.diffusion_model.get_submodule(name).register_forward_hook(lora_hook(*pair)) for name, pair in lora.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def training() -> Iterator[None]:
    """Kernels with a gradient: by ComfyUI's own switch, and for ropes that are reached in spite of it by name."""
    import comfy.model_management as management
    import comfy.quant_ops
    from tessera.models.native.forward.ropes import ROPES

    kitchen = comfy.quant_ops.ck
    with ExitStack() as stack:
        stack.enter_context(patch.object(management, "in_training", True))
        for name, form in ROPES.items():
            if hasattr(kitchen, name):
                stack.enter_context(patch.object(kitchen, name, form))
        yield
