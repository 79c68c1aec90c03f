"""A MODEL under ComfyUI's dynamic VRAM. ComfyUI makes none on a CPU, so the class only says that it is one; reloading,
cloning and sampling are the real ones."""

import gc
import weakref
from pathlib import Path
from typing import Any

import comfy.model_patcher
import comfy.sd
import pytest
import tiny
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from tessera.common.core import quantised_data
from tessera.compile.attach import compile_model, compiled_model_of
from tessera.compile.settings import CompileSettings
from tessera.memory.low_bit.quantize import quantize_of, quantize_weights
from tessera.models.catalogue.swapped_model import SwapSettings, swap
from tessera.nodes.model import model_file
from thinned import one_in
from tiny.models.sampling import sample

SETTINGS = CompileSettings(backend="eager")


class UnderDynamicVram(ModelPatcher):
    def is_dynamic(self) -> bool:
        return True


@pytest.fixture
def dynamic(tiny_files: dict[str, Path]) -> Any:
    model = tiny.load_model("flux", tiny_files["flux"])
    model.__class__ = UnderDynamicVram
    return model


def test_a_model_is_loaded_once_more_without_dynamic_vram_and_only_once(dynamic: Any) -> None:
    clone, compiled_model = compile_model(dynamic, SETTINGS)
    assert not clone.is_dynamic() and clone.model is not dynamic.model
    assert [note for note in compiled_model.notes if "dynamic VRAM" in note and "without it" in note]
    reloaded, other = compile_model(dynamic.clone(), SETTINGS)
    assert reloaded.model is clone.model and other is compiled_model
    assert torch.equal(sample(reloaded, "flux"), sample(dynamic, "flux"))
    assert compiled_model.report().counts().graphs == 2


@pytest.mark.parametrize("storage", one_in(2, ["int8 rotated", "fp8"]))
def test_a_file_of_8_bit_samples_as_before(storage: str, tmp_path: Path) -> None:
    path = tiny.write_flux(tmp_path / "flux.safetensors", quantised=storage)
    with torch.inference_mode():  # as a node loads it
        model = comfy.sd.load_diffusion_model(str(path))
    model.__class__ = UnderDynamicVram
    clone, _ = compile_model(model, SETTINGS)
    assert clone.model is not model.model and torch.equal(sample(clone, "flux"), sample(model, "flux"))


def test_the_loras_of_a_reloaded_model_come_along(dynamic: Any) -> None:
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


@pytest.mark.parametrize("first", ["compile", "swap"])
def test_a_model_put_into_8_bit_is_loaded_once_more_of_the_same_bytes(
    first: str, tiny_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", UnderDynamicVram)
    counts: list[int] = []

    def counted(*args: Any) -> Any:
        result = quantize_weights(*args)
        counts.append(result.count)
        return result

    monkeypatch.setattr(model_file, "quantize_weights", counted)
    with torch.inference_mode():
        model, _ = model_file.open_quantized(str(tiny_files["flux"]), {}, "int8", True)
    assert model.is_dynamic() and quantize_of(model.clone()) == "int8"
    settings = SwapSettings(blocks_to_swap=2)
    makers = [lambda: compile_model(model.clone(), SETTINGS)[0], lambda: swap(model.clone(), settings)[0]]
    clones = [make() for make in (makers if first == "compile" else makers[::-1])]
    assert clones[0].model is clones[1].model is not model.model
    assert len(counts) == 1 and counts[0] > 8
    assert all(not clone.is_dynamic() and quantize_of(clone) == "int8" for clone in clones)
    assert torch.equal(sample(clones[0], "flux"), sample(model, "flux"))


def test_the_second_model_in_8_bit_is_no_second_copy(
    tiny_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfy.model_patcher, "CoreModelPatcher", UnderDynamicVram)
    with torch.inference_mode():
        model, _ = model_file.open_quantized(str(tiny_files["flux"]), {}, "int8", True)
    clone, _ = compile_model(model, SETTINGS)
    parameters = dict(model.model.diffusion_model.named_parameters())
    count = 0
    for name, weight in clone.model.diffusion_model.named_parameters():
        if isinstance(weight, QuantizedTensor):
            assert quantised_data(weight).data_ptr() == quantised_data(parameters[name]).data_ptr(), name
            count += 1
    assert count > 8
    freed = weakref.ref(model.model)
    del model, clone, parameters, weight  # a clone holds what it was cloned of
    gc.collect()
    assert freed() is None and not model_file._loaded_of


def load_elsewhere(path: str) -> Any:
    """A loader that cannot be asked for a MODEL without dynamic VRAM."""
    raise AssertionError("asked all the same")


@pytest.mark.parametrize("loader", [None, (load_elsewhere, ("flux.safetensors",))])
def test_a_model_that_cannot_be_loaded_again_runs_eager_and_says_so(dynamic: Any, loader: Any) -> None:
    dynamic.cached_patcher_init = loader
    clone, compiled_model = compile_model(dynamic, SETTINGS)
    assert torch.equal(sample(clone, "flux"), sample(dynamic, "flux"))
    (note,) = [note for note in compiled_model.notes if "dynamic VRAM" in note]
    assert "runs uncompiled" in note and "Load Diffusion Model" in note
    assert compiled_model_of(clone) is compiled_model and compiled_model.report().counts().graphs == 0
