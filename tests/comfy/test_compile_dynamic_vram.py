"""A MODEL under ComfyUI's dynamic VRAM. ComfyUI makes none on a CPU, so the class only says that it is one; reloading,
cloning and sampling are the real ones."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from comfy.model_patcher import ModelPatcher
from tessera.compile.attach import compile_model, compiled_model_of
from tessera.compile.settings import CompileSettings
from tiny.sampling import sample

SETTINGS = CompileSettings(backend="eager")


class UnderDynamicVram(ModelPatcher):
    def is_dynamic(self) -> bool:
        return True


@pytest.fixture
def dynamic(tiny_files: dict[str, Path]) -> Any:
    model = tiny.load_model("flux", tiny_files["flux"])
    model.__class__ = UnderDynamicVram
    return model


def test_it_is_loaded_once_more_without_dynamic_vram_and_only_once(dynamic: Any) -> None:
    clone, compiled_model = compile_model(dynamic, SETTINGS)
    assert not clone.is_dynamic() and clone.model is not dynamic.model
    assert [note for note in compiled_model.notes if "dynamic VRAM" in note and "without it" in note]
    again, other = compile_model(dynamic.clone(), SETTINGS)
    assert again.model is clone.model and other is compiled_model
    assert torch.equal(sample(again, "flux"), sample(dynamic, "flux"))
    assert compiled_model.report().counts().graphs == 2


def test_its_loras_come_along(dynamic: Any) -> None:
    import comfy.sd

    width = dynamic.model.diffusion_model.double_blocks[0].img_attn.proj.weight.shape[0]
    key = "diffusion_model.double_blocks.0.img_attn.proj"
    generator = torch.Generator().manual_seed(0)
    lora = {
        f"{key}.lora_down.weight": torch.randn(4, width, generator=generator),
        f"{key}.lora_up.weight": torch.randn(width, 4, generator=generator),
    }
    with_lora, _ = comfy.sd.load_lora_for_models(dynamic, None, lora, 1.0, 0.0)
    clone, _ = compile_model(with_lora, SETTINGS)
    assert torch.equal(sample(clone, "flux"), sample(with_lora, "flux"))
    assert not torch.equal(sample(clone, "flux"), sample(dynamic, "flux"))


def of_another_node(path: str) -> Any:
    """A loader that cannot be asked for a MODEL without dynamic VRAM."""
    raise AssertionError("asked all the same")


@pytest.mark.parametrize("loader", [None, (of_another_node, ("flux.safetensors",))])
def test_where_it_cannot_be_loaded_again_it_runs_eager_and_says_so(dynamic: Any, loader: Any) -> None:
    dynamic.cached_patcher_init = loader
    clone, compiled_model = compile_model(dynamic, SETTINGS)
    assert torch.equal(sample(clone, "flux"), sample(dynamic, "flux"))
    (note,) = [note for note in compiled_model.notes if "dynamic VRAM" in note]
    assert "runs eager" in note and "Load Diffusion Model" in note
    assert compiled_model_of(clone) is compiled_model and compiled_model.report().counts().graphs == 0
