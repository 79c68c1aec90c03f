"""LoRA files of models that no family of ours claims: ComfyUI loads each key and changes the same weights as much."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tessera.common.files import read_tensors
from tessera.lora.base import apply_base_lora
from tessera.lora.files.formats import FORMATS, convert, save_lora
from tessera.lora.files.lora_model import MODULES, LoraModel, low_rank
from tessera.lora.files.reader import read_lora
from tessera.lora.files.readers import reader_notes
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tessera.lora.warm_start import read_warm_start
from tessera.models.name_table import NameTable, read_recorded
from tessera.models.native.names import native_names
from tiny.lora.lora_files import assert_same_deltas, loaded_in_comfyui, patched_deltas, random_updates
from tiny.native import ROWS, build, data_of
from tiny.train.runs import train
from torch import Tensor

OFFERED = {"z-image", "krea-2", "sd3.5", "sdxl", "sd1.5", "sd2", "auraflow", "pixart-alpha", "pixart-sigma"}
OFFERED |= {"hunyuan-video", "hunyuan-video-1.5"}  # which ComfyUI doesn't read
BY_NAME = {row.name: row for row in ROWS}


def lora_of(updates: dict[str, Any], table: NameTable) -> LoraModel:
    return LoraModel.from_modules(updates, {MODULES: table.recorded()})


def family_of(table: NameTable) -> Any:
    return SimpleNamespace(names=table, title="this model")


def formats_of(table: NameTable) -> tuple[str, ...]:
    return FORMATS if table.to_diffusers else FORMATS[:2]


def deltas(modules: Any) -> dict[str, Tensor]:
    return {n: part.alpha / part.rank * (part.up.double() @ part.down.double()) for n, part in modules.items()}


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_comfyui_loads_every_key_and_so_do_we_with_the_same_update(row, caplog):
    model = build(row)
    updates, table = random_updates(model), native_names(model.model)
    assert bool(table.to_diffusers) == (row.name in OFFERED)
    for layout in formats_of(table):
        tensors = convert(lora_of(updates, table), layout)
        reading = read_lora(tensors, family_of(table), model.model)
        assert (reading.other_weights, reading.unknown, reading.text_encoder) == ((), (), 0)
        assert_same_deltas(deltas({n: low_rank(parts) for n, parts in reading.modules.items()}), updates, 1e-5)
        if table.left_out("ComfyUI", layout, list(updates)):
            continue
        patched = loaded_in_comfyui(model, tensors, caplog)
        assert_same_deltas(patched_deltas(model, patched), updates, 1e-5)


SOME = ["z-image", "sd1.5", "sd3.5", "hunyuan-video", "anima", "minimax-h3"]


@pytest.mark.parametrize("name", SOME)
def test_a_file_tells_the_names_of_its_modules_without_the_model(name, tmp_path):
    """As Save LoRA and Average States get a LoRA that a run has written."""
    model = build(BY_NAME[name])
    updates, table = random_updates(model), native_names(model.model)
    lora = lora_of(updates, table)
    save_lora(tmp_path / "a.safetensors", lora, "kohya")
    back = LoraModel(*read_tensors(tmp_path / "a.safetensors"))
    assert deltas(back.modules()).keys() == updates.keys()
    for layout in formats_of(table):
        expected, actual = convert(lora, layout), convert(back, layout)
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_a_file_that_tells_no_names_keeps_its_keys():
    model = build(BY_NAME["anima"])
    updates, table = random_updates(model), native_names(model.model)
    plain = dict(convert(lora_of(updates, table), "kohya"))
    assert convert(plain, "kohya").keys() == plain.keys()
    assert reader_notes(plain, "kohya")
    with pytest.raises(ValueError, match="format comfyui needs the module's own name"):
        convert(plain, "comfyui")
    tensors = convert(lora_of(updates, table), "comfyui")
    assert convert(tensors, "comfyui").keys() == tensors.keys()  # as core's training node gives it
    assert convert(tensors, "kohya").keys() == plain.keys()


@pytest.mark.parametrize("said", ["", "no json", "[]", "{}", '{"diffusers": {"a.{}": ["b"]}, "modules": []}'])
def test_metadata_that_tells_no_table_is_passed_over(said):
    assert read_recorded(said) is None
    model = build(BY_NAME["anima"])
    lora = LoraModel.from_modules(random_updates(model), {MODULES: said})
    assert convert(lora, "kohya")


def test_save_lora_says_what_is_known_and_refuses_names_that_are_not():
    refused_model, known_model = (build(BY_NAME[name]) for name in ("anima", "z-image"))
    lora = lora_of(random_updates(refused_model), native_names(refused_model.model))
    assert reader_notes(lora, "kohya") == reader_notes(lora, "comfyui") == ["ComfyUI reads this file."]
    with pytest.raises(ValueError, match="format diffusers is not known for this model; choose kohya or comfyui"):
        convert(lora, "diffusers")
    offered = lora_of(random_updates(known_model), native_names(known_model.model))
    assert reader_notes(offered, "diffusers") == ["ComfyUI and diffusers read this file."]


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", ["z-image", "sd1.5", "sd3.5"])
def test_a_run_starts_from_such_a_file_and_stands_on_it(name, layout, tmp_path):
    model = build(BY_NAME[name])
    updates, table = random_updates(model), native_names(model.model)
    save_lora(tmp_path / "a.safetensors", lora_of(updates, table), layout)
    source = LoraSource.from_file(tmp_path / "a.safetensors", "start_from")
    options = NetworkOptions(rank=4, start_from=source, base_lora=source)
    start, notes = read_warm_start(options, family_of(table), model.model, list(updates))
    assert start is not None and (notes, start.dense) == ([], {})
    assert_same_deltas(deltas({n: low_rank(parts) for n, parts in start.modules.items()}), updates, 1e-5)
    clone = model.clone()
    (note,) = apply_base_lora(clone, options, family_of(table))
    assert note.startswith("Trained on top of a.safetensors")
    assert_same_deltas(patched_deltas(model, clone), updates, 1e-5)


def keys_of(name: str, layout: str, module: str) -> set[str]:
    model = build(BY_NAME[name])
    updates = {module: random_updates(model)[module]}
    return set(convert(lora_of(updates, native_names(model.model)), layout))


ATTENTION = "input_blocks.3.1.transformer_blocks.1.attn2.to_out.0"
FEED = "output_blocks.0.1.transformer_blocks.0.ff.net.0.proj"


@pytest.mark.parametrize(
    ("name", "layout", "module", "expected"),
    [
        ("sdxl", "kohya", ATTENTION, "lora_unet_input_blocks_3_1_transformer_blocks_1_attn2_to_out_0.lora_up.weight"),
        ("sd1.5", "kohya", ATTENTION, "lora_unet_down_blocks_1_attentions_0_transformer_blocks_1_attn2_to_out_0.alpha"),
        ("sd2", "kohya", FEED, "lora_unet_up_blocks_0_attentions_0_transformer_blocks_0_ff_net_0_proj.alpha"),
        ("sd1.5", "comfyui", ATTENTION, f"diffusion_model.{ATTENTION}.lora_A.weight"),
        (
            "sdxl",
            "diffusers",
            ATTENTION,
            "unet.down_blocks.1.attentions.0.transformer_blocks.1.attn2.processor.to_out_lora.up.weight",
        ),
        (
            "sdxl",
            "diffusers",
            FEED,
            "unet.up_blocks.0.attentions.0.transformer_blocks.0.ff.net.0.proj.lora.down.weight",
        ),
        ("z-image", "kohya", "layers.1.attention.qkv", "lora_unet_layers_1_attention_qkv.lora_down.weight"),
        ("z-image", "diffusers", "layers.1.attention.qkv", "transformer.layers.1.attention.to_v.lora_B.weight"),
        ("krea-2", "diffusers", "blocks.1.attn.wo", "transformer.transformer_blocks.1.attn.to_out.0.lora_A.weight"),
        ("anima", "comfyui", "blocks.1.self_attn.q_proj", "diffusion_model.blocks.1.self_attn.q_proj.lora_B.weight"),
    ],
)
def test_the_keys_are_those_that_other_programs_write(name, layout, module, expected):
    assert expected in keys_of(name, layout, module)


@pytest.mark.parametrize(("name", "layouts"), [("sd1.5", FORMATS), ("anima", FORMATS[:2])])
def test_the_file_of_a_run_is_named_by_the_model_and_can_be_saved_again(name, layouts, tmp_path, caplog):
    row = BY_NAME[name]
    model = build(row)
    result = train(model, data_of(row), tmp_path, steps=1, save_every=0)
    back = LoraModel(*read_tensors(result.path))
    assert deltas(back.modules()).keys() == deltas(result.lora.modules()).keys() != set()
    for layout in layouts:
        tensors = convert(back, layout)
        assert tensors.keys() == convert(result.lora, layout).keys()
        patched = loaded_in_comfyui(model, tensors, caplog)
        assert patched_deltas(model, patched).keys() == deltas(back.modules()).keys()
