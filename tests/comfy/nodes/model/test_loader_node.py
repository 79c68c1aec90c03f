"""Load Diffusion Model gives MODELs that sample, whatever format the file has, with or without blocks that stream."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sd
import folder_paths
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tessera.memory.swap.patcher import SwapPatcher
from tessera.models.blocks import find_blocks, most_blocks
from tessera.models.catalogue.swapped_model import SwapSettings, swap_settings_of
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tessera.nodes.model.load import TesseraLoadDiffusionModel
from tiny.models.sampling import sample

ALL = [f"diffusion_model.{name}_blocks.{i}" for name in ("double", "single") for i in range(2)]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the node on a file, under inference mode as the executor does."""

    def run(path: Path, weight_dtype: str = "default", **inputs: Any) -> Any:
        monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda *_: str(path))
        with torch.inference_mode():
            return TesseraLoadDiffusionModel.execute(path.name, weight_dtype, **inputs)

    return run


@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_that_the_node_loads_samples_as_one_of_cores_loader(scaled: bool, tmp_path: Path, load) -> None:
    path = tiny.write_flux(tmp_path / "flux.safetensors", fp8=scaled)
    whole, out = load(path), load(path, blocks_to_swap=4)
    node_model = whole.args[0]
    assert whole.ui == {"tessera": [{"notes": []}]}
    with torch.inference_mode():
        cores = tiny.load_flux(path)
    assert type(node_model) is type(cores) and swap_settings_of(node_model) is None
    picture = sample(cores, "flux")
    assert torch.equal(sample(node_model, "flux"), picture)
    swapped = out.args[0]
    assert list(swapped.swap.weights.blocks) == ALL and torch.equal(sample(swapped, "flux"), picture)


@pytest.mark.parametrize(
    ("inner", "compiled"),
    [("", "_orig_mod."), ("double_blocks.1.", "double_blocks.1._orig_mod."), ("", "model.diffusion_model._orig_mod.")],
)
def test_a_file_saved_from_a_compiled_model_loads_as_the_model(inner, compiled, tiny_files, load, tmp_path) -> None:
    """torch.compile of the model, of one block, and of the model in a checkpoint."""
    tensors = load_file(tiny_files["flux"])
    renamed = {name: compiled + name.removeprefix(inner) if name.startswith(inner) else name for name in tensors}
    assert len({*renamed.values()} - {*tensors}) > 8
    save_file({renamed[name]: tensor for name, tensor in tensors.items()}, tmp_path / "compiled.safetensors")
    whole = load(tmp_path / "compiled.safetensors").args[0]
    swapped = load(tmp_path / "compiled.safetensors", blocks_to_swap=4).args[0]
    expected = tiny.load_flux(tiny_files["flux"]).model.state_dict()
    for candidate in (whole, swapped):
        state = candidate.model.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    assert list(swapped.swap.weights.blocks) == ALL
    with pytest.raises(ValueError, match="blocks_to_swap is 5; this model has 4 blocks, so choose 0 to 4."):
        load(tmp_path / "compiled.safetensors", blocks_to_swap=5)


def test_such_a_file_of_no_model_is_named(load, tmp_path) -> None:
    save_file({"_orig_mod.other.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="Could not detect model type of other.safetensors: it isn't a diffusion"):
        load(tmp_path / "other.safetensors")


def test_settings_of_the_loader_are_those_of_block_swap_and_travel_with_the_model(tiny_files, load) -> None:
    out = load(tiny_files["flux"], blocks_to_swap=3, prefetch_blocks=2, pin_memory="off")
    model = out.args[0]
    assert list(model.swap.weights.blocks) == ALL[1:] and model.swap.options.prefetch == 2
    assert swap_settings_of(model.clone()) == SwapSettings(3, 2, "off")
    (payload,) = out.ui["tessera"]
    assert payload["notes"][0].startswith("Block swap: 3 of 4 blocks stream; the model takes ")


def test_odd_settings_are_said_on_the_node(tiny_files, load) -> None:
    out = load(tiny_files["flux"], blocks_to_swap=2, prefetch_blocks=5, pin_memory="on")
    (payload,) = out.ui["tessera"]
    if not torch.cuda.is_available():
        assert len(payload["notes"]) == 2
    assert payload["notes"][-2].startswith("Block swap: 2 of 4 blocks stream")
    assert payload["notes"][-1].startswith("prefetch_blocks is 5 with 2 swapped")


def test_minus_one_goes_by_the_bytes_that_were_loaded(tiny_files, load, monkeypatch) -> None:
    whole = load(tiny_files["flux"]).args[0]
    room = whole.model_size() * 8 // 10 + int(whole.memory_required([1, 16, 128, 128]))
    room += int(comfy.model_management.extra_reserved_memory())
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *_, **__: room)
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])
    fp8 = load(tiny_files["flux"], "fp8_e4m3fn", blocks_to_swap=-1).args[0]
    fp32 = load(tiny_files["flux"], blocks_to_swap=-1).args[0]
    assert not isinstance(fp8, SwapPatcher) and swap_settings_of(fp8) == SwapSettings(-1)
    assert isinstance(fp32, SwapPatcher) and fp32.model_size() <= whole.model_size() * 8 // 10


