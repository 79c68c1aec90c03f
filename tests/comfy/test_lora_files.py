"""LoRA files in the programs that read them: ComfyUI and diffusers get the same delta W from each format.

delta W is written out here as alpha / rank · up @ down. Which diffusers module holds which rows is ComfyUI's table
(`comfy.utils.flux_to_diffusers`), not ours.
"""

import json
import logging
from pathlib import Path

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import pytest
import torch
from comfy_extras.nodes_train import LoraModelLoader, LossGraphNode, SaveLoRA, _setup_lora_adapters
from diffusers import FluxTransformer2DModel
from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.lora.files.formats import convert, save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
from tessera.models.flux.names import FLUX1_NAMES
from tessera.nodes.loras.save import TesseraLossPlot, TesseraSaveLora
from tiny.lora_files import (
    RANK,
    assert_same_deltas,
    delta,
    loaded_in_comfyui,
    patched_deltas,
    random_update,
    random_updates,
)


@pytest.fixture
def modules(tiny_flux) -> dict[str, LowRank]:
    """A random update with an alpha of its own for every Linear of the tiny FLUX."""
    updates = random_updates(tiny_flux)
    assert len(updates) == 2 + 3 * 2 + 2 * 10 + 2 * 3 + 2
    return updates


@pytest.mark.parametrize(("dtype", "relative"), [("fp32", 1e-5), ("bf16", 6e-3), ("fp16", 1e-3)])
@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_comfyui_loads_every_key_and_gets_the_same_update(
    tiny_flux, modules, tmp_path: Path, caplog, layout: str, dtype: str, relative: float
):
    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(modules), layout, dtype)
    tensors = comfy.utils.load_torch_file(str(tmp_path / "a.safetensors"), safe_load=True)
    patched = loaded_in_comfyui(tiny_flux, tensors, caplog)
    assert_same_deltas(patched_deltas(tiny_flux, patched), modules, relative)


def test_cores_nodes_take_our_lora(tiny_flux, modules, caplog):
    lora = LoraModel.from_modules(modules, {"ss_steps": "3"})
    with caplog.at_level(logging.WARNING):
        patched = LoraModelLoader.execute(tiny_flux, lora, 1.0).args[0]
    assert caplog.records == []
    assert_same_deltas(patched_deltas(tiny_flux, patched), modules, 1e-5)
    SaveLoRA.execute(lora, "loras/by_core", 3)
    (file,) = Path(folder_paths.get_output_directory(), "loras").glob("by_core_3_steps_*.safetensors")
    saved = load_file(file)
    assert saved.keys() == lora.keys()
    assert all(torch.equal(saved[key], lora[key]) for key in lora)


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
@pytest.mark.parametrize("algorithm", ["LoRA", "LoKr"])
def test_the_lora_of_cores_trainer_is_saved_whole(tiny_flux, tmp_path: Path, caplog, layout: str, algorithm: str):
    trained, _ = _setup_lora_adapters(tiny_flux.clone(), {}, algorithm, torch.float32, RANK)
    generator = torch.Generator().manual_seed(0)
    plain = {key: value.detach().clone() for key, value in trained.items()}
    for tensor in plain.values():
        if tensor.dim():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    expected = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, plain, caplog))
    assert len(expected) > 60
    save_lora(tmp_path / "a.safetensors", plain, layout, "fp32")
    found = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, load_file(tmp_path / "a.safetensors"), caplog))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def diffusers_rows(native: dict[str, torch.Tensor], config: dict, name: str) -> torch.Tensor:
    """The part of the native weights (or updates) that the diffusers module `name` holds, by ComfyUI's table."""
    target = comfy.utils.flux_to_diffusers(config)[f"{name}.weight"]
    key, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
    tensor = native[key.removesuffix(".weight")]
    if offset is not None:
        tensor = tensor.narrow(*offset)
    return tensor if function is None else function(tensor)


