"""A MODEL that is loaded without dynamic VRAM while it is on has its weights as its loader was asked for them."""

import comfy.memory_management
import comfy.sd
import pytest
import torch
from safetensors.torch import load_file
from tessera.common.fingerprint import weights_fingerprint
from tessera.memory.weights.dynamic_vram import cast_as_asked

FP8 = torch.float8_e4m3fn


@pytest.fixture
def lazily_loaded(tiny_files, monkeypatch):
    """Core's Linear as it loads where dynamic VRAM is on: it takes the file's own tensors."""
    weights = load_file(tiny_files["flux"])
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": FP8}, disable_dynamic=True)


def dtypes(patcher):
    return {name: p.dtype for name, p in patcher.model.diffusion_model.named_parameters()}


def test_weights_are_cast_to_the_dtype_that_was_asked_for(lazily_loaded, tiny_files, monkeypatch):
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", False)
    expected = comfy.sd.load_diffusion_model(
        str(tiny_files["flux"]), model_options={"dtype": FP8}, disable_dynamic=True
    )
    assert dtypes(lazily_loaded) != dtypes(expected)
    cast_as_asked(lazily_loaded.model)
    assert dtypes(lazily_loaded) == dtypes(expected)
    reference = dict(expected.model.diffusion_model.named_parameters())
    for name, mine in lazily_loaded.model.diffusion_model.named_parameters():
        assert torch.equal(mine.float(), reference[name].float()), name


def test_a_model_has_one_fingerprint_however_it_was_loaded(lazily_loaded, tiny_files, monkeypatch):
    fingerprint = weights_fingerprint(lazily_loaded)
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", False)
    plain = comfy.sd.load_diffusion_model(str(tiny_files["flux"]), model_options={"dtype": FP8}, disable_dynamic=True)
    assert weights_fingerprint(plain) == fingerprint
    other = comfy.sd.load_diffusion_model(str(tiny_files["flux"]), disable_dynamic=True)
    assert weights_fingerprint(other) != fingerprint
