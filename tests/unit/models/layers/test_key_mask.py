"""Attention with a mask of keys, which only SDPA's kernels take."""

import pytest
import torch
from tessera.models.layers.attention import cudnn, flash, sdpa


@pytest.mark.parametrize("attend", [sdpa, cudnn, flash("flash_attn")], ids=["sdpa", "cudnn", "flash-attn"])
def test_masked_keys_change_nothing_whatever_attention_is_chosen(attend):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 2, 16, generator=generator).bfloat16() for length in (5, 9, 9))
    lengths = torch.tensor([6, 9])
    key_mask = (torch.arange(9) < lengths[:, None])[:, None, None]
    attended = attend(q, k, v, key_mask)
    for row, length in enumerate(lengths.tolist()):
        alone = sdpa(q[row : row + 1], k[row : row + 1, :length], v[row : row + 1, :length])
        assert torch.allclose(attended[row : row + 1].float(), alone.float(), atol=2e-2)
    assert torch.equal(attend(q, k, torch.where(key_mask[:, 0, 0, :, None, None], v, 100.0), key_mask), attended)
