"""Training with int8 and fp8 matmuls: the same bits resident, checkpointed and swapped, as many graphs as in full,
and an update that points where the full one does."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.memory.low_bit.devices import RATES
from tessera.memory.weights import frozen_linear
from tessera.train.blocks.low_bit_policy import LowBitPolicy
from tessera.train.config.settings import MemoryOptions
from tiny.compile.compiling import Graphs
from tiny.memory.swapping import assert_same_run
from tiny.native import NAMED
from tiny.native.step import trainer_of
from tiny.native.stored import build_stored

FILES = {"int8 rotated": "int8", "fp8": "fp8"}
every_file = pytest.mark.parametrize("storage", FILES)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stored")
    sizes: dict[str, Any] = {"depth": 1, "depth_single": 2, "dtype": torch.bfloat16, "denoiser": True}
    return {
        storage: tiny.write_flux(folder / f"{storage}.safetensors", quantised=storage, **sizes) for storage in FILES
    }


def trainer_on(path: Path, folder: Path, backend: str | None = None, steps: int = 2, **memory: Any) -> Any:
    with torch.inference_mode():  # as a node loads it
        model = tiny.load_flux(path)
    data = tiny.make_data([(6, 6), (4, 9)], [40, 40])  # enough tokens for low-bit matmuls
    options = MemoryOptions(**{"checkpointing": "none"} | memory)
    return tiny.make_trainer(model, data, folder, backend=backend, steps=steps, memory=options)


def trained(*args: Any, **settings: Any) -> Any:
    trainer = trainer_on(*args, **settings)
    tiny.fill_up_matrices(trainer)
    trainer.run()
    return trainer


def scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply as torch._scaled_mm does, by a product in fp32."""
    return (left.float() @ right.float() * (scale_a * scale_b)).to(out_dtype)


@pytest.fixture
def quick_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch's own kernel is a plain loop, a hundred times slower than the product in fp32."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(40, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    unit_scale, scale = torch.ones(()), torch.tensor(0.3)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        torchs = torch._scaled_mm(left, right.t(), unit_scale, scale, out_dtype=dtype)
        torch.testing.assert_close(
            scaled_product(left, right.t(), unit_scale, scale, dtype), torchs, rtol=limit, atol=limit
        )
    monkeypatch.setattr(torch, "_scaled_mm", scaled_product)


@pytest.mark.usefixtures("quick_fp8")
@every_file
def test_resident_checkpointed_swapped_and_compiled_runs_are_the_same(storage: str, files: Any, tmp_path: Path) -> None:
    low = {"low_bit_matmul": FILES[storage]}
    resident = trained(files[storage], tmp_path, **low)
    assert resident.progress.loss != trained(files[storage], tmp_path).progress.loss
    swapping = {"blocks_to_swap": 3, "checkpointing": "full"}
    for memory in ({"checkpointing": "full"}, {"checkpointing": "selective"}, swapping):
        other_run = trained(files[storage], tmp_path, **low, **memory)
        assert_same_run(other_run, resident)
        slots = (
            []
            if other_run.placed.weights.swap is None
            else [slot.numel() for slot in other_run.placed.weights.swap.ring.slots.tensors]
        )
    # What streams is the stored form, as in full.
    full = trained(files[storage], tmp_path, **swapping)
    assert slots == [slot.numel() for slot in full.placed.weights.swap.ring.slots.tensors] and len(slots) == 2
    assert other_run.train_step.copies == full.train_step.copies > 0
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = trained(files[storage], tmp_path, "aot_eager", **low, blocks_to_swap=2)
    assert graphs() == compiled.placed.execution.runner.planned_graphs == 2 and graphs.breaks == 0
    assert compiled.placed.execution.runner.not_compiled is None
    assert_same_run(compiled, resident)


@pytest.mark.usefixtures("quick_fp8")
@every_file
def test_after_30_steps_the_update_points_where_the_full_one_does(storage: str, files: Any, tmp_path: Path) -> None:
    updates = []
    for option in ("off", FILES[storage]):
        trainer = trainer_on(files[storage], tmp_path, steps=30, low_bit_matmul=option)
        initial = {name: p.clone() for name, p in trainer.network.master_weights().items()}
        trainer.run()
        after = trainer.network.master_weights()
        updates.append(torch.cat([(after[name] - initial[name]).flatten() for name in initial]))
    cosine = float(torch.nn.functional.cosine_similarity(*updates, dim=0))
    assert {"int8": 0.99, "fp8": 0.97}[FILES[storage]] <= cosine < 1 - 1e-6


def test_the_run_says_and_lists_how_its_layers_multiply(files: Any, tmp_path: Path) -> None:
    trainer = trainer_on(files["int8 rotated"], tmp_path, low_bit_matmul="int8")
    (note,) = trainer.placed.low_bit.notes()
    assert note == (
        "low_bit_matmul is int8: 16 of the 16 layers of the blocks multiply in int8, where they see 32 tokens or more."
    )
    facts = trainer.summary()["low_bit_matmul"]
    assert facts["asked"] == "int8" and sum(row["count"] for row in facts["layers"]) == 16
    row = {"block": "single", "layer": "linear1", "forward": "int8", "backward": "int8", "count": 2}
    assert row in facts["layers"]
    assert "low_bit_matmul" not in trainer_on(files["fp8"], tmp_path).summary()


