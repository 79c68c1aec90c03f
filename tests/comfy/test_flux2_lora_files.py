"""LoRA files of FLUX.2 in the programs that read them: ComfyUI and diffusers get the same delta W from each format."""

import logging
from pathlib import Path

import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import tiny
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.patterns import match_targets
from tessera.models.family import linear_shapes
from tessera.models.flux.family import Flux2
from tiny.lora_files import assert_same_deltas, delta, loaded_in_comfyui, patched_deltas, random_updates


@pytest.fixture
def model(tiny_files):
    return tiny.load_flux2(tiny_files["flux2"])


@pytest.fixture
def all_modules(model):
    """A random update with an alpha of its own for every Linear of the tiny FLUX.2."""
    updates = random_updates(model)
    assert len(updates) == 2 + 4 + 3 + 2 * 8 + 2 * 2 + 2
    return updates


@pytest.fixture
def modules(model, all_modules):
    """The same for the default targets."""
    targets = match_targets(list(linear_shapes(model.model)), Flux2().default_targets, ())
    assert len(targets) == 2 * 8 + 2 * 2
    return {name: all_modules[name] for name in targets}


def saved(modules, path: Path, layout: str, dtype: str = "fp32") -> Path:
    save_lora(path, LoraModel.from_modules(modules), layout, dtype)
    return path


@pytest.mark.parametrize(("dtype", "relative"), [("fp32", 1e-5), ("bf16", 6e-3)])
@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_comfyui_loads_every_key_and_gets_the_same_update(
    model, modules, all_modules, tmp_path: Path, caplog, layout: str, dtype: str, relative: float
):
    """ComfyUI's table of diffusers' names for FLUX holds FLUX.2's blocks and none of its outer layers."""
    modules = modules if layout == "diffusers" else all_modules
    file = saved(modules, tmp_path / "a.safetensors", layout, dtype)
    patched = loaded_in_comfyui(model, comfy.utils.load_torch_file(str(file), safe_load=True), caplog)
    assert_same_deltas(patched_deltas(model, patched), modules, relative)


def tiny_transformer(model, weights) -> Flux2Transformer2DModel:
    """diffusers' FLUX.2 of the same size, with these weights as its own converter names them."""
    transformer = Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=model.model.diffusion_model.params.context_in_dim,
    )
    transformer.load_state_dict(convert_flux2_transformer_checkpoint_to_diffusers(weights), strict=True)
    return transformer.requires_grad_(False)


@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_diffusers_loads_every_key_and_gets_the_same_update(
    model, modules, all_modules, tiny_files, tmp_path: Path, caplog, layout: str
):
    """Its converter of kohya's keys knows the blocks only. The update that it takes is compared with what its converter
    of checkpoints makes of delta W as weights, so that its own table says which rows go where."""
    modules = modules if layout == "kohya" else all_modules
    weights = load_file(tiny_files["flux2"])
    transformer = tiny_transformer(model, dict(weights))
    state = Flux2LoraLoaderMixin.lora_state_dict(str(saved(modules, tmp_path / "a.safetensors", layout)))
    with caplog.at_level(logging.WARNING):
        transformer.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []
    deltas = {f"{name}.weight": delta(part).float() for name, part in modules.items()}
    rest = {name: torch.zeros_like(tensor) for name, tensor in weights.items() if name not in deltas}
    expected = convert_flux2_transformer_checkpoint_to_diffusers(deltas | rest)
    layers = {n: m for n, m in transformer.named_modules() if hasattr(m, "get_delta_weight")}
    assert {f"{name}.weight" for name in layers} == {n for n, tensor in expected.items() if tensor.any()}
    if layout == "comfyui":
        # diffusers takes the last modulation's (shift, scale) as they are, though it holds (scale, shift).
        del layers["norm_out.linear"]
    for name, layer in layers.items():
        wanted = expected[f"{name}.weight"]
        assert (layer.get_delta_weight("a") - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_with_the_lora_comfyui_and_diffusers_say_the_same(model, all_modules, tiny_files, tmp_path: Path):
    transformer = tiny_transformer(model, load_file(tiny_files["flux2"]))
    state = Flux2LoraLoaderMixin.lora_state_dict(str(saved(all_modules, tmp_path / "a.safetensors", "diffusers")))
    patched, _ = comfy.sd.load_lora_for_models(model, None, LoraModel.from_modules(all_modules), 1.0, 0.0)
    base = velocities(model, transformer)
    transformer.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    ours, theirs = velocities(patched, transformer)
    assert (base[0] - base[1]).norm() < 1e-4 * base[0].norm()
    assert (ours - base[0]).norm() > 0.1 * base[0].norm()
    assert (ours - theirs).norm() < 1e-4 * ours.norm()


def velocities(model, transformer) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of ComfyUI's FLUX.2 and of diffusers' on the same inputs: (1, 24, 128) each."""
    comfy.model_management.load_models_gpu([model], force_full_load=True)
    generator = torch.Generator().manual_seed(1)
    net = model.model.diffusion_model
    latent = torch.randn(1, 128, 4, 6, generator=generator)
    text = torch.randn(1, 7, net.params.context_in_dim, generator=generator)
    sigma, guidance = torch.tensor([0.6]), torch.tensor([3.5])
    img_ids, txt_ids = torch.zeros(4, 6, 4), torch.zeros(7, 4)
    img_ids[..., 1] += torch.arange(4)[:, None]
    img_ids[..., 2] += torch.arange(6)
    txt_ids[..., 3] += torch.arange(7)
    try:
        with torch.no_grad():
            ours = net(latent, sigma, text, None, guidance)
            theirs = transformer(
                hidden_states=latent.flatten(2).transpose(1, 2),
                encoder_hidden_states=text,
                timestep=sigma,
                img_ids=img_ids.reshape(1, 24, 4),
                txt_ids=txt_ids[None],
                guidance=guidance,
            ).sample
    finally:
        model.detach()
    return ours.flatten(2).transpose(1, 2), theirs
