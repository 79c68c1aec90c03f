"""The first check of a run on ComfyUI's own forward sees what bf16's rounding hides."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tessera.models.native.blocks import NativeBlock
from tessera.train.settings import MemoryOptions
from tiny.memory.flash_attn import installed
from tiny.native import ROWS, build, data_of
from tiny.native.step import batch_of
from tiny.train.training import adding_more, make_trainer

BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize("name", ["z-image", "sd1.5", "minimax-h3", "ltx-2.3", "krea-2"])
def test_a_block_that_is_two_percent_too_strong_ends_the_run_in_bf16(name, tmp_path, monkeypatch):
    row = BY_NAME[name]
    ends_with_a_stronger_block(make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path), monkeypatch)


def test_it_is_found_on_flash_attn_too_whose_kernels_take_16_bits_only(tmp_path, monkeypatch):
    row, memory = BY_NAME["z-image"], MemoryOptions(attention="flash-attn")
    with installed("2", dtypes=(torch.bfloat16, torch.float16)) as kernels:
        trainer = make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path, memory=memory)
        kernels["2"].calls.clear()
        ends_with_a_stronger_block(trainer, monkeypatch)
        assert kernels["2"].calls


def ends_with_a_stronger_block(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends where each block's output is 2 % too large, and passes the same check without that."""
    forward = NativeBlock.forward

    def stronger(self: NativeBlock, *args: Any) -> Any:
        out = forward(self, *args)
        return 1.02 * out if isinstance(out, torch.Tensor) else tuple(1.02 * one for one in out)

    with monkeypatch.context() as patched:
        patched.setattr(NativeBlock, "forward", stronger)
        with pytest.raises(ValueError, match="whose output is .* different when it runs for training"):
            trainer.run()
    trainer.run()
    assert trainer.placed.checks.forward_done
    trainer.close()


def test_one_block_of_twelve_that_adds_two_percent_too_much_ends_the_run(tmp_path):
    """Whichever it is, as docs/models.md has it."""
    row = replace(BY_NAME["z-image"], unet={**BY_NAME["z-image"].unet, "n_layers": 12})
    trainer = make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path)
    inputs = batch_of(trainer, 0).inputs
    blocks = [block for name, block in trainer.placed.transformer.blocks() if name.startswith("layers.")]
    assert len(blocks) == 12
    for block in (blocks[0], blocks[6], blocks[11]):
        with adding_more(block), pytest.raises(ValueError, match="whose output is .* different when it runs for train"):
            trainer.placed.check_forward(inputs)
    trainer.placed.check_forward(inputs)
    trainer.close()
