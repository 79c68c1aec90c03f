"""Load LoRA File with Save LoRA behind it, in the real executor: the converter."""

import comfy.utils
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tessera.lora.base import apply_base_lora
from tessera.lora.files.formats import convert
from tessera.lora.files.loading import load_lora
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tessera.models.catalogue.registry import family_of
from tessera.models.convolutions import layer_shapes
from tessera.train.report.errors import broken_weight, not_finite
from tiny.lora.foreign_loras import foreign
from tiny.lora.lora_files import loaded_in_comfyui, patched_deltas, random_update

QKV, PROJ = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj"
TEXT = "lora_te1_text_model_encoder_layers_0_mlp_fc1"


def stranger():
    """A file that ComfyUI's own loader reads in part: in a wrapper that it doesn't know, split, doubled, float8."""
    whole = random_update(384, 128, 1)
    part = random_update(128, 128, 2)
    other = random_update(128, 128, 3)
    tensors = {
        f"module.{QKV}.lora_A.weight": whole.down,
        f"module.{QKV}.lora_B.weight": whole.up,
        "transformer.transformer_blocks.1.attn.to_k.lora_A.weight": part.down,
        "transformer.transformer_blocks.1.attn.to_k.lora_B.weight": part.up,
        f"diffusion_model.{PROJ}.lora_A.weight": other.down.to(torch.float8_e4m3fn),
        f"diffusion_model.{PROJ}.lora_B.weight": other.up.to(torch.float8_e4m3fn),
        f"pipe.dit.{PROJ}.lora_A.default.weight": other.down,
        f"pipe.dit.{PROJ}.lora_B.default.weight": other.up,
        f"{TEXT}.lora_down.weight": torch.ones(2, 4),
        f"{TEXT}.lora_up.weight": torch.ones(4, 2),
        "connectors.x.lora_A.weight": torch.ones(2, 4),
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def test_the_converter_in_the_executor(server, tiny_loaders):
    folder = server.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    save_file(stranger(), folder / "stranger.safetensors", metadata={"ss_steps": "7", "sshs_model_hash": "old"})
    load = {"class_type": "TesseraLoadLora", "inputs": {"lora_file": "stranger.safetensors", "model": ["model", 0]}}
    inputs = {"lora": ["load", 0], "filename_prefix": "loras/converted", "format": "kohya", "dtype": "fp32"}
    save = {"class_type": "TesseraSaveLora", "inputs": inputs}
    entry = server.wait(server.queue({"model": tiny_loaders["model"], "load": load, "save": save}))
    (said,) = entry["outputs"]["load"]["tessera"]
    assert said["notes"][0] == "3 layers of FLUX.1 read." and len(said["notes"]) == 4
    assert any("text encoders are kept" in note for note in said["notes"])
    assert any("connectors.x" in note for note in said["notes"])
    assert any(f"added up: {PROJ}.weight" in note for note in said["notes"])
    (saved,) = entry["outputs"]["save"]["tessera"]
    path = server.base / "output" / saved["subfolder"] / saved["filename"]
    names = {key.partition(".")[0] for key in load_file(path)}
    flat = {f"lora_unet_{name.replace('.', '_')}" for name in (QKV, PROJ, "double_blocks.1.img_attn.qkv")}
    assert names == {*flat, TEXT}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"ss_steps": "7"}
    assert saved["notes"][0].startswith("ComfyUI and diffusers read this file")


def test_each_part_that_is_left_out_or_read_otherwise_has_a_note(tiny_flux):
    tensors = stranger()
    source = LoraSource.from_lora(tensors)
    notes = apply_base_lora(tiny_flux.clone(), NetworkOptions(base_lora=source), family_of(tiny_flux))
    assert "base_lora also has 2 keys for the text encoder, which are ignored." in notes
    assert "base_lora: 4 of the 5 layers in the file are in this model; the rest is ignored (connectors.x)." in notes
    assert f"base_lora has several updates of one layer, which are added up: {PROJ}.weight." in notes
    del tensors["connectors.x.lora_A.weight"]
    tensors[f"diffusion_model.{PROJ}.novelty"] = torch.ones(1)
    lora, notes = load_lora(tensors, {}, family_of(tiny_flux), tiny_flux.model, "lora_file: a")
    assert notes == [
        "3 layers of FLUX.1 read.",
        "2 keys of text encoders are kept under their names.",
        f"lora_file: a has 1 key that means nothing here, such as diffusion_model.{PROJ}.novelty.",
        f"lora_file: a has several updates of one layer, which are added up: {PROJ}.weight.",
    ]
    assert all(torch.equal(lora[key], tensors[key]) for key in tensors if key.startswith(TEXT))


