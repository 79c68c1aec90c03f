"""diffusers' names of models that no family of ours claims, against diffusers' own classes and loaders."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import MODULES, LoraModel
from tessera.models.native.names import native_names
from tiny.lora.lora_files import delta, random_updates
from tiny.native import ROWS, build
from torch import nn

BY_NAME = {row.name: row for row in ROWS}


def z_image(d: Any) -> Any:
    sizes = {"dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    return d.ZImageTransformer2DModel(axes_dims=[8, 12, 12], **sizes)


def krea_2(d: Any) -> Any:
    sizes = {"num_layers": 2, "num_text_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return d.Krea2Transformer2DModel(attention_head_dim=32, axes_dims_rope=(8, 12, 12), **sizes)


def sd_3_5(d: Any) -> Any:
    return d.SD3Transformer2DModel(
        num_layers=2, num_attention_heads=2, caption_projection_dim=128, dual_attention_layers=(0,), qk_norm="rms_norm"
    )


def auraflow(d: Any) -> Any:
    sizes = {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "num_attention_heads": 2}
    return d.AuraFlowTransformer2DModel(attention_head_dim=32, caption_projection_dim=64, **sizes)


def pixart(d: Any, conditions: bool = True) -> Any:
    return d.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=36,
        cross_attention_dim=72,
        num_layers=2,
        caption_channels=48,
        use_additional_conditions=conditions,
    )


def hunyuan_video(d: Any, **sizes: Any) -> Any:
    sizes = {"num_layers": 2, "num_refiner_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32} | sizes
    return getattr(d, sizes.pop("kind", "HunyuanVideoTransformer3DModel"))(**sizes, mlp_ratio=2.0)


THEIRS: dict[str, Callable[[Any], Any]] = {
    "z-image": z_image,
    "krea-2": krea_2,
    "sd3.5": sd_3_5,
    "auraflow": auraflow,
    "pixart-alpha": pixart,
    "pixart-sigma": lambda d: pixart(d, conditions=False),
    "hunyuan-video": lambda d: hunyuan_video(d, num_single_layers=2, text_embed_dim=48, pooled_projection_dim=24),
    "hunyuan-video-1.5": lambda d: hunyuan_video(d, kind="HunyuanVideo15Transformer3DModel", text_embed_dim=48),
}


@pytest.mark.parametrize("name", THEIRS)
def test_the_names_are_all_those_of_diffusers_linears(name):
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        reference = {n: m.weight.shape for n, m in THEIRS[name](diffusers).named_modules() if isinstance(m, nn.Linear)}
    model = build(BY_NAME[name]).model
    table, names = native_names(model), []
    for module, linear in model.diffusion_model.named_modules():
        if isinstance(linear, nn.Linear):
            parts = table.diffusers(module)
            names += parts
            rows = table.diffusers_rows(module, *linear.weight.shape) if len(parts) > 1 else ()
            for part, size in zip(parts, rows, strict=bool(rows)):
                assert reference[part][0] * linear.in_features == size * reference[part][1], part
    assert sorted(names) == sorted(reference)


UNET = {
    "block_out_channels": (32, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 48,
    "transformer_layers_per_block": 2,
    "attention_head_dim": 2,
}
SDXL = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 24 + 6 * 256,
}
UNETS = {
    "sdxl": ("StableDiffusionXLLoraLoaderMixin", UNET | SDXL),
    "sd1.5": ("StableDiffusionLoraLoaderMixin", UNET),
    "sd2": ("StableDiffusionLoraLoaderMixin", UNET | {"use_linear_projection": True}),
}


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
@pytest.mark.parametrize("name", UNETS)
def test_diffusers_loads_every_key_of_a_u_net_and_gets_the_same_update(name, layout, tmp_path, caplog):
    pytest.importorskip("diffusers")
    from diffusers import UNet2DConditionModel, loaders

    mixin, config = UNETS[name]
    unet = UNet2DConditionModel(**config)
    model = build(BY_NAME[name])
    table, updates = native_names(model.model), random_updates(model)
    if layout == "kohya":  # of alphas that differ diffusers loses those of attention
        updates = {native: replace(update, alpha=1.3) for native, update in updates.items()}
    save_file(convert(LoraModel.from_modules(updates, {MODULES: table.recorded()}), layout), tmp_path / "a.safetensors")
    state, alphas = getattr(loaders, mixin).lora_state_dict(str(tmp_path / "a.safetensors"), unet_config=unet.config)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        unet.load_lora_adapter(state, prefix="unet", network_alphas=alphas, adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []
    actual = {n: m.get_delta_weight("a") for n, m in unet.named_modules() if hasattr(m, "get_delta_weight")}
    updates_by_layer = {table.diffusers(native)[0]: delta(update) for native, update in updates.items()}
    assert actual.keys() == updates_by_layer.keys()
    for module, expected in updates_by_layer.items():
        assert (actual[module].double() - expected).norm() <= 1e-5 * expected.norm(), module


def test_diffusers_loads_every_key_of_hunyuan_video_and_gets_the_same_update(tmp_path, caplog):
    diffusers = pytest.importorskip("diffusers")
    transformer = THEIRS["hunyuan-video"](diffusers)
    model = build(BY_NAME["hunyuan-video"])
    table, updates = native_names(model.model), random_updates(model)
    lora = LoraModel.from_modules(updates, {MODULES: table.recorded()})
    save_file(convert(lora, "diffusers"), tmp_path / "a.safetensors")
    state = diffusers.loaders.HunyuanVideoLoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        transformer.load_lora_adapter(state, adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []
    modules = {name: module for name, module in transformer.named_modules() if hasattr(module, "get_delta_weight")}
    deltas_by_layer = {name: module.get_delta_weight("a").double() for name, module in modules.items()}
    assert len(deltas_by_layer) == len(state) // 2 == sum(len(table.diffusers(name)) for name in updates)
    for name, update in updates.items():
        together = torch.cat([deltas_by_layer[part] for part in table.diffusers(name)])
        expected = delta(update)
        if name == "final_layer.adaLN_modulation.1":  # (shift, scale), and (scale, shift) there
            expected = torch.cat(expected.chunk(2)[::-1])
        assert (together - expected).norm() <= 1e-5 * expected.norm(), name
