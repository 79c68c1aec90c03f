"""The first check of a run on ComfyUI's own forward sees what bf16's rounding hides."""

from typing import Any

import pytest
import torch
from tessera.models.native.blocks import NativeBlock
from tiny.native import ROWS, build, data_of
from tiny.training import make_trainer

BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize("name", ["z-image", "sd1.5", "minimax-h3", "ltx-2.3", "krea-2"])
def test_a_block_that_is_two_percent_too_strong_ends_the_run_in_bf16(name, tmp_path, monkeypatch):
    row = BY_NAME[name]
    trainer = make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path)
    forward = NativeBlock.forward

    def stronger(self: NativeBlock, *args: Any) -> Any:
        out = forward(self, *args)
        return 1.02 * out if isinstance(out, torch.Tensor) else tuple(1.02 * one for one in out)

    with monkeypatch.context() as patched:
        patched.setattr(NativeBlock, "forward", stronger)
        with pytest.raises(ValueError, match="whose output is .* different when it runs for training"):
            trainer.run()
    trainer.run()  # without the fault the same check passes
    assert trainer.placed.checks.forward_done
    trainer.close()
