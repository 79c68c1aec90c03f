"""Every target gets a gradient, and the LoRA's file moves the forward as the LoRA does."""

from collections.abc import Mapping
from typing import Any

import torch

from ...models.family import ModelInputs
from ...models.registry import in_fp32
from ..placement.placed_model import PlacedModel
from ..verify.forward import relative
from .adapters import patched_by_core, perturbed
from .gradients import precise_forward


def targets_without_gradient(placed: PlacedModel, inputs: ModelInputs) -> tuple[list[str], list[str]]:
    """Return the targets that have an effect and no gradient, and those that have no effect, as the text's side of a
    last block; the adapters' zeros are filled for it."""
    forward = precise_forward(placed, inputs)
    adapters = placed.network.adapters
    with in_fp32(placed.transformer):
        with perturbed(placed), placed.training():
            out = forward()
            r = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
            weights = placed.network.parameters()
            gradients = torch.autograd.grad((out.float() * r).sum(), weights, allow_unused=True)
        found = {id(w) for w, g in zip(weights, gradients, strict=True) if g is not None and bool((g != 0).any())}
        missed = [name for name, adapter in adapters.items() if not found & set(map(id, adapter.parameters()))]
        if not missed:
            return [], []
        with torch.no_grad():
            with perturbed(placed, ()):
                without = forward()

            def moves(names: list[str]) -> bool:
                with perturbed(placed, names):
                    return not torch.equal(forward(), without)

            if not moves(missed):
                return [], missed
            wrong = [name for name in missed if moves([name])]
    return wrong, [name for name in missed if name not in wrong]


def effect_difference(
    placed: PlacedModel, inputs: ModelInputs, patches: Mapping[str, list[Any]], sampled: Any = None
) -> float:
    """Return how far the effect on the output of a file, as ComfyUI patches it in, is from that of the LoRA, relative
    to it. sampled: a patcher with the patches, whose weights are taken as it samples; None adds them in fp32."""
    forward = precise_forward(placed, inputs)
    with torch.no_grad(), in_fp32(placed.transformer):
        ours = forward()
        with patched_by_core(placed, {}):
            plain = forward()
        with patched_by_core(placed, patches, sampled):
            core = forward()
    return relative(core - plain, ours - plain)
