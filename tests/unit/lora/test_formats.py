"""LoRA layouts, checked on matrices against delta W = alpha / rank · up @ down written out."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.common.files import write_atomically
from tessera.lora.files.formats import convert, save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank, normalised
from tessera.models.flux.names import FLUX1_NAMES, FLUX2_NAMES
from tessera.models.name_table import flat_name

RANK = 4
ALPHA = 3.3
HIDDEN = 8


def module(rows: int, columns: int = HIDDEN, alpha: float = ALPHA) -> LowRank:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return LowRank(torch.randn(RANK, columns, generator=generator), torch.randn(rows, RANK, generator=generator), alpha)


def delta(part: LowRank) -> torch.Tensor:
    return part.up.double() @ part.down.double() * (part.alpha / part.down.shape[0])


def product(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()


@pytest.mark.parametrize("table", [FLUX1_NAMES, FLUX2_NAMES], ids=["flux", "flux2"])
def test_every_flux_module_name_comes_back_from_its_flat_form(table):
    names = [name.format(17) for name in table.to_diffusers]
    assert [table.native(flat_name(name)) for name in names] == names
    assert table.native("double_blocks_0_img_attn") is None
    assert table.native("blocks_0_self_attn_q") is None


def test_flux1_and_flux2_are_told_apart_by_shapes_and_names_and_by_what_the_lora_says():
    attention, outer = module(3 * HIDDEN), module(HIDDEN, 32)
    flux1 = {"double_blocks.0.img_attn.qkv": attention, "single_blocks.3.linear1": module(7 * HIDDEN)}
    flux2 = {"double_blocks.0.img_attn.qkv": attention, "single_blocks.3.linear1": module(9 * HIDDEN)}
    modulated = {"double_stream_modulation_img.lin": module(6 * HIDDEN), "time_in.in_layer": outer}
    for modules, table in (
        (flux1, FLUX1_NAMES),
        (flux2, FLUX2_NAMES),
        (modulated, FLUX2_NAMES),
        ({"time_in.in_layer": outer}, FLUX1_NAMES),
    ):
        assert LoraModel.from_modules(modules).table() is table
    said = {"tessera": json.dumps({"family": "flux2"})}
    assert LoraModel.from_modules({"time_in.in_layer": outer}, said).table() is FLUX2_NAMES
    for odd in ("", "no json", "[]", json.dumps({"family": "another"})):
        assert LoraModel.from_modules(flux1, {"tessera": odd}).table() is FLUX1_NAMES
    tensors = convert(LoraModel.from_modules(flux2), "diffusers")
    assert "transformer.single_transformer_blocks.3.attn.to_qkv_mlp_proj.lora_B.weight" in tensors
    assert "transformer.transformer_blocks.0.attn.to_v.lora_B.weight" in tensors


def test_flux2s_single_blocks_stay_whole_and_its_last_modulation_is_swapped_for_diffusers():
    joint, last = module(9 * HIDDEN), module(2 * HIDDEN)
    modules = {"single_blocks.7.linear1": joint, "final_layer.adaLN_modulation.1": last}
    tensors = convert(LoraModel.from_modules(modules), "diffusers")
    assert len(tensors) == 4
    fused = product(tensors, "transformer.single_transformer_blocks.7.attn.to_qkv_mlp_proj")
    torch.testing.assert_close(fused, delta(joint), rtol=1e-6, atol=1e-6)
    shift, scale = delta(last).chunk(2)
    matrix = product(tensors, "transformer.norm_out.linear")
    torch.testing.assert_close(matrix, torch.cat((scale, shift)), rtol=1e-6, atol=1e-6)


def test_a_lora_has_kohyas_keys_and_contiguous_tensors():
    part = module(24)
    transposed = LowRank(part.down.T.contiguous().T, part.up, part.alpha)
    lora = LoraModel.from_modules({"double_blocks.0.img_attn.qkv": transposed}, {"ss_steps": "5"})
    prefix = "lora_unet_double_blocks_0_img_attn_qkv"
    assert set(lora) == {f"{prefix}.lora_down.weight", f"{prefix}.lora_up.weight", f"{prefix}.alpha"}
    assert all(tensor.is_contiguous() for tensor in lora.values())
    assert lora[f"{prefix}.alpha"].shape == () and lora[f"{prefix}.alpha"].item() == pytest.approx(ALPHA)
    assert lora.metadata == {"ss_steps": "5"}


def test_comfyui_format_bakes_alpha_in_and_writes_none():
    part = module(24)
    tensors = convert(LoraModel.from_modules({"double_blocks.3.img_attn.qkv": part}), "comfyui")
    name = "diffusion_model.double_blocks.3.img_attn.qkv"
    assert set(tensors) == {f"{name}.lora_A.weight", f"{name}.lora_B.weight"}
    torch.testing.assert_close(product(tensors, name), delta(part), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rows", "heights"),
    [
        ("double_blocks.1.img_attn.qkv", 3 * HIDDEN, [HIDDEN] * 3),
        ("double_blocks.1.txt_attn.qkv", 3 * HIDDEN, [HIDDEN] * 3),
        ("single_blocks.7.linear1", 3 * HIDDEN + 20, [HIDDEN, HIDDEN, HIDDEN, 20]),
        ("double_blocks.1.img_mlp.0", 20, [20]),
        ("img_in", HIDDEN, [HIDDEN]),
    ],
)
def test_diffusers_parts_are_the_rows_of_the_fused_update(name, rows, heights):
    part = module(rows)
    tensors = convert(LoraModel.from_modules({name: part}), "diffusers")
    parts = [f"transformer.{target}" for target in FLUX1_NAMES.diffusers(name)]
    assert len(tensors) == 2 * len(heights)
    assert [product(tensors, target).shape[0] for target in parts] == heights
    together = torch.cat([product(tensors, target) for target in parts])
    torch.testing.assert_close(together, delta(part), rtol=1e-6, atol=1e-6)


def test_the_last_modulation_swaps_shift_and_scale_for_diffusers():
    part = module(10)
    tensors = convert(LoraModel.from_modules({"final_layer.adaLN_modulation.1": part}), "diffusers")
    shift, scale = delta(part).chunk(2)
    swapped = product(tensors, "transformer.norm_out.linear")
    torch.testing.assert_close(swapped, torch.cat((scale, shift)), rtol=1e-6, atol=1e-6)


def test_every_format_has_storage_of_its_own_for_each_tensor():
    lora = LoraModel.from_modules({"double_blocks.0.img_attn.qkv": module(24)})
    for layout in ("kohya", "comfyui", "diffusers"):
        tensors = convert(lora, layout)
        pointers = {tensor.untyped_storage().data_ptr() for tensor in (*tensors.values(), *lora.values())}
        assert len(pointers) == len(tensors) + len(lora)
        assert all(tensor.is_contiguous() for tensor in tensors.values())


def test_alpha_stays_exact_in_a_bf16_file():
    tensors = convert(LoraModel.from_modules({"img_in": module(HIDDEN, alpha=12.3)}), "kohya", "bf16")
    assert tensors["lora_unet_img_in.lora_up.weight"].dtype == torch.bfloat16
    assert tensors["lora_unet_img_in.alpha"].item() == pytest.approx(12.3, rel=1e-7)


def test_a_value_that_fp16_can_not_hold_is_named():
    part = module(HIDDEN)
    lora = LoraModel.from_modules({"img_in": LowRank(part.down, part.up * 1e6, part.alpha)})
    with pytest.raises(ValueError, match=r"dtype fp16 can't hold .*img_in\.lora_up.*65504; choose bf16 or fp32"):
        convert(lora, "kohya", "fp16")
    assert convert(lora, "kohya", "bf16")


def test_a_lora_that_holds_nan_is_not_written():
    part = module(HIDDEN)
    part.up[2, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite values"):
        convert(LoraModel.from_modules({"img_in": part}))


@pytest.mark.parametrize(("kind", "down", "up"), [("core", "lora_down", "lora_up"), ("peft", "lora_A", "lora_B")])
def test_plain_dicts_in_comfyuis_names_are_taken(kind, down, up):
    part = module(24, alpha=float(RANK))
    name = "diffusion_model.double_blocks.0._orig_mod.img_attn.qkv"
    plain = {f"{name}.{down}.weight": part.down, f"{name}.{up}.weight": part.up}
    if kind == "core":
        plain[f"{name}.alpha"] = torch.tensor(1.0)
        part = LowRank(part.down, part.up, 1.0)
    modules = normalised(plain).modules()
    assert list(modules) == ["double_blocks.0.img_attn.qkv"]
    torch.testing.assert_close(delta(modules["double_blocks.0.img_attn.qkv"]), delta(part))


def test_updates_of_other_kinds_keep_their_tensors_in_comfyuis_formats():
    plain = {
        "diffusion_model.img_in.hada_w1_a": torch.randn(8, 2),
        "diffusion_model.img_in.alpha": torch.tensor(1.0),
        "diffusion_model.img_in.diff_b": torch.randn(8),
        "diffusion_model.double_blocks.0.img_attn.norm.key_norm.diff": torch.randn(4),
    }
    assert set(convert(plain, "comfyui")) == set(plain)
    assert set(convert(plain, "kohya")) == {
        "lora_unet_img_in.hada_w1_a",
        "lora_unet_img_in.alpha",
        "lora_unet_img_in.diff_b",
        "lora_unet_double_blocks_0_img_attn_norm_key_norm.diff",
    }
    with pytest.raises(ValueError, match="format diffusers carries plain LoRA pairs only"):
        convert(plain, "diffusers")


def test_names_of_another_family_are_kept_where_they_were_known():
    part = module(HIDDEN)
    lora = LoraModel.from_modules({"layers.0.attention.qkv": part})
    assert "diffusion_model.layers.0.attention.qkv.lora_A.weight" in convert(lora, "comfyui")
    with pytest.raises(ValueError, match="choose kohya or comfyui"):
        convert(lora, "diffusers")
    with pytest.raises(ValueError, match="choose kohya"):
        convert(dict(lora), "comfyui")


PAIR = {f"lora_unet_img_in.lora_{way}.weight": torch.ones(2, 2) for way in ("down", "up")}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({}, "lora is empty"),
        ({"lora_te1_text_model_x.alpha": torch.tensor(1.0)}, "lora_te1_text_model_x.alpha"),
        ({"lora_unet_img_in.lora_up.weight": torch.ones(2, 2)}, "half of the pair for img_in"),
        (
            PAIR | {"lora_unet_img_in.alpha": torch.ones(3)},
            "lora holds 3 numbers as the alpha of img_in instead of one; tra",
        ),
        (
            PAIR | {"lora_unet_img_in.lora_down.weight": torch.ones(2)},
            r"lora_down.weight of img_in in the shape \(2,\)",
        ),
        (
            PAIR | {"lora_unet_img_in.lora_up.weight": torch.ones(0, 2)},
            r"in the shape \(0, 2\), which isn't a matrix; t",
        ),
        (PAIR | {"lora_unet_img_in.config": {"rank": 4}}, "lora holds a dict as 'lora_unet_img_in.config'; train or"),
    ],
)
def test_files_without_a_lora_of_a_diffusion_model_are_refused(lora, message):
    with pytest.raises(ValueError, match=message):
        convert(lora)


def test_unknown_formats_and_dtypes_are_named():
    lora = LoraModel.from_modules({"img_in": module(HIDDEN)})
    with pytest.raises(ValueError, match="format is 'a1111'; choose one of kohya, comfyui, diffusers"):
        convert(lora, "a1111")
    with pytest.raises(ValueError, match="dtype is 'fp8'"):
        convert(lora, "kohya", "fp8")


def test_a_saved_file_is_a_round_trip(tmp_path: Path):
    part = module(24)
    lora = LoraModel.from_modules({"double_blocks.0.img_attn.qkv": part}, {"note": "/home/somebody/pictures"})
    for layout in ("kohya", "comfyui"):
        path = tmp_path / "new folder" / f"{layout}.safetensors"
        save_lora(path, lora, layout)
        (reread,) = normalised(load_file(path)).modules().values()
        torch.testing.assert_close(delta(reread), delta(part), rtol=1e-6, atol=1e-6)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"note": "pictures"}
    assert sorted(p.name for p in path.parent.iterdir()) == ["comfyui.safetensors", "kohya.safetensors"]


def test_a_saved_file_has_the_permissions_of_any_new_file(tmp_path: Path):
    (tmp_path / "plain").touch()
    save_lora(tmp_path / "a", LoraModel.from_modules({"img_in": module(HIDDEN)}))
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


# A limit on the file size of this process is the one full disk that needs no rights: the kernel ends the write.
FULL_DISK = """
import json, resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
sys.path.insert(0, sys.argv[2])
import with_comfyui
from tessera.lora.files.formats import save_lora
from tessera.lora.files.lora_model import LoraModel, LowRank
lora = LoraModel.from_modules({"img_in": LowRank(torch.ones(64, 4096), torch.ones(4096, 64), 64.0)})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_lora(Path(sys.argv[1]), lora)
except OSError as error:
    print(json.dumps([str(error), error.errno]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no RLIMIT_FSIZE")
def test_a_full_disk_leaves_the_old_file_and_says_so_in_one_sentence(tmp_path: Path):
    path = tmp_path / "mine.safetensors"
    path.write_bytes(b"the old file")
    support = str(Path(__file__).resolve().parents[2] / "support")
    command = [sys.executable, "-c", FULL_DISK, str(path), support]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    message, code = json.loads(process.stdout.strip().splitlines()[-1])
    assert code == errno.EFBIG
    assert message.count("mine.safetensors could not be saved: the file is larger than this disk") == 1
    assert str(tmp_path) not in message
    assert [p.name for p in tmp_path.iterdir()] == ["mine.safetensors"]
    assert path.read_bytes() == b"the old file"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_told_with_its_fix(tmp_path: Path):
    def write(beside: Path) -> None:
        beside.write_bytes(b"half")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(OSError, match="a.bin could not be saved: the disk is full; free some space"):
        write_atomically(tmp_path / "a.bin", write)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing_behind(tmp_path: Path):
    def write(beside: Path) -> None:
        beside.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a.bin", write)
    assert list(tmp_path.iterdir()) == []
