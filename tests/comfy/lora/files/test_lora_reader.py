"""Any LoRA comes in as updates of the model's own modules, the same as ComfyUI makes of it."""

import comfy.utils
import pytest
import tiny
import torch
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel, LowRank, low_rank, normalised
from tessera.lora.files.reader import join_rows, read_lora
from tessera.models.catalogue.registry import family_of
from tiny.lora.lora_files import (
    assert_same_deltas,
    delta,
    loaded_in_comfyui,
    patched_deltas,
    random_update,
    random_updates,
)


def read(model, tensors):
    reading = read_lora(tensors, family_of(model), model.model)
    assert (reading.other_weights, reading.text_encoder, reading.unknown) == ((), 0, ())
    return reading.modules


def deltas(modules):
    updates = {name: low_rank(parts) for name, parts in modules.items()}
    return {n: m.alpha / m.rank * (m.up.double() @ m.down.double()) for n, m in updates.items()}


@pytest.mark.parametrize("family", ["flux", "flux2", "qwen_image", "wan"])
def test_every_format_that_we_write_is_read_back(family, tiny_files, caplog):
    model = tiny.load_model(family, tiny_files[family])
    updates = random_updates(model)
    lora = LoraModel.from_modules(updates)
    for layout, dtype, relative in (("kohya", "fp32", 1e-6), ("comfyui", "fp16", 1e-3), ("diffusers", "bf16", 6e-3)):
        tensors = convert(lora, layout, dtype)
        actual = deltas(read(model, tensors))
        assert_same_deltas(actual, updates, relative)
        # Of diffusers' names ComfyUI knows fewer.
        if layout != "diffusers" or family in ("flux", "qwen_image"):
            reference = patched_deltas(model, loaded_in_comfyui(model, tensors, caplog))
            assert all((actual[name] - reference[name]).norm() <= 1e-5 * reference[name].norm() for name in reference)
    plain = {key: tensor for key, tensor in lora.items() if not key.endswith(".alpha")}
    scaled = {name: LowRank(part.down, part.up, float(part.rank)) for name, part in updates.items()}
    assert_same_deltas(deltas(read(model, plain)), scaled, 1e-6)


@pytest.mark.parametrize("prefix", ["transformer.", "base_model.model.", "lycoris_", ""])
def test_split_layers_of_flux_are_fused_exactly(prefix, tiny_flux, caplog):
    """Each diffusers module has an update of its own, v has none, and the last layer's halves are the other way round:
    by ComfyUI's own table."""
    table = comfy.utils.flux_to_diffusers(tiny_flux.model.model_config.unet_config)
    native = tiny_flux.model.diffusion_model.state_dict()
    tensors, shapes = {}, {}
    for index, (key, target) in enumerate(table.items()):
        source, offset = (target, None) if isinstance(target, str) else target[:2]
        is_native = key.endswith(".weight") and source in native and native[source].dim() == 2
        if not is_native or ".to_v" in key or "qkv_mlp_proj" in key or ".attn.to_out.weight" in key or "linear_" in key:
            continue
        name, rows = key.removesuffix(".weight"), offset[2] if offset else len(native[source])
        update = random_update(rows, native[source].shape[1], index)
        name = name.replace(".", "_") if prefix == "lycoris_" else name
        suffixes = ("lora_down", "lora_up") if prefix == "lycoris_" else ("lora_A", "lora_B")
        tensors[f"{prefix}{name}.{suffixes[0]}.weight"], tensors[f"{prefix}{name}.{suffixes[1]}.weight"] = (
            update.down,
            update.up,
        )
        tensors[f"{prefix}{name}.alpha"] = torch.tensor(update.alpha)
        shapes[source] = native[source].shape
    actual = deltas(read(tiny_flux, tensors))
    assert {f"{name}.weight" for name in actual} == shapes.keys() and len(actual) >= 30
    if prefix == "base_model.model.":
        tensors = {key.replace(prefix, "transformer."): tensor for key, tensor in tensors.items()}
    reference = patched_deltas(tiny_flux, loaded_in_comfyui(tiny_flux, tensors, caplog))
    for name, expected in reference.items():
        assert (actual[name] - expected).norm() <= 1e-5 * expected.norm(), name
    rank = low_rank(read(tiny_flux, tensors)["double_blocks.0.img_attn.qkv"]).rank if prefix == "transformer." else 8
    assert rank == 8  # q's and k's


