"""Every spelling that a known trainer writes is read as the same update of the same layer."""

from dataclasses import replace
from functools import lru_cache

import pytest
import tiny
import torch
from tessera.lora.files.lora_model import low_rank
from tessera.lora.files.patches import DoesNotFit
from tessera.lora.files.reader import read_lora, read_patches
from tessera.models.catalogue.registry import family_of
from tessera.models.convolutions import layer_shapes
from tiny.lora.lora_files import delta, random_update
from tiny.lora.spellings import KOHYA, NAMED, PEFT, SPELLINGS, Spelling
from tiny.models.chroma import load_chroma, write_chroma
from tiny.native import ROWS, build

ROW_BY_NAME = {row.name: row for row in ROWS}
OWN = ("flux", "flux2", "qwen_image", "wan")


@pytest.fixture(scope="module")
def models(tiny_files, tmp_path_factory):
    @lru_cache
    def load(name):
        if name == "chroma":
            return load_chroma(write_chroma(tmp_path_factory.mktemp("chroma") / "chroma.safetensors"))
        return tiny.load_model(name, tiny_files[name]) if name in OWN else build(ROW_BY_NAME[name])

    return load


def tensors_of(row, update):
    values = (update.down, update.up, torch.tensor(update.alpha))
    return {key.format(row.name): value for key, value in zip(row.tensors, values, strict=False)}


def change(parts):
    module = low_rank(parts)
    return module.scaled_up.double() @ module.down.double()


def test_spellings_are_as_many_as_are_promised():
    assert len(set(SPELLINGS)) == len(SPELLINGS) > 60


@pytest.mark.parametrize("row", SPELLINGS, ids=lambda row: f"{row.model}: {row.name.format('')}")
def test_a_spelling_is_the_layer_s_update(row, models):
    model = models(row.model)
    rows, columns = layer_shapes(model.model)[row.layer]
    start, size = row.rows or (0, rows)
    update = random_update(size, columns, 3)
    read = read_lora(tensors_of(row, update), family_of(model), model.model)
    assert (read.unknown, read.other_layers, read.doubled, list(read.modules)) == ((), (), (), [row.layer])
    expected = torch.zeros(rows, columns, dtype=torch.float64)
    scale = 1 if len(row.tensors) == 3 else 4 / update.alpha  # without an alpha it is the rank
    expected[start : start + size] = scale * delta(update)
    assert (change(read.modules[row.layer]) - expected).norm() <= 1e-6 * expected.norm()


FLAT_WRAPPERS = (
    *("lora_prior_unet", "lora_dit", "lora_transformer", "base_model_model", "diffusion_model", "transformer"),
    *("net", "unet", "dit", "model", "module", "lycoris", "Hunyuan_video_I2V_lora"),
)
NESTED = Spelling(
    "flux", "", "pipe.module.transformer.base_model.model.diffusion_model.double_blocks.0.img_attn.qkv", PEFT, ""
)


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        (NESTED.name, True),
        ("lycoris_diffusion_model_double_blocks_0_img_attn_qkv", True),
        *(
            (f"{wrapper}.double_blocks.0.img_attn.qkv", True)
            for wrapper in ("dit", "net", "unet", "model", "lora_unet")
        ),
        *((f"{wrapper}_double_blocks_0_img_attn_qkv", True) for wrapper in FLAT_WRAPPERS),
        ("double_blocks.0._checkpoint_wrapped_module.img_attn.qkv", True),
        ("model.module.model.module.model.module.double_blocks.0.img_attn.qkv", True),
        ("other.double_blocks.0.img_attn.qkv", False),
        ("other_double_blocks_0_img_attn_qkv", False),
        ("transformer.refiner.double_blocks.0.img_attn.qkv", False),
        ("pipe.dit2.double_blocks.0.img_attn.qkv", False),
        ("transformer_2.double_blocks.0.img_attn.qkv", False),
        ("model." * 300 + "double_blocks.0.img_attn.qkv", False),
        ("double_blocks.0." + "_fsdp_wrapped_module." * 60 + "img_attn.qkv", False),
    ],
)
def test_wrappers_nest_and_another_prefix_is_another_module(name, is_same, tiny_flux):
    update = random_update(384, 128, 1)
    tensors = tensors_of(NESTED._replace(name=name), update)
    read = read_lora(tensors, family_of(tiny_flux), tiny_flux.model)
    assert list(read.modules) == (["double_blocks.0.img_attn.qkv"] if is_same else [])
    assert (read.other_layers, len(read.unknown)) == (((), 0) if is_same else ((name,), 2))


