"""LoRA files of Wan in the programs that read them: ComfyUI and diffusers get the same delta W from each format.

Which diffusers module is which is diffusers' own converter of checkpoints, not our table.
"""

import logging

import comfy.model_management
import comfy.sd
import pytest
import tiny
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel
from tiny.lora_files import assert_same_deltas, delta, loaded_in_comfyui, patched_deltas, random_updates
from tiny.runs import train, training_data
from tiny.wan_core import core_velocity, padded_text, tokens_of

VARIANTS = tuple(tiny.WAN_CHANNELS)
# Linears outside of the blocks, and in a block.
OUTSIDE, INSIDE = 6, 10


@pytest.fixture(params=VARIANTS)
def variant(request) -> str:
    return request.param


@pytest.fixture
def wan(variant, tmp_path):
    return tiny.load_wan(tiny.write_wan(tmp_path / "wan.safetensors", variant=variant))


@pytest.fixture
def modules(wan, variant):
    """A random update with an alpha of its own for every Linear of the model."""
    updates = random_updates(wan)
    assert len(updates) == OUTSIDE + 2 * INSIDE + (2 + 2 * 2 if variant == "2.1-i2v" else 0)
    return updates


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_comfyui_loads_every_key_and_gets_the_same_update(wan, modules, tmp_path, caplog, layout):
    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(modules), layout, "fp32")
    patched = loaded_in_comfyui(wan, load_file(tmp_path / "a.safetensors"), caplog)
    assert_same_deltas(patched_deltas(wan, patched), modules, 1e-5)


def diffusers_model(wan, variant):
    """diffusers' Wan of the same size with the weights of the tiny one."""
    core = wan.model.diffusion_model
    with_image = variant == "2.1-i2v"
    transformer = WanTransformer3DModel(
        num_attention_heads=core.num_heads,
        in_channels=core.in_dim,
        out_channels=core.out_dim,
        text_dim=core.text_embedding[0].in_features,
        ffn_dim=core.ffn_dim,
        num_layers=len(core.blocks),
        image_dim=1280 if with_image else None,
        added_kv_proj_dim=core.dim if with_image else None,
    )
    weights = {name: tensor.clone() for name, tensor in core.state_dict().items()}
    transformer.load_state_dict(convert_wan_transformer_to_diffusers(weights))
    return transformer.requires_grad_(False)


def velocities(wan, variant, transformer):
    """One forward of ComfyUI's Wan and of diffusers' on the same inputs, (1, N, 4·C) each; 5B with a clean frame."""
    # diffusers takes the last 512 tokens of the context for the text.
    sample = tiny.wan_sample("one", (2, 2, 3), variant, text_length=512, clean_frames=int(variant == "2.2-5b"))
    read, sigma = sample.load(), 0.6
    comfy.model_management.load_models_gpu([wan], force_full_load=True)
    x, timestep, image = read.latent[None], torch.tensor([1000 * sigma]), None
    with torch.no_grad():
        ours = core_velocity(wan, sample, sigma)
        if sample.clean_frames:
            timestep = torch.tensor([[0.0] * 6 + [1000 * sigma] * 6])
        if "concat_latent_image" in read.conditioning:
            picture = wan.model.process_latent_in(read.conditioning["concat_latent_image"])
            x = torch.cat((x, 1 - read.conditioning["concat_mask"].repeat(1, 4, 1, 1, 1), picture), dim=1)
        if variant == "2.1-i2v":
            image = read.conditioning["clip_vision_output"].penultimate_hidden_states
        theirs = transformer(x, timestep, padded_text(sample), image).sample
    return ours, tokens_of(theirs[0]).flatten(0, 1)[None]


def test_diffusers_with_peft_loads_every_key_and_runs_as_comfyui_does(wan, variant, modules, tmp_path, caplog):
    transformer = diffusers_model(wan, variant)
    base, base_there = velocities(wan, variant, transformer)
    assert (base - base_there).norm() < 1e-4 * base.norm()

    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(modules), "diffusers", "fp32")
    state = WanLoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"))
    with caplog.at_level(logging.WARNING):
        transformer.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []

    expected = convert_wan_transformer_to_diffusers({f"{n}.weight": delta(part) for n, part in modules.items()})
    layers = {name: layer for name, layer in transformer.named_modules() if hasattr(layer, "get_delta_weight")}
    assert {f"{name}.weight" for name in layers} == expected.keys()
    for name, layer in layers.items():
        wanted = expected[f"{name}.weight"]
        assert (layer.get_delta_weight("a").double() - wanted).norm() <= 1e-5 * wanted.norm(), name

    patched, _ = comfy.sd.load_lora_for_models(wan, None, LoraModel.from_modules(modules), 1.0, 0.0)
    try:
        here, there = velocities(patched, variant, transformer)
    finally:
        patched.detach()
    assert (here - base).norm() > 0.1 * base.norm()
    assert (here - there).norm() < 1e-4 * (here - base).norm()


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
def test_diffusers_reads_a_lora_of_the_default_targets_in_the_other_formats_too(
    wan, variant, modules, tmp_path, layout
):
    blocks = {name: part for name, part in modules.items() if name.startswith("blocks.")}
    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(blocks), layout, "fp32")
    state = WanLoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"))
    expected = convert_wan_transformer_to_diffusers({f"{n}.weight": delta(part) for n, part in blocks.items()})
    assert len(state) == 2 * len(expected)
    for name, wanted in expected.items():
        key = f"transformer.{name.removesuffix('.weight')}"
        found = state[f"{key}.lora_B.weight"].double() @ state[f"{key}.lora_A.weight"].double()
        assert (found - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_a_trained_file_says_what_musubi_tuner_says_and_holds_the_default_targets(wan, variant, tmp_path):
    result = train(wan, training_data(tiny.wan_sample("one", (2, 2, 2), variant)), tmp_path, steps=2, save_every=0)
    with safe_open(result.path, "pt") as file:
        header, keys = file.metadata(), set(file.keys())
    version = "2.2" if variant == "2.2-5b" else "2.1"
    assert header["modelspec.architecture"] == f"wan{version}/lora"
    assert (header["ss_base_model_version"], header["ss_network_module"]) == ("wan", "networks.lora_wan")
    linears = [n for n, m in wan.model.diffusion_model.named_modules() if isinstance(m, torch.nn.Linear)]
    flat = {f"lora_unet_{n.replace('.', '_')}" for n in linears if n.startswith("blocks.")}
    assert keys == {f"{name}.{part}" for name in flat for part in ("lora_down.weight", "lora_up.weight", "alpha")}
