"""`quantize` of Load Diffusion Model: the blocks in 8 bit, in formats of ComfyUI's own."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import pytest
import tiny
import torch
from comfy import model_detection
from comfy.model_management import InterruptProcessingException
from comfy.quant_ops import QuantizedTensor
from safetensors.torch import load_file, save_file
from tessera.memory.low_bit import quantize as quantize_module
from tessera.nodes.model import model_file
from tessera.nodes.model.load import TesseraLoadDiffusionModel
from thinned import one_in
from tiny.models.sampling import sample
from tiny.native import ROWS
from tiny.native.row import build
from tiny.train.runs import sample as data_sample
from tiny.train.runs import train, training_data

# Of a layer's weight and of what the model makes of it, measured on these: 0.0071 and 0.024.
BOUNDS = {"int8": 0.01, "fp8": 0.03}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the node on a file, under inference mode as the executor does."""

    def run(path: Path | str, quantize: str, weight_dtype: str = "default", **inputs: Any) -> tuple[Any, list[str]]:
        monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda *_: str(path))
        with torch.inference_mode():
            out = TesseraLoadDiffusionModel.execute(Path(path).name, weight_dtype, quantize=quantize, **inputs)
        return out.args[0], out.ui["tessera"][0]["notes"]

    return run


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("quantize", BOUNDS)
@pytest.mark.parametrize("name", ["flux", "flux2", "wan", "wan_vace"])
def test_the_linears_of_blocks_are_in_8_bit_and_nothing_else_is(name: str, quantize: str, tiny_files, load) -> None:
    whole = tiny.load_model(name, tiny_files[name]).model.diffusion_model
    model, notes = load(tiny_files[name], quantize)
    count = 0
    for path, module in model.model.diffusion_model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is None:
            continue
        expected = whole.get_submodule(path).weight
        inside = any(part.isdigit() for part in path.split("."))
        if isinstance(weight, QuantizedTensor):
            count += 1
            assert inside and weight.ndim == 2 and relative(weight.dequantize(), expected) < BOUNDS[quantize]
        else:
            assert torch.equal(weight, expected) and not (isinstance(module, torch.nn.Linear) and _is_in_block(path))
    assert count > 8 and notes[0].startswith(
        f"quantize: {count} layers of the blocks were converted to {quantize} in 0 s; "
    )


def _is_in_block(path: str) -> bool:
    return any(f"{blocks}." in path for blocks in ("double_blocks", "single_blocks", "transformer_blocks"))


@pytest.mark.parametrize(("quantize", "bound"), [("int8", 0.03), ("fp8", 0.06)])
def test_a_quantized_model_samples_swaps_and_saves_as_a_file_that_core_loads(
    quantize: str, bound: float, tiny_files, load, tmp_path
):
    whole = sample(tiny.load_flux(tiny_files["flux"]), "flux")
    model, _ = load(tiny_files["flux"], quantize)
    picture = sample(model, "flux")
    assert 1e-4 < relative(picture, whole) < bound
    swapped, notes = load(tiny_files["flux"], quantize, blocks_to_swap=3)
    assert torch.equal(sample(swapped, "flux"), picture) and len(notes) >= 2
    state = {key: tensor.contiguous() for key, tensor in model.model.diffusion_model.state_dict().items()}
    save_file(state, tmp_path / "saved.safetensors")
    with torch.inference_mode():
        cores = comfy.sd.load_diffusion_model(str(tmp_path / "saved.safetensors"))
    assert torch.equal(sample(cores, "flux"), picture)


@pytest.mark.parametrize("quantize", one_in(2, BOUNDS))
def test_training_reads_the_stored_8_bit(quantize: str, tiny_files, load, tmp_path, monkeypatch) -> None:
    """As it reads the same weights from a file that held them so."""
    monkeypatch.setattr(model_file, "LONG", -1.0)
    path = Path(tmp_path / "flux.safetensors")
    path.write_bytes(Path(tiny_files["flux"]).read_bytes())
    model, _ = load(path, quantize)
    with torch.inference_mode():
        cores = comfy.sd.load_diffusion_model(str(model_file.quantized_file(str(path), quantize)))
    data = training_data(data_sample("a", 64, 64))
    our_lora, core_lora = (train(m, data, tmp_path / str(i), steps=2).lora for i, m in enumerate((model, cores)))
    assert our_lora.keys() == core_lora.keys() and all(torch.equal(our_lora[key], core_lora[key]) for key in our_lora)