def tiny_transformer(model):
    """diffusers' FLUX of the same size with the weights of the tiny FLUX."""
    transformer = FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=model.model.diffusion_model.params.context_in_dim,
        pooled_projection_dim=model.model.diffusion_model.params.vec_in_dim,
        guidance_embeds=True,
    )
    table = comfy.utils.flux_to_diffusers(model.model.model_config.unet_config)
    native = model.model.diffusion_model.state_dict()
    weights = {}
    for key in transformer.state_dict():
        target = table[key]
        source, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        tensor = native[source] if offset is None else native[source].narrow(*offset)
        weights[key] = tensor if function is None else function(tensor)
    transformer.load_state_dict(weights)
    return transformer.requires_grad_(False)


def velocities(model, transformer) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of ComfyUI's FLUX and of diffusers' on the same inputs: (1, 16, 8, 12) each."""
    generator = torch.Generator().manual_seed(1)
    net = model.model.diffusion_model
    latent = torch.randn(1, 16, 8, 12, generator=generator)
    text = torch.randn(1, 7, net.params.context_in_dim, generator=generator)
    pooled = torch.randn(1, net.params.vec_in_dim, generator=generator)
    sigma, guidance = torch.tensor([0.6]), torch.tensor([3.5])
    with torch.no_grad():
        ours = net(latent, sigma, text, pooled, guidance)
        rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
        ids = torch.stack((torch.zeros_like(rows), rows, columns), -1).reshape(-1, 3)
        tokens = latent.reshape(1, 16, 4, 2, 6, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 24, 64)
        theirs = transformer(
            hidden_states=tokens,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=sigma,
            img_ids=ids,
            txt_ids=torch.zeros(7, 3),
            guidance=guidance,
        ).sample
    return ours, theirs.reshape(1, 4, 6, 16, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(1, 16, 8, 12)


def test_diffusers_with_peft_loads_every_key_and_runs_as_comfyui_does(tiny_flux, modules, tmp_path: Path, caplog):

    transformer = tiny_transformer(tiny_flux)
    comfy.model_management.load_models_gpu([tiny_flux])
    base, base_there = velocities(tiny_flux, transformer)
    assert (base - base_there).norm() < 1e-4 * base.norm()

    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(modules), "diffusers", "fp32")
    state, alphas = FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"), return_alphas=True)
    assert not alphas
    with caplog.at_level(logging.WARNING):
        transformer.load_lora_adapter(state, prefix="transformer", adapter_name="a")
    assert [record.getMessage() for record in caplog.records if "diffusers" in record.name] == []

    native = {name: delta(part) for name, part in modules.items()}
    layers = {name: layer for name, layer in transformer.named_modules() if hasattr(layer, "get_delta_weight")}
    linears = [n for n, m in transformer.named_modules() if isinstance(m, torch.nn.Linear) and ".lora_" not in n]
    assert len(layers) == len(linears)
    for name, layer in layers.items():
        expected = diffusers_rows(native, tiny_flux.model.model_config.unet_config, name)
        assert (layer.get_delta_weight("a").double() - expected).norm() <= 1e-5 * expected.norm(), name

    patched, _ = comfy.sd.load_lora_for_models(tiny_flux, None, LoraModel.from_modules(modules), 1.0, 0.0)
    comfy.model_management.load_models_gpu([patched], force_full_load=True)
    try:
        here, there = velocities(patched, transformer)
    finally:
        patched.detach()
    assert (here - base).norm() > 0.1 * base.norm()
    assert (here - there).norm() < 1e-4 * (here - base).norm()


def test_diffusers_own_converter_reads_the_kohya_format(tmp_path: Path):
    """It has FLUX.1's hidden size written into it, so the update has full-size matrices for one block of each kind."""
    hidden = 3072
    shapes = {"linear1": (7 * hidden, hidden), "linear2": (hidden, 5 * hidden), "qkv": (3 * hidden, hidden)}
    blocks = [name.format(0) for name in FLUX1_NAMES.to_diffusers if "_blocks." in name]
    last = ["final_layer.linear", "final_layer.adaLN_modulation.1"]
    modules = {
        name: random_update(*shapes.get(name.rpartition(".")[2], (2 * hidden, hidden)), index)
        for index, name in enumerate((*blocks, *last))
    }
    save_lora(tmp_path / "a.safetensors", LoraModel.from_modules(modules), "kohya", "fp32")
    state = FluxLoraLoaderMixin.lora_state_dict(str(tmp_path / "a.safetensors"))
    config = {"depth": 1, "depth_single_blocks": 1, "hidden_size": hidden}
    native = {}
    for name, part in modules.items():
        probe = torch.randn(part.down.shape[1], 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        native[name] = part.alpha / RANK * (part.up.double() @ (part.down.double() @ probe))
    seen = 0
    for key in [key for key in state if key.endswith("lora_A.weight")]:
        name = key.removesuffix(".lora_A.weight")
        down, up = state[key].double(), state[f"{name}.lora_B.weight"].double()
        probe = torch.randn(down.shape[1], 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        expected = diffusers_rows(native, config, name.removeprefix("transformer."))
        assert (up @ (down @ probe) - expected).norm() <= 1e-5 * expected.norm(), name
        seen += 1
    double, single = 8 + 2 * 3, 2 + 4
    assert seen == double + single + len(last) and len(state) == 2 * seen


def test_save_lora_numbers_its_files_and_tells_the_frontend(modules):
    lora = LoraModel.from_modules(modules, {"ss_sd_model_name": "/home/somebody/flux.safetensors"})
    with torch.inference_mode():
        outputs = [TesseraSaveLora.execute(lora, "loras/mine", "comfyui", "bf16") for _ in range(2)]
    folder = Path(folder_paths.get_output_directory(), "loras")
    assert [output.args[0] for output in outputs] == [str(folder / f"mine_0000{i}.safetensors") for i in (1, 2)]
    (shown,) = outputs[1].ui["tessera"]
    assert (shown["filename"], shown["subfolder"], shown["type"]) == ("mine_00002.safetensors", "loras", "output")
    json.dumps(outputs[1].ui, allow_nan=False)
    with safe_open(folder / "mine_00002.safetensors", "pt") as file:
        assert file.metadata() == {"ss_sd_model_name": "flux.safetensors"}
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}
    assert load_file(folder / "mine_00002.safetensors").keys() == convert(lora, "comfyui").keys()


@pytest.mark.parametrize("prefix", ["../mine", "loras/../../mine", "/srv/mine", "C:\\mine", "..\\mine", "~/mine", ""])
def test_save_lora_stays_inside_the_output_folder(prefix: str):
    lora = LoraModel.from_modules({"img_in": random_update(8, 8, 0)})
    with pytest.raises(ValueError, match="filename_prefix is .*; give a name inside ComfyUI's output folder"):
        TesseraSaveLora.execute(lora, prefix, "kohya", "bf16")


def test_save_lora_wants_a_name_not_a_folder():
    with pytest.raises(ValueError, match="filename_prefix is 'loras/', which is a folder; add a file name"):
        TesseraSaveLora.execute(LoraModel.from_modules({"img_in": random_update(8, 8, 0)}), "loras/", "kohya", "bf16")


def test_the_loss_plot_takes_cores_losses_and_core_takes_ours():
    with torch.inference_mode():
        plot = TesseraLossPlot.execute({"loss": [0.5, 0.4, 0.45]}, 0.9, False)
    assert plot.args[0].shape == (1, 512, 1024, 3) and plot.args[0].dtype == torch.float32
    (preview,) = plot.ui.as_dict()["images"]
    assert Path(folder_paths.get_temp_directory(), preview["subfolder"], preview["filename"]).exists()
    assert LossGraphNode.execute({"loss": [0.5, 0.4, 0.45], "seconds": [1.0, 1.0, 1.0]}, "graph").ui
    with pytest.raises(ValueError, match="loss is empty"):
        TesseraLossPlot.execute({"loss": []}, 0.9, False)
    with pytest.raises(ValueError, match="no series called 'loss'"):
        TesseraLossPlot.execute({"losses": [1.0]}, 0.9, False)
