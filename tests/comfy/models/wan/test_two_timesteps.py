"""Two timesteps in one clip of Wan 2.2 5B: that of the noisy frames and 0, at the memory of a single one."""

from typing import Any

import torch
from family_cases import CASES
from tessera.memory.weights.frozen import unload
from tessera.models.catalogue.registry import family_of
from tessera.models.layers.math import modulate
from tessera.models.model_patches import trainable_model
from tessera.models.wan.blocks import TextBlock
from tessera.models.wan.layers import gate_frames, modulate_frames
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

B = 2
N = 24
D = 128
L = 5


def saved_bytes(call: Any) -> int:
    """Bytes of the storages that autograd keeps for a call's backward."""
    saved: dict[int, Tensor] = {}
    with saved_tensors_hooks(lambda t: saved.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        call()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_tokens_take_the_row_of_their_frame_bit_for_bit():
    """Against rows chosen before the products, forward and backward, in the dtypes that are trained in."""
    clean = torch.arange(N)[None, :, None] < torch.tensor([8, 0])[:, None, None]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x, y, grad = (torch.randn(B, N, D, dtype=dtype, requires_grad=True) for _ in range(3))
        shift, scale, gate = torch.randn(3, B, 2, D, dtype=dtype).unbind()
        rows = [torch.where(clean, part[:, 1:], part[:, :1]) for part in (shift, scale, gate)]
        expected = torch.addcmul(modulate(x, *rows[:2]), y, rows[2])
        actual = gate_frames(modulate_frames(x, shift, scale, clean), y, gate, clean)
        assert torch.equal(actual, expected)
        pairs = (torch.autograd.grad(out, (x, y), grad) for out in (actual, expected))
        assert all(torch.equal(*pair) for pair in zip(*pairs, strict=True)), dtype


def test_a_block_keeps_no_row_for_each_token(case_file):
    """Beside what one timestep for all frames keeps: the mask, a byte a token, and the second row of six."""
    patcher, _ = trainable_model(CASES["wan-2.2-5b"].load(case_file(CASES["wan-2.2-5b"])))
    unload()
    block = family_of(patcher).forward.build(patcher, torch.device("cpu"), torch.float32, "auto").blocks()[0][1]
    x = torch.randn(B, N, D, requires_grad=True)
    e = torch.randn(B, 2, 6, D)
    pe = torch.randn(B, N, 1, 64, 2)
    text = torch.randn(B, L, D)
    clean = torch.zeros(B, N, 1, dtype=torch.bool)
    single = saved_bytes(lambda: TextBlock.forward(block, x, e[:, :1].clone(), pe, text, None, {}))
    two = saved_bytes(lambda: block(x, e, pe, text, None, clean, {}))
    row = B * D * 4
    assert two - single == clean.nbytes + 6 * row + 2 * row  # the six, of which each scale is kept with 1 added