def test_weights_that_took_long_are_kept_beside_and_read_the_next_time(tiny_files, load, tmp_path, monkeypatch) -> None:
    path = Path(tmp_path / "flux.safetensors")
    path.write_bytes(Path(tiny_files["flux"]).read_bytes())
    load(path, "int8")
    assert not model_file.quantized_file(str(path), "int8").exists()  # it took no minute
    monkeypatch.setattr(model_file, "LONG", -1.0)
    first, notes = load(path, "int8")
    assert notes[-1].startswith(
        "quantize: saved as flux.int8.safetensors (0.0 GiB), and loaded from there from now on."
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["flux.int8.safetensors", "flux.safetensors"]

    def never(*_: Any) -> Any:
        raise AssertionError("it was quantised once more")

    with monkeypatch.context() as patched:
        patched.setattr(model_file, "quantize_weights", never)
        second, notes = load(path, "int8")
        assert notes == ["quantize: loaded from flux.int8.safetensors, where the blocks are in int8."]
        assert torch.equal(sample(first, "flux"), sample(second, "flux"))
        with pytest.raises(AssertionError, match="once more"):  # another file under the old name
            path.write_bytes(tiny.write_flux(tmp_path / "other.safetensors", seed=1).read_bytes())
            load(path, "int8")
    cache_file = model_file.quantized_file(str(path), "int8")
    save_file({"a": torch.zeros(1)}, cache_file)
    assert load(path, "int8")[1][-1] == (
        "quantize: not saved, because flux.int8.safetensors already exists and was not made by this node."
    )
    assert list(load_file(cache_file)) == ["a"]
    cache_file.write_bytes(cache_file.read_bytes()[:40])
    assert load(path, "int8")[1][-1] == (
        "quantize: not saved, because flux.int8.safetensors already exists and is damaged; delete it."
    )
    cache_file.unlink()
    monkeypatch.setattr(model_file.shutil, "disk_usage", lambda _: type("", (), {"free": 0})())
    note = load(path, "int8")[1][-1]
    assert note == f"quantize: not saved, because {tmp_path.name} doesn't have 0.0 GiB of free disk space."


def test_weights_in_8_bit_and_those_that_cannot_be_stay_and_are_named(tiny_files, load, tmp_path) -> None:
    tensors = load_file(tiny_files["flux"])
    names = [name for name in tensors if name.startswith("double_blocks.0.") and tensors[name].ndim == 2]
    for name, change in zip(names, (torch.Tensor.zero_, lambda t: t.fill_(torch.nan)), strict=False):
        change(tensors[name])
    save_file(tensors, tmp_path / "odd.safetensors")
    model, notes = load(tmp_path / "odd.safetensors", "fp8")
    modules = ", ".join(name.removesuffix(".weight") for name in names[:2])
    assert notes[1] == f"quantize: {modules} stayed as stored: all zero, or not finite."
    assert not isinstance(model.model.diffusion_model.get_parameter(names[0]), QuantizedTensor)

    scaled = tiny.write_flux(tmp_path / "scaled.safetensors", fp8=True)
    _, notes = load(scaled, "int8")
    assert notes[0] == "quantize is 'int8', but no layer was converted."
    assert " more stayed as stored: already in 8 bit or less." in notes[1]


@pytest.mark.parametrize("name", ["hidream", "krea-2"])
def test_only_linears_that_come_out_as_they_were_are_taken(name: str, tmp_path, monkeypatch) -> None:
    """HiDream's gates are no Linears."""
    (row,) = (row for row in ROWS if row.name == name)
    detect = model_detection.detect_unet_config
    path = str(tmp_path / "model.safetensors")
    state = build(row, torch.bfloat16).model.diffusion_model.state_dict()
    save_file({key: tensor.detach().clone().contiguous() for key, tensor in state.items()}, path)
    monkeypatch.setattr(model_detection, "detect_unet_config", lambda *a, **k: {**(detect(*a, **k) or {}), **row.unet})
    with torch.inference_mode():
        core = comfy.sd.load_diffusion_model(path).model.diffusion_model
        model, said = model_file.open_quantized(path, {}, "int8", False)
    count = 0
    for key, expected in core.named_parameters():
        parameter = model.model.diffusion_model.get_parameter(key)
        if isinstance(parameter, QuantizedTensor):
            count += 1
            assert relative(parameter.dequantize(), expected) < BOUNDS["int8"], key
        else:
            assert torch.equal(parameter, expected), key
    assert said[0].startswith(f"quantize: {count} layers of the blocks were converted to int8") and count > 10
    messages = [sentence for sentence in said if sentence.endswith(f": {model_file.NO_LINEAR}.")]
    assert len(messages) == (name != "krea-2")


def test_convolutions_in_blocks_are_named(load, tmp_path) -> None:
    tensors = load_file(tiny.write_flux(tmp_path / "flux.safetensors"))
    tensors["double_blocks.0.img_attn.extra.weight"] = torch.ones(2, 2, 3, 3)
    save_file(tensors, tmp_path / "more.safetensors")
    _, said = load(tmp_path / "more.safetensors", "fp8")
    assert said[1:] == ["quantize: double_blocks.0.img_attn.extra stayed as stored: a convolution."]


@pytest.mark.parametrize(("columns", "size"), [(512, 256), (192, 64), (48, 16), (81, None)])
def test_int8_is_rotated_by_the_largest_matrix_that_fits(columns: int, size: int | None) -> None:
    weight = torch.randn(33, columns, generator=torch.Generator().manual_seed(0))
    tensors = {"a.0.b.weight": weight}
    result = quantize_module.quantize_weights(tensors, ["a.0.b.weight"], "int8", torch.device("cpu"), lambda *_: None)
    described = json.loads(bytes(tensors["a.0.b.comfy_quant"].tolist()))
    assert described.get("convrot_groupsize") == size and result.unrotated == (size is None)
    assert tensors["a.0.b.weight"].dtype == torch.int8 and tensors["a.0.b.weight_scale"].shape == (33, 1)


def test_memory_is_that_of_8_bit_and_a_slice(load, tmp_path, monkeypatch) -> None:
    path = tiny.write_flux(tmp_path / "flux.safetensors", hidden=1024, depth=1, depth_single=4, dtype=torch.bfloat16)
    sizes: list[int] = []
    real = model_file.quantize_weights

    def watched(*args: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
            result = real(*args)
        changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes.sort(key=lambda event: event.start_ns())
        sizes.extend((max(accumulate(event.nbytes() for event in changes)), result.bytes_after, result.bytes_before))
        return result

    monkeypatch.setattr(quantize_module, "SLICE", 1 << 18)
    monkeypatch.setattr(model_file, "quantize_weights", watched)
    load(path, "int8")
    peak, after, before = sizes
    # In fp32: the slice, rotated, scaled, rounded. The bf16 weights stay in the mapped file.
    assert after < peak < after + 5 * 4 * quantize_module.SLICE < before


def test_bad_input_is_one_sentence_and_cancel_is_obeyed(tiny_files, load, tmp_path, monkeypatch) -> None:
    with pytest.raises(
        ValueError, match="quantize is 'int8' and weight_dtype is 'fp8_e4m3fn', but only one of them can choose"
    ):
        load(tiny_files["flux"], "int8", "fp8_e4m3fn")
    transformer_tensors = {f"transformer_{name}": tensor for name, tensor in load_file(tiny_files["flux"]).items()}
    save_file(transformer_tensors, tmp_path / "others.safetensors")
    with pytest.raises(ValueError, match="quantize is 'fp8', but the names in others.safetensors are not ComfyUI's"):
        load(tmp_path / "others.safetensors", "fp8")

    def cancelled() -> None:
        raise InterruptProcessingException

    monkeypatch.setattr(model_file.comfy.model_management, "throw_exception_if_processing_interrupted", cancelled)
    with pytest.raises(InterruptProcessingException):
        load(tiny_files["flux"], "int8")
