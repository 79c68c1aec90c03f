"""The names of Chroma's modules are those of diffusers' model, and its approximator is in no LoRA."""

import json

import comfy.utils
import pytest
import torch
from family_cases import CASES
from family_cases.chroma import diffusers_model
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import choose_targets
from tessera.models.blocks import linear_shapes
from tessera.models.catalogue.registry import family_of, table_of
from tessera.models.chroma.names import CHROMA_NAMES
from tessera.models.flux.names import FLUX1_NAMES
from tiny.lora.lora_files import assert_same_deltas, loaded_in_comfyui, patched_deltas, random_updates
from tiny.models.chroma import APPROXIMATOR

CASE = CASES["chroma"]


@pytest.fixture
def model(case_file):
    return CASE.load(case_file(CASE))


def test_every_linear_of_diffusers_model_has_a_name(model):
    names = list(linear_shapes(model.model))
    linears = {n for n, m in diffusers_model(model).named_modules() if isinstance(m, torch.nn.Linear)}
    assert {part for name in names for part in CHROMA_NAMES.diffusers(name)} == linears
    for name in names:
        flat = name.replace(".", "_")
        assert CHROMA_NAMES.native(flat) == name
        assert (FLUX1_NAMES.native(flat) == name) is not name.startswith(APPROXIMATOR)


def test_a_file_without_metadata_may_be_flux1s_whose_blocks_have_the_same_names():
    modules = {"double_blocks_0_img_attn_qkv": None}
    assert table_of(modules) is FLUX1_NAMES and table_of(modules, "chroma") is CHROMA_NAMES


@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_comfyui_reads_a_file_that_says_it_is_chromas(model, tmp_path, caplog, layout):
    updates = {name: part for name, part in random_updates(model).items() if not name.startswith(APPROXIMATOR)}
    lora = LoraModel.from_modules(updates, {"tessera": json.dumps({"family": "chroma"})})
    assert lora.table() is CHROMA_NAMES
    save_lora(tmp_path / "a.safetensors", lora, layout, "fp32")
    tensors = comfy.utils.load_torch_file(str(tmp_path / "a.safetensors"), safe_load=True)
    assert_same_deltas(patched_deltas(model, loaded_in_comfyui(model, tensors, caplog)), updates, 1e-5)


def test_the_approximator_is_trained_by_no_pattern(model):
    family = family_of(model)
    names = choose_targets(family, model.model, NetworkOptions(include=("*",)))
    assert names == [name for name in linear_shapes(model.model) if not name.startswith(APPROXIMATOR)]
    with pytest.raises(ValueError, match="matches no layer of this model"):
        choose_targets(family, model.model, NetworkOptions(include=(f"{APPROXIMATOR}.*",)))
