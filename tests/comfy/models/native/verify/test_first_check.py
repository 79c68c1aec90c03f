"""The first check of a run on ComfyUI's own forward sees what bf16's rounding hides."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tessera.models.native.comfyui.refusals import refusal
from tessera.models.native.forward.blocks import NativeBlock
from tessera.train.config.settings import MemoryOptions
from tiny.memory.flash_attn import installed
from tiny.native import ROWS, build, data_of
from tiny.native.step import batch_of
from tiny.train.runs import mixed_data
from tiny.train.training import adding_more, make_trainer

BY_NAME = {row.name: row for row in ROWS}


@pytest.mark.parametrize("name", ["z-image", "sd1.5", "minimax-h3", "ltx-2.3", "krea-2"])
def test_a_block_that_is_two_percent_too_strong_ends_the_run_in_bf16(name, tmp_path, monkeypatch):
    row = BY_NAME[name]
    ends_with_a_stronger_block(make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path), monkeypatch)


def test_a_stronger_block_is_found_on_flash_attn_too_whose_kernels_take_16_bits_only(tmp_path, monkeypatch):
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
        return 1.02 * out if isinstance(out, torch.Tensor) else tuple(1.02 * tensor for tensor in out)

    with monkeypatch.context() as patched:
        patched.setattr(NativeBlock, "forward", stronger)
        with pytest.raises(ValueError, match="whose output is .* different when it runs for training"):
            trainer.run()
    trainer.run()
    assert trainer.placed.checks.forward_done
    trainer.close()


def test_kernels_that_training_can_t_use_are_named(tmp_path, monkeypatch):
    """A mask beside flash-attn, and a kernel that the model asks for itself."""
    from comfy.ldm.cogvideo.model import CogVideoXBlock
    from comfy.ldm.modules import attention

    kernel = SimpleNamespace(function=attention.attention_sub_quad)

    def asking(self: Any, hidden_states: Any, encoder_hidden_states: Any, **_: Any) -> Any:
        x = hidden_states
        out = attention.optimized_attention(self.q(x), self.k(x), self.v(x), 1, preferred_attention=kernel)
        return x + out, encoder_hidden_states

    monkeypatch.setattr(CogVideoXBlock, "forward", asking)
    names = {"flash-attn": "ltx-video", "auto": "cogvideox"}
    notes: dict[str, list[str]] = {}
    with installed("2", dtypes=(torch.bfloat16, torch.float16)):
        for choice, name in names.items():
            memory = MemoryOptions(attention=choice)
            trainer = make_trainer(
                build(BY_NAME[name], torch.bfloat16), data_of(BY_NAME[name]), tmp_path, memory=memory
            )
            with torch.no_grad(), monkeypatch.context() as patched:
                notes[choice] = []
                patched.setattr(trainer.observer, "note", notes[choice].append, raising=False)
                trainer.placed.check_forward(batch_of(trainer).inputs)
            trainer.close()
    (masked,), (preferred,) = notes.values()
    assert masked.startswith("LTX-Video masks or scales some of its attention, which the attention chosen on Training")
    assert preferred.startswith("CogVideoX asks for attention_sub_quad in ComfyUI, which can't be used for training")


@pytest.mark.parametrize("layer", ["NativeLinear", "NativeConv", "PlacedLinear"])
def test_a_layer_called_in_another_way_is_named_with_the_version_of_comfyui(layer):
    error = TypeError(f"{layer}.forward() got an unexpected keyword argument 'scale'")
    assert "model calls its layers of ComfyUI" in str(refusal(error, None))


def test_a_forward_of_comfyui_s_that_fails_beside_our_own_is_named_with_its_version(tmp_path, tiny_flux, monkeypatch):
    from comfy.ldm.flux.model import Flux

    def reading(self: Any, *_: Any, transformer_options: Any, **__: Any) -> Any:
        return transformer_options["new"]

    monkeypatch.setattr(Flux, "forward", reading)
    trainer = make_trainer(tiny_flux, mixed_data(), tmp_path)
    with pytest.raises(ValueError, match=r"^model reads 'new' in ComfyUI [\d.]+, which Train LoRA doesn't set"):
        trainer.run()
    trainer.close()


def test_one_block_of_twelve_that_adds_two_percent_too_much_ends_the_run(tmp_path):
    """Whichever it is, as docs/models.md has it."""
    row = replace(BY_NAME["z-image"], unet={**BY_NAME["z-image"].unet, "n_layers": 12})
    trainer = make_trainer(build(row, torch.bfloat16), data_of(row), tmp_path)
    inputs = batch_of(trainer, 0).inputs
    blocks = [block for name, block in trainer.placed.weights.transformer.blocks() if name.startswith("layers.")]
    assert len(blocks) == 12
    for block in (blocks[0], blocks[6], blocks[11]):
        with adding_more(block), pytest.raises(ValueError, match="whose output is .* different when it runs for train"):
            trainer.placed.check_forward(inputs)
    trainer.placed.check_forward(inputs)
    trainer.close()