def test_the_file_is_read_once_and_without_dynamic_vram_where_blocks_stream(tiny_files, load, monkeypatch) -> None:
    """ComfyUI's dynamic VRAM would load the MODEL once, and block swap once more without it."""
    real, calls = comfy.sd.load_diffusion_model, []

    def loading(*args: Any, disable_dynamic: bool = False, **options: Any) -> Any:
        calls.append(disable_dynamic)
        return real(*args, disable_dynamic=disable_dynamic, **options)

    monkeypatch.setattr(comfy.sd, "load_diffusion_model", loading)
    load(tiny_files["flux"])
    load(tiny_files["flux"], blocks_to_swap=-1)
    load(tiny_files["flux"], blocks_to_swap=4)
    assert calls == [False, True, True]


def test_a_model_whose_blocks_stream_is_loaded_into_ram_where_comfyui_keeps_models_on_the_gpu(
    tiny_files, load, monkeypatch
) -> None:
    """`--highvram` makes the GPU the device that models are loaded to, and one that is larger than it would fail."""
    real, loaded_to = comfy.sd.load_diffusion_model_state_dict, []

    def loading(*args: Any, model_options: dict[str, Any], **options: Any) -> Any:
        loaded_to.append(model_options.get("offload_device"))
        return real(*args, model_options=model_options, **options)

    monkeypatch.setattr(comfy.sd, "load_diffusion_model_state_dict", loading)
    load(tiny_files["flux"])
    load(tiny_files["flux"], blocks_to_swap=2)
    assert loaded_to == [None, torch.device("cpu")]


@pytest.mark.parametrize("name", ["flux", "flux2", "wan", "wan_vace", "qwen_image", "sdxl"])
def test_a_files_names_tell_how_many_blocks_there_can_be(name: str, tiny_files) -> None:
    with safe_open(tiny_files[name], framework="pt") as file:
        matrices = [n for n in file.keys() if n.endswith(".weight") and len(file.get_slice(n).get_shape()) > 1]
    block_count = len(find_blocks(tiny.load_model(name, tiny_files[name]).model.diffusion_model))
    assert most_blocks(matrices) >= block_count and (most_blocks(matrices) == block_count or name == "sdxl")


def test_more_blocks_than_the_file_holds_are_refused_before_it_is_loaded(
    tiny_files, load, tmp_path, monkeypatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was loaded")

    scaled = tiny.write_flux(tmp_path / "flux.safetensors", fp8=True)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no header")
    monkeypatch.setattr(comfy.sd, "load_diffusion_model", never)
    for path in (tiny_files["flux"], scaled):
        with pytest.raises(ValueError, match="blocks_to_swap is 5; this model has 4 blocks, so choose 0 to 4."):
            load(path, "fp8_e4m3fn", blocks_to_swap=5)
        with pytest.raises(AssertionError, match="loaded"):
            load(path, blocks_to_swap=4)
    with pytest.raises(AssertionError, match="loaded"):  # what is wrong with it loading says
        load(broken, blocks_to_swap=5)


def test_bad_input_is_one_sentence(tiny_files, load, tmp_path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(Path(tiny_files["flux"]).read_bytes()[:4])
    for blocks in (0, -1):
        with pytest.raises(ValueError, match=r"unet_name: cut.safetensors can't be read .* download it again\."):
            load(tmp_path / "cut.safetensors", blocks_to_swap=blocks)
    with pytest.raises(ValueError, match="blocks_to_swap is 5; this model has 4 blocks, so choose 0 to 4."):
        load(tiny_files["flux"], blocks_to_swap=5)
    swapped = load(tiny_files["flux"], blocks_to_swap=1).args[0]
    with pytest.raises(
        ValueError,
        match="already has block swap, from Load Diffusion Model .* or another Block Swap node; use only one",
    ):
        TesseraBlockSwap.execute(swapped, 1, 1, "auto")
