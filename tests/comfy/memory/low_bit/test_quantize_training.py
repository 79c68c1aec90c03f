"""`quantize` of Training Memory: the blocks in 8 bit while they train, and the MODEL as it was."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from tessera.lora.plan import choose_targets
from tessera.memory.low_bit.quantize import AS_STORED
from tessera.memory.weights import frozen
from tessera.memory.weights.frozen import FrozenWeights
from tessera.nodes.model.model_file import open_quantized
from tessera.train.checkpoint.metadata import collect_facts, metadata_for
from tessera.train.config.settings import MemoryOptions
from tessera.train.placement import auto
from tiny.memory.gguf import flux_state, kind_of, model_of
from tiny.memory.gguf_runs import plain_lora, with_lora
from tiny.memory.swapping import assert_same_run
from tiny.native import NAMED
from tiny.native.step import trainer_of
from tiny.train.runs import run_settings

FORMATS = ("int8", "fp8")
every_format = pytest.mark.parametrize("quantize", FORMATS)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    return tiny.write_flux(folder / "flux.safetensors", depth=1, depth_single=2, dtype=torch.bfloat16, denoiser=True)


def loaded(path: Path) -> Any:
    with torch.inference_mode():  # as a node loads it
        return tiny.load_flux(path)


def trained(model: Any, folder: Path, **memory: Any) -> Any:
    data = tiny.make_data([(6, 6), (4, 9)], [40, 40])
    options = MemoryOptions(**{"checkpointing": "none"} | memory)
    trainer = tiny.make_trainer(model, data, folder, steps=2, memory=options)
    tiny.fill_up_matrices(trainer)
    trainer.run()
    return trainer


def metadata_of(trainer: Any) -> dict[str, str]:
    """The metadata of the LoRA file."""
    return metadata_for(
        collect_facts(trainer.settings, trainer.context.family, trainer.context.patcher, trainer.context.data, ""), {}
    )


@every_format
def test_a_converted_run_trains_as_on_a_model_loaded_so_and_leaves_the_model(quantize, wide_file, tmp_path) -> None:
    model = loaded(wide_file)
    initial = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    converted_run = trained(model, tmp_path, quantize=quantize)
    with torch.inference_mode():
        converted = open_quantized(str(wide_file), {}, quantize, False)[0]
    reference = trained(converted, tmp_path)
    assert_same_run(converted_run, reference)
    assert converted_run.progress.loss != trained(model, tmp_path).progress.loss
    header = json.loads(metadata_of(reference)["tessera"])
    assert (header["loader_quantize"], header["memory"]["quantize"]) == (quantize, AS_STORED)
    header = json.loads(metadata_of(converted_run)["tessera"])
    assert (header["loader_quantize"], header["memory"]["quantize"]) == (AS_STORED, quantize)
    notes = [run.summary().get("quantize") for run in (converted_run, reference, trained(model, tmp_path))]
    by_training = {"load_diffusion_model": AS_STORED, "training_memory": quantize}
    assert notes == [by_training, {"load_diffusion_model": quantize, "training_memory": AS_STORED}, None]
    after = model.model.state_dict()
    assert initial.keys() == after.keys()
    assert all(after[name].dtype == t.dtype and torch.equal(after[name], t) for name, t in initial.items())
    swapped = trained(model, tmp_path, quantize=quantize, blocks_to_swap=2, checkpointing="full")
    assert_same_run(converted_run, swapped)
    *_, notes = swapped.placed.weights.quantize_notes
    assert notes.startswith("quantize: the swapped blocks take 0.00 GiB of extra RAM, because the MODEL")
    slots = [slot.numel() for slot in swapped.placed.weights.swap.ring.slots.tensors]
    reference = trained(converted, tmp_path, blocks_to_swap=2, checkpointing="full")
    assert slots == [slot.numel() for slot in reference.placed.weights.swap.ring.slots.tensors] and len(slots) == 2


@every_format
def test_a_lora_on_the_model_is_merged_before_it_is_put_into_8_bit(quantize: str, wide_file: Path) -> None:
    name, blocks = "double_blocks.0.img_attn.qkv", frozenset({"double_blocks.0"})
    patched = loaded(wide_file).clone()
    key = f"diffusion_model.{name}.weight"
    weight = patched.model.state_dict()[key]
    change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.float().std()
    patched.add_patches({key: ("diff", (change,))})
    actual = FrozenWeights(patched, CPU, torch.bfloat16, frozenset(), quantize, blocks).linear(name).full()
    expected = weight.float() + change
    assert ((actual - expected).norm() / expected.norm()).item() < 0.03
    outside = FrozenWeights(patched, CPU, torch.bfloat16, frozenset(), quantize, blocks).linear("img_in")
    assert outside.weight.dtype == torch.bfloat16


def test_the_seconds_that_it_took_are_told(wide_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of reading all layers, of which each begins and ends by this clock."""
    seconds = iter(range(0, 10_000, 3))
    monkeypatch.setattr(frozen, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    trainer = tiny.make_trainer(
        loaded(wide_file),
        tiny.make_data([(6, 6)], [40]),
        tmp_path,
        memory=MemoryOptions(quantize="fp8", blocks_to_swap=1),
    )
    assert trainer.placed.weights.quantize_notes[0].startswith(
        "quantize: 16 layers of the blocks were converted to fp8 in 48 s for this"
    )


def test_held_and_remaining_weights_are_told(wide_file: Path, tmp_path: Path) -> None:
    notes = trained(loaded(wide_file), tmp_path, quantize="int8").placed.weights.quantize_notes
    expected = "quantize: 16 layers of the blocks were converted to int8 in 0 s for this run; 0.00 GiB became 0.00 GiB."
    assert notes == [expected]
    path = tmp_path / "mixed.safetensors"
    tiny.write_flux(path, depth=1, depth_single=2, quantised="fp8", quantised_inside="single_blocks.1.")
    placed = trained(loaded(path), tmp_path, quantize="int8").placed
    assert placed.weights.quantize_notes[0].startswith(
        "quantize: 13 layers of the blocks were converted to int8 in 0 s for this run"
    )
    (note,) = placed.weights.quantize_notes[1:]
    assert note.startswith("quantize: single_blocks.1.mod, single_blocks.1.linear1, ") and note.endswith(
        "already in 8 bit or less."
    )
    assert trained(loaded(wide_file), tmp_path).placed.weights.quantize_notes == []


@every_format
def test_a_model_with_comfyuis_own_forward_trains_in_it_and_is_still_compared(quantize: str, tmp_path: Path) -> None:
    (row,) = (row for row in NAMED if str(row) == "z-image")
    losses = {}
    for encoding in (AS_STORED, quantize):
        memory = MemoryOptions(checkpointing="none", quantize=encoding)
        trainer = trainer_of(row, tmp_path, memory=memory)
        tiny.fill_up_matrices(trainer)
        trainer.run()
        losses[encoding] = trainer.progress.loss
    assert trainer.placed.checks.forward_done and losses[quantize] != losses[AS_STORED]
    assert losses[quantize] == pytest.approx(losses[AS_STORED], rel=0.05)
    inside = [
        x.frozen().weight.dtype
        for _, block in trainer.placed.weights.transformer.blocks()
        for x in block.linears().values()
    ]
    assert set(inside) == {torch.int8 if quantize == "int8" else torch.float8_e4m3fn}


@every_format
def test_a_gguf_file_is_put_into_8_bit_with_its_loras(quantize: str, tmp_path: Path) -> None:
    model = with_lora(model_of(flux_state("Q5_0")), plain_lora())
    placed = trained(model, tmp_path, quantize=quantize).placed
    assert (
        placed.weights.quantize_notes[0].startswith("quantize: 26 layers of the blocks were converted to ")
        and len(placed.weights.quantize_notes) == 1
    )
    name, blocks = "double_blocks.0.img_mlp.0", frozenset({"double_blocks.0"})
    stored = FrozenWeights(model, CPU, torch.float32).linear(name).full()
    actual = FrozenWeights(model, CPU, torch.float32, frozenset(), quantize, blocks).linear(name).full()
    plain = FrozenWeights(model_of(flux_state("Q5_0")), CPU, torch.float32).linear(name).full()
    assert ((actual - stored).norm() / stored.norm()).item() < 0.03 < ((stored - plain).norm() / stored.norm()).item()


@every_format
def test_measuring_a_step_puts_nothing_into_8_bit(
    quantize: str, wide_file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """And counts it as if."""
    memory = MemoryOptions(quantize=quantize)
    trainer = tiny.make_trainer(loaded(wide_file), tiny.make_data([(6, 6)], [40]), tmp_path, memory=memory)
    linears = [
        (name, x) for name, block in trainer.placed.weights.transformer.blocks() for x in block.linears().values()
    ]
    sizes = {name: sum(x.held_bytes() for block, x in linears if block == name) for name, _ in linears}
    monkeypatch.setattr(frozen, "quantize_weight", None)
    targets = choose_targets(trainer.context.family, trainer.context.patcher.model, trainer.settings.network)
    cost = auto.measure(
        trainer.context.patcher, trainer.context.family, trainer.context.data, targets, trainer.settings
    )
    assert cost.structures == tuple(block.structure() for _, block in trainer.placed.weights.transformer.blocks())
    for block in cost.blocks:
        assert sizes[block.name] <= block.weights < 1.1 * sizes[block.name] + 8192  # norms, and the alignment of a slot
        assert block.forward > 0 and block.backward > 0


@pytest.mark.parametrize("quantize", [AS_STORED, "int8"])
def test_a_weight_that_is_cast_to_fp8_at_each_use_stays_so(quantize: str, wide_file: Path, tmp_path: Path) -> None:
    """As dynamic VRAM keeps a bf16 file that is loaded with weight_dtype fp8."""
    model = loaded(wide_file)
    name = "double_blocks.0.img_attn.qkv"
    model.model.diffusion_model.get_submodule(name).weight_comfy_model_dtype = torch.float8_e4m3fn
    weights = FrozenWeights(model, CPU, torch.bfloat16, frozenset(), quantize, frozenset({"double_blocks.0"}))
    assert weights.linear(name).weight.dtype == torch.float8_e4m3fn
    if quantize == "int8":
        assert weights.bytes_as_stored(name) is None
        assert weights.linear("double_blocks.0.img_attn.proj").weight.dtype == torch.int8


def test_16_bits_of_a_gguf_file_are_put_into_8() -> None:
    model = model_of(flux_state("Q4_0", plain="BF16"))
    weights = FrozenWeights(model, CPU, torch.bfloat16, frozenset(), "int8", frozenset({"txt_in"}))
    weight = model.model.diffusion_model.txt_in.weight
    assert weight.tensor_type == kind_of("BF16") and weights.bytes_as_stored("txt_in") == 2 * 128 * 64
    weights_of_one = FrozenWeights(model, CPU, torch.bfloat16, frozenset(), "int8", frozenset({"time_in"}))
    assert weights_of_one.linear("time_in.in_layer").weight.dtype == torch.int8


def test_a_run_with_another_base_learns_otherwise() -> None:
    settings = run_settings()
    kinds = {
        replace(settings, memory=MemoryOptions(quantize=quantize)).lineage("data", "model")
        for quantize in (AS_STORED, *FORMATS)
    }
    assert len(kinds) == 3 and settings.lineage("data", "model") in kinds
