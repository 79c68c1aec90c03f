"""The first check of a run: it passes on every variant of a family, and finds a block that differs from ComfyUI's."""

from typing import Any

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from family_cases import cases, every_case
from tessera.models.flux.blocks import DoubleBlock
from tiny.memory.flash_attn import installed
from tiny.models.family_case import computing_in
from tiny.train.runs import Watcher, cancel_at, train, training_data
from tiny.train.training import adding_more, make_trainer

FIRST = {case.family: case for case in reversed(cases("swap"))}


def checked(case: Any, file: Any, folder: Any, dtype: torch.dtype = torch.float32, **memory: Any) -> Any:
    """A trainer that has made its check; memory: of MemoryOptions."""
    from tessera.train.config.settings import MemoryOptions

    model = computing_in(case.load(file), dtype)
    data = training_data(*case.batches()[case.main_batches[-1]]())
    trainer = make_trainer(model, data, folder, memory=MemoryOptions(checkpointing="none", **memory))
    try:
        trainer.placed.check_forward(None)
    finally:
        trainer.close()
    return trainer


@every_case()
def test_every_variant_passes_in_fp32_and_in_bf16_swapped(case_file, tmp_path, case):
    checked(case, case_file(case), tmp_path)
    checked(case, case_file(case, dtype=torch.bfloat16), tmp_path, torch.bfloat16, blocks_to_swap=1)


@every_case("swap")
def test_a_block_that_is_two_percent_too_strong_ends_the_run(case_file, tmp_path, monkeypatch, case):
    """Of the training forward, and of a ComfyUI that computes otherwise; in bf16, whose rounding is as much."""
    file = case_file(case, dtype=torch.bfloat16)
    model = computing_in(case.load(file), torch.bfloat16)
    trainer = make_trainer(model, training_data(*case.batches()["shapes"]()), tmp_path)
    wrong = "gives an output that is .* different from that of ComfyUI .* on the same weights, so its LoRA would be"
    blocks = [block for _, block in trainer.placed.weights.transformer.blocks()]
    forward = type(blocks[0]).forward
    core = type(next(iter(_core_blocks(model, trainer))))
    core_forward = core.forward
    for place, name, whole in ((type(blocks[0]), "forward", forward), (core, "forward", core_forward)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, _stronger(whole))
            with pytest.raises(ValueError, match=wrong):
                trainer.run()
        assert trainer.progress.step == 0
    trainer.placed.check_forward(None)
    trainer.close()


@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
def test_a_stronger_block_is_found_on_flash_attn_too_whose_kernels_take_16_bits_only(
    case_file, tmp_path, monkeypatch, case
):
    """In bf16 alone 2 % would be within its rounding; the fp32 part runs on torch's attention."""
    from tessera.train.config.settings import MemoryOptions

    model = computing_in(case.load(case_file(case, dtype=torch.bfloat16)), torch.bfloat16)
    data = training_data(*case.batches()["shapes"]())
    with installed("2", dtypes=(torch.bfloat16, torch.float16)) as kernels:
        trainer = make_trainer(model, data, tmp_path, memory=MemoryOptions(attention="flash-attn"))
        kernels["2"].calls.clear()
        trainer.placed.check_forward(None)
        assert kernels["2"].calls
        block = type(trainer.placed.weights.transformer.blocks()[0][1])
        monkeypatch.setattr(block, "forward", _stronger(block.forward))
        trainer.placed.checks.forward_done = False
        with pytest.raises(ValueError, match="gives an output that is .* different from that of ComfyUI"):
            trainer.placed.check_forward(None)
        trainer.close()


def test_one_block_of_twelve_that_adds_two_percent_too_much_ends_the_run(case_file, tmp_path):
    """Whichever it is, as docs/models.md has it."""
    case = FIRST["wan"]
    model = computing_in(case.load(case_file(case, dtype=torch.bfloat16, layers=12)), torch.bfloat16)
    trainer = make_trainer(model, training_data(*case.batches()["shapes"]()), tmp_path)
    blocks = [block for _, block in trainer.placed.weights.transformer.blocks()]
    assert len(blocks) == 12
    for block in (blocks[0], blocks[6], blocks[11]):
        with adding_more(block), pytest.raises(ValueError, match="gives an output that is .* different from that of"):
            trainer.placed.check_forward(None)
    trainer.placed.check_forward(None)
    trainer.close()


def test_a_resumed_run_is_checked_again(case_file, tmp_path, monkeypatch):
    """ComfyUI or the pack may be another by then."""
    case = FIRST["flux"]
    model, data = case.load(case_file(case)), training_data(*case.batches()["shapes"]())
    with pytest.raises(InterruptProcessingException):
        train(model, data, tmp_path, cancel_at(1), steps=3)
    watcher = Watcher()
    with monkeypatch.context() as patched:
        patched.setattr(DoubleBlock, "forward", _stronger(DoubleBlock.forward))
        with pytest.raises(ValueError, match="gives an output that is .* different from that of ComfyUI"):
            train(model, data, tmp_path, watcher, steps=3)
    assert "Resumed at step 1." in watcher.notes and not watcher.losses
    assert train(model, data, tmp_path, steps=3).summary["steps"] == 3


def _core_blocks(model: Any, trainer: Any) -> Any:
    return (model.model.diffusion_model.get_submodule(name) for name, _ in trainer.placed.weights.transformer.blocks())


def _stronger(forward: Any) -> Any:
    """Give each output of a block 2 % too large."""

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        return 1.02 * out if isinstance(out, torch.Tensor) else tuple(1.02 * tensor for tensor in out)

    return wrong
