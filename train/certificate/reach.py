"""Checks that every target gets a gradient, and that the LoRA file changes the output as the LoRA does."""

from collections.abc import Mapping
from typing import Any

import torch

from ...models.catalogue.registry import in_fp32
from ...models.family import ModelInputs
from ..placement.placed_model import PlacedModel
from ..verify.forward import relative
from .adapters import patched_by_core, perturbed
from .gradients import precise_forward


def targets_without_gradient(placed: PlacedModel, inputs: ModelInputs) -> tuple[list[str], list[str]]:
    """Return the targets with an effect but no gradient, and those without an effect, such as the text side of a last
    block. Zero weights of the adapters are filled with noise for this."""
    forward = precise_forward(placed, inputs)
    adapters = placed.network.adapters
    with in_fp32(placed.weights.transformer):
        with perturbed(placed), placed.training():
            out = forward()
            r = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)
            # Core's code that casts to 16 bits reads the casts, if there are any.
            sources = [(n, w) for n, a in adapters.items() for w in (*a.parameters(), *a.casts.values())]
            gradients = torch.autograd.grad((out.float() * r).sum(), [w for _, w in sources], allow_unused=True)
        pairs = zip(sources, gradients, strict=True)
        reached = {name for (name, _), g in pairs if g is not None and bool((g != 0).any())}
        unreached = [name for name in adapters if name not in reached]
        if not unreached:
            return [], []
        with torch.no_grad():
            with perturbed(placed, ()):
                base_output = forward()
                noise = relative(forward(), base_output)  # of kernels that add in any order; else zero

            def moves(names: list[str]) -> bool:
                with perturbed(placed, names):
                    return relative(forward(), base_output) > 4 * noise

            if not moves(unreached):
                return [], unreached
            wrong = [name for name in unreached if moves([name])]
    return wrong, [name for name in unreached if name not in wrong]


def effect_difference(
    placed: PlacedModel, inputs: ModelInputs, patches: Mapping[str, list[Any]], sampled: Any = None
) -> float:
    """Return the relative difference between the effects of a file, as patched by ComfyUI, and of the LoRA on the
    output.

    sampled: patcher with the patches, whose weights are read as in sampling; None adds them in fp32.
    """
    forward = precise_forward(placed, inputs)
    with torch.no_grad(), in_fp32(placed.weights.transformer):
        lora_output = forward()
        with patched_by_core(placed, {}):
            plain = forward()
        with patched_by_core(placed, patches, sampled):
            core = forward()
    return relative(core - plain, lora_output - plain)
