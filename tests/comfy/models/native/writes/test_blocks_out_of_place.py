"""Gradients of ComfyUI's own blocks that write in place the most, out of place and in a checkpoint: those of the blocks
as they are, run while autograd keeps copies of what they write."""

from contextlib import nullcontext

import comfy.model_management
import pytest
import torch
from tessera.models.native.writes.out_of_place import blocks_to_leave_eager, out_of_place
from tiny.native import ROWS, build, sample_of
from tiny.native.reference import writing_allowed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LISTS = {
    "krea-2": ["blocks"],
    "hunyuan-video": ["double_blocks", "single_blocks"],
    "ltx-video": ["transformer_blocks"],
}


class _Named:
    name = "a block"


def _followed(forward):
    def run(*args, **kwargs):
        return checkpoint(out_of_place, _Named(), forward, *args, use_reentrant=False, **kwargs)

    return run


def _gradients(name: str, follow: bool) -> dict[str, Tensor]:
    row = next(row for row in ROWS if row.name == name)
    model, read = build(row).model, sample_of(row).load()
    for module in model.modules():  # weights of a loader are inference tensors
        for key, weight in module._parameters.items():
            if weight is not None:
                module._parameters[key] = nn.Parameter(weight.clone(), weight.ndim > 1)
        for key, buffer in module._buffers.items():
            module._buffers[key] = buffer if buffer is None else buffer.clone()
    for blocks in [getattr(model.diffusion_model, key) for key in LISTS[name]]:
        for block in blocks:
            block.forward = _followed(block.forward) if follow else block.forward
    noisy = model.process_latent_in(read.latent[None])
    conds_of_core = model.extra_conds(cross_attn=read.text, noise=noisy, device=noisy.device, **read.conditioning)
    conds = {
        key: cond.process_cond(batch_size=1, area=None, device=noisy.device).cond for key, cond in conds_of_core.items()
    }
    with nullcontext() if follow else writing_allowed():
        out = model._apply_model(noisy, torch.tensor([0.5]), **conds)
        (out * torch.linspace(-1.0, 1.0, out.numel()).reshape(out.shape)).sum().backward()
    return {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", LISTS)
def test_gradients_of_blocks_that_write_in_place(name, monkeypatch):
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    expected = _gradients(name, follow=False)
    with blocks_to_leave_eager() as eager_blocks:
        actual = _gradients(name, follow=True)
    assert actual.keys() == expected.keys() and len(actual) > 20 and not eager_blocks
    for key, gradient in expected.items():
        assert (actual[key] - gradient).norm() <= 1e-6 * gradient.norm(), key