@pytest.mark.parametrize(
    ("option", "storage", "note"),
    [
        (
            "fp8",
            "int8 rotated",
            "low_bit_matmul is fp8, but all layers multiply in full: img.mod of double, img.qkv of double, img.proj of "
            "double, img.mlp_in of double, img.mlp_out of double and 8 more (stored as TensorWiseINT8); use a model "
            "stored in fp8 (quantize converts a 16-bit one), or set low_bit_matmul to off.",
        ),
        ("auto", "fp8", "low_bit_matmul is auto, but all layers multiply in full: auto has nothing faster on a CPU."),
    ],
)
def test_layers_without_such_a_matmul_are_full_and_said(
    option: str, storage: str, note: str, files: Any, tmp_path: Path
) -> None:
    trainer = trainer_on(files[storage], tmp_path, low_bit_matmul=option)
    assert list(trainer.placed.low_bit.notes()) == [note]
    assert all(linear.low_bit is None for linear in trainer.placed.weights.transformer.linears().values())
    trainer.run()
    assert trainer.progress.loss == trainer_run_in_full(files[storage], tmp_path)
    assert all(row["forward"] == row["backward"] == "full" for row in trainer.summary()["low_bit_matmul"]["layers"])


def trainer_run_in_full(path: Path, folder: Path) -> list[float]:
    trainer = trainer_on(path, folder)
    trainer.run()
    loss: list[float] = trainer.progress.loss
    return loss


def test_the_report_names_quantize_and_matmuls_of_a_region(files: Any, tmp_path: Path) -> None:
    def labels(storage: str, **memory: Any) -> list[str]:
        runner = trainer_on(files[storage], tmp_path, "aot_eager", **memory).placed.execution.runner
        return [region["region"] for region in runner.report.facts()["regions"]][:2]

    low = labels("int8 rotated", low_bit_matmul="int8", quantize="fp8")
    assert low == ["double, LoRA 1, quantize fp8, int8 matmuls", "single, LoRA 2, quantize fp8, int8 matmuls"]
    assert labels("fp8") == ["double, LoRA 1", "single, LoRA 2"]


@every_file
def test_the_plan_reckons_low_bit_matmuls_at_their_rate(storage: str, files: Any, tmp_path: Path) -> None:
    """Of a single block of 36 + 40 tokens: two Linears that all of them go through, and one of a single row."""
    precision, work = FILES[storage], []
    for option in ("off", precision):
        memory = {"low_bit_matmul": option, "checkpointing": "auto", "blocks_to_swap": 1}
        costs = trainer_on(files[storage], tmp_path, **memory).placed.memory.automatic.measured.blocks
        (block_work,) = {block.work for block in costs if block.name == "single_blocks.0"}
        work.append((block_work.forward.products, block_work.backward.products))
    linears = 128 * (3 * 128 + 512) + 128 * (128 + 512)
    saved = 2 * 76 * linears * (1 - 1 / RATES[precision])
    assert [full - low for full, low in zip(*work, strict=True)] == pytest.approx([saved, saved], rel=1e-9)


def test_a_card_without_the_matmul_is_named() -> None:
    policy = LowBitPolicy("int8", torch.device("mps"), torch.bfloat16)
    message = "low_bit_matmul is int8, but all layers multiply in full: int8 matmuls need an NVIDIA card."
    assert list(policy.notes()) == [message] and policy.precisions == ()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_put_into_8_bits_by_quantize_multiply_so(kind: str, tmp_path: Path) -> None:
    path = tiny.write_flux(tmp_path / "flux.safetensors", depth=1, depth_single=2, dtype=torch.bfloat16)
    low = trained(path, tmp_path, quantize=kind, low_bit_matmul=kind)
    assert "16 of the 16 layers" in next(low.placed.low_bit.notes())
    assert low.progress.loss != trained(path, tmp_path, quantize=kind).progress.loss


def test_layers_that_cannot_are_named_beside_those_that_do(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    tiny.write_flux(path, depth=1, depth_single=2, quantised="fp8", quantised_inside="single_blocks.1.")
    trainer = trainer_on(path, tmp_path, low_bit_matmul="fp8")
    (note,) = trainer.placed.low_bit.notes()
    assert "3 of the 16 layers of the blocks multiply in fp8, where" in note
    assert note.endswith("and 8 more (stored as float32).")
    kinds = {name: block.structure() for name, block in trainer.placed.weights.transformer.blocks()}
    assert len(set(kinds.values())) == 3


@pytest.mark.wide
def test_a_model_with_comfyuis_own_forward_has_its_graphs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_linear, "LEAST_ROWS", 1)  # its pictures are smaller
    (row,) = (row for row in NAMED if str(row) == "z-image")
    runs = {}
    torch._dynamo.reset()
    graphs = Graphs()
    for name, backend, option in (("full", None, "off"), ("low", None, "int8"), ("compiled", "aot_eager", "int8")):
        memory = MemoryOptions(checkpointing="none", low_bit_matmul=option)
        trainer = trainer_of(row, tmp_path, model=build_stored(row, "int8 rotated"), backend=backend, memory=memory)
        tiny.fill_up_matrices(trainer)
        trainer.run()
        runs[name] = trainer.progress.loss
    assert runs["low"] == runs["compiled"] != runs["full"]
    assert graphs() == trainer.placed.execution.runner.planned_graphs == 3 and graphs.breaks == 0