def test_a_module_whose_name_ends_like_one_of_the_main_model_is_left_alone(models):
    model = models("ltx-2")
    name = "connectors.audio_connector.transformer_blocks.0.attn1.to_q"
    tensors = tensors_of(Spelling("", "", f"transformer.{name}", PEFT, ""), random_update(48, 48, 1))
    read = read_lora(tensors, family_of(model), model.model)
    assert (read.modules, read.other_layers) == ({}, (f"transformer.{name}",))


def test_blocks_of_another_model_are_not_taken_for_a_wrapper(models):
    model = models("wan")
    name = "lora_unet_transformer_blocks_0_attn1_to_q"  # of LTX-Video, where diffusers has blocks.0.attn1.to_q of Wan
    read = read_lora(
        tensors_of(Spelling("", "", name, KOHYA, ""), random_update(128, 128, 1)), family_of(model), model.model
    )
    assert (read.modules, read.other_layers) == ({}, (name,))


@pytest.mark.parametrize(
    ("family", "names", "fused"),
    [
        ("wan", ("q", "k", "v"), "qkv"),
        ("anima", ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
        ("anima", ("q_proj", "k_proj", "v_proj"), "qkv"),
    ],
)
def test_one_layer_that_is_fused_in_the_file_is_cut(models, family, names, fused):
    model = models(family)
    shapes = layer_shapes(model.model)
    parts = [f"blocks.0.self_attn.{name}" for name in names]
    update = random_update(sum(shapes[part][0] for part in parts), shapes[parts[0]][1], 2)
    row = Spelling(family, "", f"blocks.0.self_attn.{fused}", KOHYA, "")
    read = read_lora(tensors_of(row, update), family_of(model), model.model)
    assert list(read.modules) == parts and not read.other_layers
    together = torch.cat([change(read.modules[part]) for part in parts])
    assert (together - delta(update)).norm() <= 1e-6 * together.norm()


def test_one_layer_in_the_file_of_layers_of_several_widths_is_another_module(models):
    """Queries of a picture are as wide as the model, and keys of a caption as wide as the text."""
    model = models("anima")
    shapes = layer_shapes(model.model)
    (rows, width), (_, text_width) = (shapes[f"blocks.0.cross_attn.{name}_proj"] for name in "qk")
    name = "blocks.0.cross_attn.qkv_proj"
    assert width != text_width
    tensors = tensors_of(Spelling("", "", name, KOHYA, ""), random_update(3 * rows, width, 1))
    read = read_lora(tensors, family_of(model), model.model)
    assert (read.modules, read.other_layers) == ({}, (name,))


def test_parts_are_no_names_of_a_fused_layer_with_fewer_heads_of_keys():
    row = ROW_BY_NAME["lumina-2"]
    model = build(replace(row, unet={**row.unet, "n_kv_heads": 1}))
    assert layer_shapes(model.model)["layers.0.attention.qkv"] == (128, 64)
    name = "layers.0.attention.k"
    tensors = tensors_of(Spelling("", "", name, KOHYA, ""), random_update(64, 64, 1))
    read = read_lora(tensors, family_of(model), model.model)
    assert (read.modules, read.other_layers) == ({}, (name,))


def test_parts_of_other_rows_than_the_layer_s_do_not_fit(tiny_flux):
    layer, tensors = "transformer.transformer_blocks.0.attn.to_", {}
    for part, rows in (("q", 64), ("k", 128)):
        tensors |= tensors_of(Spelling("", "", f"{layer}{part}", KOHYA, ""), random_update(rows, 128, rows))
    with pytest.raises(DoesNotFit, match="img_attn.qkv"):
        read_lora(tensors, family_of(tiny_flux), tiny_flux.model)


def test_two_updates_of_one_layer_are_added_and_named(tiny_flux):
    """Under two names, by two adapters, and a whole difference beside a pair."""
    layer, other = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj"
    first, second = random_update(384, 128, 1), random_update(384, 128, 2)
    tensors = tensors_of(Spelling("", "", f"diffusion_model.{layer}", KOHYA, ""), first)
    tensors |= tensors_of(Spelling("", "", f"lora_unet_{layer.replace('.', '_')}", KOHYA, ""), second)
    difference = torch.randn(128, 128, generator=torch.Generator().manual_seed(4))
    pair = random_update(128, 128, 3)
    tensors |= tensors_of(Spelling("", "", f"diffusion_model.{other}", KOHYA, ""), pair)
    tensors[f"diffusion_model.{other}.diff"] = difference
    read = read_lora(tensors, family_of(tiny_flux), tiny_flux.model)
    assert read.doubled == (f"{layer}.weight", f"{other}.weight")
    assert (change(read.modules[layer]) - delta(first) - delta(second)).norm() < 1e-5
    assert low_rank(read.modules[layer]).rank == 8
    assert sorted(patch.kind for patch in read.patches[other]) == ["full difference", "lora"]
    twice = tensors_of(Spelling("", "", layer, NAMED, ""), first)
    twice |= tensors_of(Spelling("", "", layer, ("{}.lora_A.b.weight", "{}.lora_B.b.weight"), ""), second)
    read = read_lora(twice, family_of(tiny_flux), tiny_flux.model)
    assert read.doubled == (f"{layer}.weight",) and low_rank(read.modules[layer]).rank == 8
    tensors = tensors_of(Spelling("", "", layer, PEFT, ""), first) | tensors_of(
        Spelling("", "", layer, ("{}.lora_down.weight", "{}.lora_up.weight"), ""), second
    )
    read = read_lora(tensors, family_of(tiny_flux), tiny_flux.model)
    assert read.doubled == (f"{layer}.weight",) and low_rank(read.modules[layer]).rank == 8


@pytest.mark.parametrize(
    "name", ["transformer.norm_out.linear", "lora_transformer_norm_out_linear", "base_model.model.norm_out.linear"]
)
@pytest.mark.parametrize("family", ["flux", "hunyuan-video"])  # the names of the latter are in our table alone
def test_scale_and_shift_of_diffusers_are_swapped_under_every_name(family, name, models):
    layer, model = "final_layer.adaLN_modulation.1", models(family)
    rows, columns = layer_shapes(model.model)[layer]
    update = random_update(rows, columns, 1)
    read = read_lora(tensors_of(Spelling("", "", name, KOHYA, ""), update), family_of(model), model.model)
    scale, shift = delta(update).chunk(2)
    assert (change(read.modules[layer]) - torch.cat([shift, scale])).norm() <= 1e-6 * delta(update).norm()


def test_two_updates_of_other_rows_are_no_doubles(tiny_flux):
    layer = "transformer.transformer_blocks.0.attn.to_"
    tensors = {}
    for part in "qkv":
        tensors |= tensors_of(Spelling("", "", f"{layer}{part}", KOHYA, ""), random_update(128, 128, ord(part)))
    read = read_lora(tensors, family_of(tiny_flux), tiny_flux.model)
    assert read.doubled == () and list(read.modules) == ["double_blocks.0.img_attn.qkv"]


def test_lengths_and_biases_of_peft_are_those_of_kohya_s_names(tiny_flux):
    layer = "double_blocks.0.img_attn.proj"
    update = random_update(128, 128, 1)
    tensors = tensors_of(Spelling("", "", f"base_model.model.{layer}", NAMED, ""), update)
    tensors[f"base_model.model.{layer}.lora_magnitude_vector.default.weight"] = torch.arange(1.0, 129.0)
    tensors[f"base_model.model.{layer}.lora_B.default.bias"] = torch.ones(128)
    read = read_lora(tensors, family_of(tiny_flux), tiny_flux.model)
    assert read.unknown == () and read.other_weights == (f"{layer}.bias",)
    assert torch.equal(read.modules[layer]["dora_scale"], torch.arange(1.0, 129.0)[:, None])


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        ("alpha", torch.ones(2), "alpha has 2 numbers in place of one"),
        ("lora_down.weight", torch.ones(0, 128), "lora_down.weight is empty, as of a rank of 0"),
    ],
)
def test_tensors_of_a_shape_that_no_update_has_are_named(key, tensor, message, tiny_flux):
    layer = "double_blocks.0.img_attn.proj"
    tensors = tensors_of(Spelling("", "", f"diffusion_model.{layer}", KOHYA, ""), random_update(128, 128, 1))
    tensors[f"diffusion_model.{layer}.{key}"] = tensor
    with pytest.raises(DoesNotFit, match=f"{layer}.{message}"):
        read_lora(tensors, family_of(tiny_flux), tiny_flux.model)


def test_text_encoders_are_counted(tiny_flux):
    names = [
        "lora_te1_text_model_encoder_layers_0_mlp_fc1",
        "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
        "base_model.model.text_encoder.x",
        "text_encoders.t5xxl.transformer.encoder.block.0.x",
        "clip_l.transformer.text_model.x",
        "lora_text_encoder.layers.0.q",
        "lora_prior_te_layers_0",
        "te2.layers.0.q",
    ]
    tensors = {f"{name}.lora_up.weight": torch.zeros(2, 2) for name in names}
    family = family_of(tiny_flux)
    read = read_patches(tensors, family.names, tiny_flux.model)
    assert len(read.text_encoder) == len(names) and not read.other_layers and not read.unknown