@pytest.mark.parametrize("compiled", ["double_blocks_0__orig_mod_", "_orig_mod_double_blocks_0_"])
def test_flat_names_of_a_compiled_model_are_read(compiled, tiny_flux, caplog):
    updates = random_updates(tiny_flux)
    updates = {name: updates[name] for name in ("double_blocks.0.img_attn.qkv", "double_blocks.0.img_mlp.2", "img_in")}
    tensors = LoraModel.from_modules(updates)
    sources = {key.replace("lora_unet_double_blocks_0_", f"lora_unet_{compiled}"): key for key in tensors}
    sources = {key.replace("lora_unet_img_in.", "lora_unet_img_in__orig_mod."): old for key, old in sources.items()}
    assert not sources.keys() & tensors.keys()
    assert_same_deltas(deltas(read(tiny_flux, {key: tensors[old] for key, old in sources.items()})), updates, 1e-6)
    assert normalised({key: tensors[old] for key, old in sources.items()}).keys() == tensors.keys()


def test_pieces_over_one_down_keep_its_rank():
    whole = random_update(9, 5, 1)
    pieces = [(start, LowRank(whole.down.clone(), whole.up[start : start + 3], whole.alpha)) for start in (6, 0)]
    fused = join_rows(pieces, 9)
    assert fused.rank == whole.rank
    expected = delta(whole)
    expected[3:6] = 0
    torch.testing.assert_close(fused.up.double() @ fused.down.double(), expected, rtol=1e-6, atol=1e-6)


def test_updates_of_the_same_rows_over_one_down_are_added():
    whole = random_update(6, 5, 1)
    other = LowRank(whole.down.clone(), 2 * whole.up.flip(0), whole.alpha)
    joined = join_rows([(0, whole), (0, other)], 6)
    expected = delta(whole) + delta(other)
    torch.testing.assert_close(joined.up.double() @ joined.down.double(), expected, rtol=1e-6, atol=1e-6)


def test_layers_of_another_model_are_told(tiny_flux, tiny_files):
    updates = random_updates(tiny_flux)
    tensors = convert(LoraModel.from_modules({"single_blocks.0.linear2": updates["single_blocks.0.linear2"]}))
    tensors["lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"] = torch.zeros(3, 2)
    tensors["diffusion_model.single_blocks.0.linear2.diff_b"] = torch.zeros(128)
    tensors["diffusion_model.single_blocks.77.linear2.lora_A.weight"] = torch.zeros(3, 2)
    reading = read_lora(tensors, family_of(tiny_flux), tiny_flux.model)
    assert list(reading.modules) == ["single_blocks.0.linear2"] and reading.text_encoder == 1
    assert reading.other_weights == ("single_blocks.0.linear2.bias",)
    assert reading.unknown == ("diffusion_model.single_blocks.77.linear2.lora_A.weight",)
    wan = tiny.load_wan(tiny_files["wan"])
    assert read_lora(tensors, family_of(wan), wan.model).modules == {}


@pytest.mark.parametrize("algorithm", ["LoHa", "LoKr", "OFT"])
def test_other_adapters_come_as_the_tensors_of_their_files(tiny_flux, algorithm):
    from comfy_extras.nodes_train import _setup_lora_adapters

    trained, _ = _setup_lora_adapters(tiny_flux.clone(), {}, algorithm, torch.float32, 4)
    plain = {key: value.detach().clone() for key, value in trained.items()}
    reading = read_lora(plain, family_of(tiny_flux), tiny_flux.model)
    name = "double_blocks.1.txt_mlp.2"
    prefix = f"diffusion_model.{name}."
    tensors = {key.removeprefix(prefix): value for key, value in plain.items() if key.startswith(prefix)}
    tensors.pop("diff_b")
    assert reading.modules[name].keys() == tensors.keys() and len(tensors) > 1
    assert all(torch.equal(reading.modules[name][suffix], tensor.float()) for suffix, tensor in tensors.items())
