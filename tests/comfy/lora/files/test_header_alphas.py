"""Files whose header holds the alphas: diffusers saves them, and its update is that of Load LoRA File."""

import json

import pytest
import torch
from diffusers.training_utils import _collate_lora_metadata
from family_cases import CASES
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.lora.files.header import PEFT_FIELD, with_header_alphas
from tessera.lora.files.loading import load_lora
from tessera.models.catalogue.registry import family_of
from tiny.models.family_case import relative_error

PART = "transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize("rslora", [False, True])
def test_alphas_of_the_header_are_those_of_diffusers(case_file, tmp_path, rslora):
    case = CASES["qwen-image"]
    model, kit = case.load(case_file(case)), case.diffusers()
    transformer = kit.build(model)
    pattern = {"rank_pattern": {PART: 2}, "alpha_pattern": {PART: 1}}
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=24, target_modules=targets, use_rslora=rslora, **pattern))
    layers = {name: layer for name, layer in transformer.named_modules() if hasattr(layer, "get_delta_weight")}
    for number, layer in enumerate(layers.values()):
        torch.nn.init.normal_(layer.lora_B["default"].weight, generator=torch.Generator().manual_seed(number))
    kit.mixin.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        **_collate_lora_metadata({"transformer": transformer}),
    )
    path = tmp_path / "pytorch_lora_weights.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    lora, notes = load_lora(load_file(path), metadata, family_of(model), model.model, "lora_file: a")
    assert PEFT_FIELD not in lora.metadata and any(f"an alpha for {len(layers)} layers" in note for note in notes)
    deltas = {f"{n}.weight": m.alpha / m.rank * (m.up.double() @ m.down.double()) for n, m in lora.modules().items()}
    rows = kit.rows(model, deltas)
    for name, layer in layers.items():
        assert relative_error(rows[f"{name}.weight"], layer.get_delta_weight("default").detach()) < 1e-6, name


@pytest.mark.parametrize(
    "header",
    [
        "[" * 5000,
        "[]",
        '{"transformer.lora_alpha": 1e999}',
        f'{{"transformer.lora_alpha": 1{"0" * 400}}}',
        '{"transformer.lora_alpha": 1e300}',
        '{"transformer.lora_alpha": true}',
        '{"transformer.lora_alpha": "8"}',
        '{"unet.lora_alpha": 8}',
        '{"transformer.alpha_pattern": {"(a+)+$": 8}}',
        '{"transformer.alpha_pattern": 8}',
        '{"transformer.lora_alpha": 2}',
    ],
)
def test_headers_that_say_nothing_change_nothing(header):
    down, up = torch.ones(2, 4), torch.ones(4, 2)
    tensors = {"transformer.a.lora_A.weight": down, "transformer.a.lora_B.weight": up}
    assert with_header_alphas(tensors, {PEFT_FIELD: header}) == (tensors, 0)


def test_an_alpha_of_the_file_goes_before_that_of_its_header():
    tensors = {"transformer.a.lora_A.weight": torch.ones(2, 4), "transformer.a.alpha": torch.tensor(1.0)}
    assert with_header_alphas(tensors, {PEFT_FIELD: json.dumps({"transformer.lora_alpha": 8})}) == (tensors, 0)
