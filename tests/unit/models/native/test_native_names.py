"""LoRA names by rule, of models that no family has a table of."""

from typing import Any

import comfy.model_base
import comfy.supported_models
import pytest
from tessera.models.name_table import flat_name
from tessera.models.native.names import names_of, origin_of

UNET = [
    "time_embed.0",
    "label_emb.0.2",
    "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
    "input_blocks.4.1.transformer_blocks.1.ff.net.0.proj",
    "input_blocks.4.0.in_layers.2",
    "output_blocks.11.0.skip_connection",
]


def test_every_name_comes_back_from_its_flat_form():
    table = names_of(UNET)
    assert [table.native(flat_name(name)) for name in UNET] == UNET
    assert table.native("input_blocks_7_1_transformer_blocks_9_attn1_to_q") is not None  # a block that it lacks
    assert table.native("input_blocks_4_1_transformer_blocks_0_attn1_to_k") is None
    assert all(table.diffusers(name) == () for name in UNET)


@pytest.mark.parametrize("names", [["a.b_1", "a.b.2"], ["a.b.2", "a.b_1"], ["time.linear_1", "time.linear.2.3"]])
def test_a_number_behind_an_underscore_is_told_from_one_behind_a_dot(names):
    table = names_of(names)
    assert [table.native(flat_name(name)) for name in names] == names


def test_two_modules_of_one_flat_name_are_refused_by_name():
    with pytest.raises(ValueError, match=r"a\.b_c and a_b\.c"):
        names_of(["a.b_c", "a_b.c"])
    names_of(["a.b", "a.b"])


EPS, V = comfy.model_base.ModelType.EPS, comfy.model_base.ModelType.V_PREDICTION


@pytest.mark.parametrize(
    ("kind", "config", "model_type", "expected"),
    [
        ("SDXL", "SDXL", EPS, ("stable-diffusion-xl-v1-base", "sdxl_base_v1-0")),
        ("BaseModel", "SD15", EPS, ("stable-diffusion-v1", "sd_v1")),
        ("BaseModel", "SD20", EPS, ("stable-diffusion-v2-512", "sd_v2")),
        ("BaseModel", "SD20", V, ("stable-diffusion-v2-768-v", "sd_v2_v")),
        ("Krea2", "Krea2", comfy.model_base.ModelType.FLUX, ("krea-2", "")),
    ],
)
def test_metadata_calls_a_model_what_kohyas_scripts_call_it(kind, config, model_type, expected):
    model: Any = object.__new__(getattr(comfy.model_base, kind))
    config_class = getattr(comfy.supported_models, config)
    sizes = {"num_res_blocks": [2]} if config != "Krea2" else {}
    object.__setattr__(model, "model_config", config_class({**config_class.unet_config, **sizes}))
    object.__setattr__(model, "model_type", model_type)
    origin = origin_of(model, "krea-2")
    assert (origin.architecture, origin.kohya_version) == expected and origin.implementation
