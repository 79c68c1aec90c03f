"""Qwen-Image LoRA files in the programs that read them: every key is taken, delta W is the one that was trained."""

import logging
from pathlib import Path

import comfy.sd
import comfy.utils
import pytest
import tiny
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.loaders.lora_pipeline import QwenImageLoraLoaderMixin
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.lora.patterns import match_targets
from tessera.models.family import linear_shapes
from tessera.models.flux.names import FLUX1_NAMES
from tessera.models.qwen_image.family import QwenImage
from tessera.models.qwen_image.names import QWEN_IMAGE_NAMES
from tessera.models.registry import table_of
from torch import Tensor

RANK = 4


def delta(part: LowRank) -> Tensor:
    return part.alpha / RANK * (part.up.double() @ part.down.double())


def random_update(rows: int, columns: int, index: int) -> LowRank:
    generator = torch.Generator().manual_seed(index)
    down = torch.randn(RANK, columns, generator=generator) * columns**-0.5
    return LowRank(down, 0.3 * torch.randn(rows, RANK, generator=generator), 1.3 + 0.1 * index)


@pytest.fixture
def model(tiny_files):
    return tiny.load_qwen_image(tiny_files["qwen_image"])


@pytest.fixture
def modules(model) -> dict[str, LowRank]:
    """A random update with an alpha of its own for every Linear of the tiny Qwen-Image."""
    linears = {n: m for n, m in model.model.diffusion_model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(linears) == 6 + 2 * 14
    return {name: random_update(*linear.weight.shape, i) for i, (name, linear) in enumerate(linears.items())}


def assert_same_deltas(found: dict[str, Tensor], modules: dict[str, LowRank], relative: float) -> None:
    assert found.keys() == modules.keys()
    for name, part in modules.items():
        expected = delta(part)
        assert (found[name] - expected).norm() <= relative * expected.norm(), name


def saved(modules: dict[str, LowRank], path: Path, layout: str, dtype: str = "fp32") -> Path:
    save_lora(path, LoraModel.from_modules(modules), layout, dtype)
    return path


@pytest.mark.parametrize(("dtype", "relative"), [("fp32", 1e-5), ("bf16", 6e-3)])
@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_comfyui_loads_every_key_and_gets_the_same_update(
    model, modules, tmp_path: Path, caplog, layout: str, dtype: str, relative: float
):
    tensors = comfy.utils.load_torch_file(
        str(saved(modules, tmp_path / "a.safetensors", layout, dtype)), safe_load=True
    )
    with caplog.at_level(logging.WARNING):
        patched, _ = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 0.0)
    assert [record.getMessage() for record in caplog.records] == []
    found = {}
    for key in patched.patches:
        difference = patched.patch_weight_to_device(key, return_weight=True) - comfy.utils.get_attr(model.model, key)
        found[key.removeprefix("diffusion_model.").removesuffix(".weight")] = difference.double()
    assert_same_deltas(found, modules, relative)


@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_diffusers_loads_every_key_and_gets_the_same_update(modules, tmp_path: Path, caplog, layout: str):
    transformer = QwenImageTransformer2DModel(
        num_layers=2, attention_head_dim=64, num_attention_heads=2, joint_attention_dim=64, axes_dims_rope=(8, 28, 28)
    ).requires_grad_(False)
    state = QwenImageLoraLoaderMixin.lora_state_dict(str(saved(modules, tmp_path / "a.safetensors", layout)))
    with caplog.at_level(logging.WARNING):
        transformer.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []
    layers = {n: m for n, m in transformer.named_modules() if hasattr(m, "get_delta_weight")}
    assert_same_deltas({n: m.get_delta_weight("a").double() for n, m in layers.items()}, modules, 1e-5)


def test_the_names_of_a_file_tell_the_family_where_a_single_one_does_not(modules):
    flat = [name.replace(".", "_") for name in modules]
    assert table_of(dict.fromkeys(flat)) is QWEN_IMAGE_NAMES
    assert table_of(dict.fromkeys(["img_in", "double_blocks_0_img_attn_qkv"])) is FLUX1_NAMES
    for name, text in zip(modules, flat, strict=True):
        assert QWEN_IMAGE_NAMES.native(text) == name and QWEN_IMAGE_NAMES.diffusers(name) == (name,)


def test_the_default_targets_are_those_of_musubi_tuner(model):
    """Every Linear of the blocks but img_mod and txt_mod."""
    names = list(linear_shapes(model.model))
    chosen = match_targets(names, QwenImage().default_targets, ())
    assert chosen == [n for n in names if n.startswith("transformer_blocks.") and "_mod." not in n]
    assert len(chosen) == 2 * 12