@pytest.mark.parametrize("layout", ["kohya", "comfyui", "diffusers"])
def test_converted_lora_is_loaded_by_comfyui(layout, tiny_flux, tmp_path, caplog):
    """And a base LoRA that ComfyUI reads otherwise is said, until it is converted."""
    tensors = {key: t for key, t in stranger().items() if TEXT not in key and "connectors" not in key}
    save_file(tensors, tmp_path / "a.safetensors")
    family = family_of(tiny_flux)
    lora, _ = load_lora(tensors, {}, family, tiny_flux.model, "lora_file: a")
    save_file(convert(lora, layout), tmp_path / "b.safetensors")
    results = []
    for name in "ab":
        source = LoraSource.from_file(tmp_path / f"{name}.safetensors", "base_lora")
        clone = tiny_flux.clone()
        notes = apply_base_lora(clone, NetworkOptions(base_lora=source), family)
        results.append((patched_deltas(tiny_flux, clone), [note for note in notes if "loaders read" in note]))
    (direct, said), (converted, nothing) = results
    assert len(said) == 1 and "a.safetensors otherwise: 2 of 3 weights" in said[0]
    assert PROJ in said[0] and QKV in said[0]
    assert nothing == []
    loaded = loaded_in_comfyui(tiny_flux, comfy.utils.load_torch_file(str(tmp_path / "b.safetensors")), caplog)
    core_deltas = patched_deltas(tiny_flux, loaded)
    assert direct.keys() == converted.keys() == core_deltas.keys()
    for name, expected in direct.items():
        assert (core_deltas[name] - expected).norm() <= 1e-5 * expected.norm(), name


def test_updates_of_parts_that_no_format_joins_keep_comfyui_s_names(tiny_flux, caplog):
    """A LoKr of a query, beside whole forms, a norm and a bias."""
    shapes = {"lycoris_transformer_blocks_1_attn_to_q": (128, 128)}
    tensors = foreign("lokr", shapes) | foreign("loha", {f"module.{PROJ}": (128, 128)})
    tensors["diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff"] = torch.arange(128.0)
    tensors[f"diffusion_model.{PROJ}.diff_b"] = torch.arange(128.0)
    lora, _ = load_lora(tensors, {}, family_of(tiny_flux), tiny_flux.model, "lora_file: a")
    for layout in ("kohya", "comfyui"):
        patched = loaded_in_comfyui(tiny_flux, convert(lora, layout), caplog)
        assert len(patched_deltas(tiny_flux, patched)) == 4
    with pytest.raises(ValueError, match="format diffusers carries plain LoRA pairs only"):
        convert(lora, "diffusers")


def test_a_lokr_of_a_part_without_a_name_in_comfyui_becomes_a_difference(tiny_files):
    model = tiny.load_wan(tiny_files["wan"])
    shapes = {f"module.blocks.0.self_attn.{part}": (128, 128) for part in "q"}
    tensors = foreign("lokr", shapes)
    tensors |= {key.replace("module.", "diffusion_model."): t for key, t in foreign("loha", shapes).items()}
    lora, _ = load_lora(tensors, {}, family_of(model), model.model, "lora_file: a")
    assert set(lora) == {"lora_unet_blocks_0_self_attn_q.diff"}


def test_the_picture_convolution_of_an_i2v_lora_is_left_out_on_a_t2v_model(tiny_files):
    model = tiny.load_wan(tiny_files["wan"])
    rows, channels, *kernel = model.model.diffusion_model.patch_embedding.weight.shape
    tensors = foreign("diff", {"diffusion_model.blocks.0.ffn.0": layer_shapes(model.model)["blocks.0.ffn.0"]})
    tensors["diffusion_model.patch_embedding.diff"] = torch.ones(rows, channels + 20, *kernel)
    source = LoraSource.from_lora(tensors)
    notes = apply_base_lora(model.clone(), NetworkOptions(base_lora=source), family_of(model))
    assert any(
        "parts that this model doesn't have, such as patch_embedding.weight; they are ignored" in n for n in notes
    )
    _, notes = load_lora(tensors, {}, family_of(model), model.model, "lora_file: a")
    assert notes == [
        "1 layer of Wan 2.1 and 2.2 read.",
        "lora_file: a also changes parts that this model lacks; they are left out: patch_embedding.weight.",
    ]


def test_a_broken_weight_of_the_model_is_named(tiny_flux):
    assert broken_weight(tiny_flux.model.diffusion_model) == ""
    layer = torch.nn.Linear(2, 2)
    layer.weight.data[0, 1] = float("nan")
    assert broken_weight(torch.nn.Sequential(layer)) == "0.weight"
    message = str(not_finite("loss", 4, "0.weight"))
    assert "the model's file holds such values (0.weight)" in message and "learning_rate" not in message


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"connectors.x.lora_A.weight": torch.ones(2, 4)}, "0 of the 1 layer in the file .connectors.x."),
        ({f"{QKV}.diff": torch.full((384, 128), float("nan"))}, rf"holds NaN or infinite values \({QKV}.diff\)"),
        (
            {f"{QKV}.lora_A.weight": torch.ones(0, 128), f"{QKV}.lora_B.weight": torch.ones(384, 0)},
            "lora_A.weight is empty, as of a rank of 0",
        ),
        ({f"{TEXT}.lora_up.weight": torch.ones(2, 2)}, "it has no layers of a diffusion model"),
    ],
)
def test_unreadable_files_are_one_sentence(tensors, message, tiny_flux):
    family = family_of(tiny_flux)
    with pytest.raises(ValueError, match=f"lora_file: a .*{message}"):
        load_lora(tensors, {}, family, tiny_flux.model, "lora_file: a")
    with pytest.raises(ValueError, match=f"base_lora: LORA_MODEL .*{message}"):
        apply_base_lora(tiny_flux.clone(), NetworkOptions(base_lora=LoraSource.from_lora(tensors)), family)
