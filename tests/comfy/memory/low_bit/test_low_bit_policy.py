"""Layers that lose too much by low-bit matmuls multiply in full: found by the first micro-batches, forward
and back apart, alike in all blocks of a kind, said, listed, and kept in the state."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from family_cases import cases
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tessera.lora.options import NetworkOptions
from tessera.memory.low_bit.error_meter import ErrorMeter
from tessera.train.blocks import low_bit_policy as placement
from tessera.train.blocks.low_bit_policy import LIMIT, LowBitPolicy
from tessera.train.checkpoint.state import DamagedState, load_state, read_header, state_path
from tessera.train.config.settings import MemoryOptions
from tessera.train.report.observer import SilentObserver
from tiny.compile.compiling import Graphs
from tiny.memory.swapping import assert_same_run, trained
from tiny.train.runs import training_data

LINEAR2 = ("single", "linear2")
# The place of one channel of the MLP in linear1's output and in linear2's input.
ROW, COLUMN = 3 * 128 + 5, 128 + 5


class Notes(SilentObserver):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file in int8 rows, and one in which a channel between two layers of one block is 1000 times as large. The layer
    behind it does not read it, so that it is worth nothing and takes all steps of its rows."""
    folder = tmp_path_factory.mktemp("stored")
    even = folder / "even.safetensors"
    tiny.write_flux(even, depth=1, depth_single=2, dtype=torch.bfloat16, quantised="int8 by rows", denoiser=True)
    with safe_open(even, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(even)
    tensors["single_blocks.1.linear1.weight_scale"][ROW] *= 1000
    tensors["single_blocks.1.linear2.weight"][:, COLUMN] = 0
    save_file(tensors, folder / "outlier.safetensors", metadata)
    return {"even": even, "outlier": folder / "outlier.safetensors"}


def trainer_on(path: Path, folder: Path, backend: str | None = None, steps: int = 2, **changes: Any) -> Any:
    with torch.inference_mode():  # as a node loads it
        model = tiny.load_flux(path)
    data = tiny.make_data([(6, 6), (4, 9)], [40, 40])
    memory = MemoryOptions(**{"checkpointing": "none", "low_bit_matmul": "int8"} | changes.pop("memory", {}))
    trainer = tiny.make_trainer(model, data, folder, backend=backend, steps=steps, memory=memory, **changes)
    trainer.placed.observer = trainer.saver.observer = tiny.observe(trainer, Notes())
    return trainer


def weights_of(trainer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.network.parameters()]


def test_layers_that_lose_little_multiply_in_low_precision(files: Any, tmp_path: Path) -> None:
    trainer = trainer_on(files["even"], tmp_path)
    assert trainer.placed.low_bit.undecided and not trainer.observer.notes
    decided = []
    looks = {"between_steps": lambda run: decided.append(not run.placed.low_bit.undecided)}
    trainer.watchers.append(SimpleNamespace(**looks, is_due=lambda *_: False))
    trainer.run()
    assert decided == [True] * 3  # also before the first step, when validation looks on
    assert not trainer.placed.low_bit.undecided and trainer.placed.low_bit.decision() == {"asked": "int8", "full": []}
    errors = trainer.placed.low_bit.errors
    measured = {place: sides for place, sides in errors.items() if "mod" not in place[1]}  # which see one token
    assert len(measured) == 10 and all(0.001 < error < LIMIT / 2 for sides in measured.values() for error in sides)
    assert trainer.observer.notes == [
        "low_bit_matmul is int8: 16 of the 16 layers of the blocks multiply in int8, where they see 32 tokens or more."
    ]


def test_a_channel_a_thousand_times_as_large_falls_back_going_forward_only(files: Any, tmp_path: Path) -> None:
    trainer = trainer_on(files["outlier"], tmp_path)
    trainer.run()
    policy = trainer.placed.low_bit
    assert policy.decision() == {"asked": "int8", "full": [[*LINEAR2, "forward"]]}
    forward, backward = policy.errors[LINEAR2]
    assert forward > 0.3 and backward < LIMIT / 2
    (note,) = trainer.observer.notes
    assert note == (
        "low_bit_matmul is int8: 14 of the 16 layers of the blocks multiply in int8 and 2 in int8 going back only, "
        f"where they see 32 tokens or more. In full: linear2 of single (off by {forward:.2g} going forward)."
    )
    # One of the two blocks is as before: the worst decides for both, which share their graph.
    singles = [block for name, block in trainer.placed.weights.transformer.blocks() if name.startswith("single")]
    assert [block.linears()["linear2"].low_bit[:2] for block in singles] == [("full", "int8")] * 2
    (row,) = (row for row in trainer.summary()["low_bit_matmul"]["layers"] if (row["block"], row["layer"]) == LINEAR2)
    assert row["count"] == 2 and (row["forward"], row["backward"]) == ("full", "int8")
    assert (row["forward_error"], row["backward_error"]) == (round(forward, 5), round(backward, 5))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_swapped_and_compiled_runs_decide_and_train_alike(files: Any, tmp_path: Path, backend: str | None) -> None:
    resident = trainer_on(files["outlier"], tmp_path)
    resident.run()
    torch._dynamo.reset()
    graphs = Graphs()
    memory = {"blocks_to_swap": 3, "checkpointing": "full"} if backend is None else {"checkpointing": "auto"}
    other = trainer_on(files["outlier"], tmp_path, backend, memory=memory)
    expected, errors = weights_of(resident), resident.placed.low_bit.errors
    other.run()
    assert other.placed.low_bit.decision() == {"asked": "int8", "full": [[*LINEAR2, "forward"]]}
    assert other.placed.low_bit.errors == errors
    assert all(torch.equal(weight, two) for weight, two in zip(weights_of(other), expected, strict=True))
    if backend:
        assert graphs() == other.placed.execution.runner.planned_graphs == 2 and graphs.breaks == 0
        structures = other.placed.memory.automatic.measured.structures
        assert set(structures) == {block.structure() for _, block in other.placed.weights.transformer.blocks()}


def test_an_output_of_a_swapped_block_that_nothing_uses_is_not_measured_going_back(case_file: Any, tmp_path: Path):
    """The text of Qwen-Image's last block: a swapped block gets no gradient for it in place of no backward."""
    case = next(case for case in cases("swap") if case.family == "qwen-image")
    file = case_file(case, dtype=torch.bfloat16, **case.deep)
    data = training_data(*case.batches()[case.main_batches[-1]]())
    options = {"checkpointing": "full", "quantize": "int8", "low_bit_matmul": "int8"}
    resident, swapped = (
        trained(case.load(file, torch.bfloat16), data, tmp_path / f"{count}", steps=1, blocks_to_swap=count, **options)
        for count in (0, 2)
    )
    assert swapped.placed.low_bit.errors == resident.placed.low_bit.errors
    last_block = list(swapped.placed.weights.transformer.blocks())[-1][0]
    assert_same_run(swapped, resident, [f"{last_block}.{name}" for name in case.unused])


def test_to_measure_leaves_no_trace_in_what_is_learnt(files: Any, tmp_path: Path) -> None:
    """A run that is given the decision trains as the one that found it, with dropout too."""
    network = NetworkOptions(rank=4, alpha=8.0, dropout=0.3)
    measured_run = trainer_on(files["outlier"], tmp_path, network=network, gradient_accumulation=3)
    measured_run.run()
    decision = measured_run.placed.low_bit.decision()
    losses = measured_run.progress.loss
    weights = weights_of(measured_run)
    decided_run = trainer_on(files["outlier"], tmp_path, network=network, gradient_accumulation=3)
    decided_run.placed.low_bit.full = {(block, layer): tuple(sides) for block, layer, *sides in decision["full"]}
    decided_run.placed.low_bit.set(decided_run.placed.weights.transformer.blocks())
    decided_run.run()
    assert decided_run.progress.loss == losses
    assert all(torch.equal(weight, two) for weight, two in zip(weights_of(decided_run), weights, strict=True))


def test_the_first_four_micro_batches_are_measured(files: Any, tmp_path: Path) -> None:
    trainer = trainer_on(files["even"], tmp_path, steps=6, gradient_accumulation=3)
    trainer.train_step.batches.order.start(0, 0, lambda: None)
    steps = [((0, micro), batch) for micro, batch in enumerate(trainer.train_step.batches.for_step(0))]
    steps += [((1, micro), batch) for micro, batch in enumerate(trainer.train_step.batches.for_step(1))]
    assert trainer.train_step.batches.order.first_of(0, 0, 4) == steps[:4]
    assert trainer.train_step.batches.order.first_of(1, 3, 2) == steps[3:5]


def test_a_resumed_run_takes_the_decision_from_its_state(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trainer_on(files["outlier"], tmp_path / "whole", steps=4)
    whole.run()
    expected, losses = weights_of(whole), whole.progress.loss
    first = trainer_on(files["outlier"], tmp_path / "cut", steps=4, save_every=2)
    first.run()
    state = state_path(first.context.folder.path, 2)
    header = load_state(state).low_bit_matmul
    assert header == {"asked": "int8", "full": [[*LINEAR2, "forward"]]}

    def resumed(option: str) -> Any:
        with monkeypatch.context() as patch:
            original = LowBitPolicy.__init__
            patch.setattr(LowBitPolicy, "__init__", lambda self, *arguments: original(self, *arguments[:3], header))
            trainer = trainer_on(files["outlier"], tmp_path / option, steps=4, memory={"low_bit_matmul": option})
        trainer.resume(state)
        return trainer

    second = resumed("int8")
    assert not second.placed.low_bit.undecided
    monkeypatch.setattr(second.train_step, "measure_low_bit", None)
    second.run()
    assert second.progress.loss == losses
    assert all(torch.equal(weight, two) for weight, two in zip(weights_of(second), expected, strict=True))
    (note,) = list(second.placed.low_bit.notes())
    assert note.endswith("In full: linear2 of single (too inexact in the forward pass when the run started).")
    # Another option decides anew, and where the matmul is missing the run says so and hands the decision on.
    assert resumed("off").placed.low_bit.decision() == {}
    monkeypatch.setattr(placement, "obstacle", lambda *_: "int8 matmuls need an NVIDIA card")
    elsewhere = resumed("int8")
    message = "low_bit_matmul is int8, but all layers multiply in full: int8 matmuls need an NVIDIA card."
    assert list(elsewhere.placed.low_bit.notes()) == [message] and elsewhere.placed.low_bit.decision() == header
    elsewhere.run()
    elsewhere.saver.save()
    assert (
        elsewhere.progress.step == 4
        and load_state(state_path(elsewhere.context.folder.path, 4)).low_bit_matmul == header
    )


def test_a_state_with_a_damaged_decision_is_refused(files: Any, tmp_path: Path) -> None:
    trainer = trainer_on(files["even"], tmp_path, steps=1)
    trainer.run()
    trainer.saver.save()
    state = state_path(trainer.context.folder.path, 1)
    assert read_header(state).low_bit_matmul == {"asked": "int8", "full": []}
    with safe_open(state, framework="pt") as file:
        metadata = file.metadata()
    tensors, plain = load_file(state), json.loads(metadata["tessera"])

    def rewritten(low_bit_matmul: Any) -> Path:
        save_file(tensors, state, metadata | {"tessera": json.dumps(plain | {"low_bit_matmul": low_bit_matmul})})
        return state

    place = ["single", "linear2"]
    header = {"asked": "int8", "full": [[*place, "forward", "backward"]]}
    assert read_header(rewritten(header)).low_bit_matmul == header
    for damaged in (
        [],
        {"asked": "int8"},
        {"asked": 3, "full": []},
        {"asked": "int8", "full": [place]},
        {"asked": "int8", "full": [[*place, "sideways"]]},
        {"asked": "int8", "full": [["single", 2, "forward"]]},
        {"asked": "int8", "full": [], "more": 1},
    ):
        with pytest.raises(DamagedState, match="field '(low_bit_matmul|more)'"):
            read_header(rewritten(damaged))


def test_only_what_is_finite_in_full_is_measured() -> None:
    meter, full = ErrorMeter(torch.device("cpu")), torch.tensor([3.0, 4.0])
    meter.add(False, full + torch.tensor([0.0, 1.0]), full)
    meter.add(True, full, torch.tensor([torch.inf, 1.0]))  # as fp16's first gradients are, whatever multiplies
    assert meter.errors() == pytest.approx((0.2, 0.0))
    meter.add(True, torch.tensor([torch.inf, 1.0]), full)
    assert meter.errors()[1] == torch.inf


def test_a_channel_of_a_thousandfold_size_does_not_hide_that_the_others_are_lost() -> None:
    """One scale for a weight in int8: a row of a thousandfold size leaves a step or two to the others."""
    source = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=source) for shape in ((64, 128), (96, 128)))
    weight[7] *= 1000
    rounded = (weight / (step := weight.abs().amax() / 127)).round() * step
    meter = ErrorMeter(torch.device("cpu"))
    meter.add(False, x @ rounded.T, x @ weight.T)
    error, columns = meter.errors()[0], torch.arange(96) != 7
    low, full = (x @ rounded.T)[:, columns], (x @ weight.T)[:, columns]
    assert (low - full).norm() > 0.8 * full.norm()
    assert error > 0.8


def test_channels_of_zeros_and_an_even_error_count_as_they_are() -> None:
    meter, full = ErrorMeter(torch.device("cpu")), torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    full[:, 3] = 0
    meter.add(False, full * 1.02, full)
    assert meter.errors()[0] == pytest.approx(0.02, rel=1e-3)


def test_layers_with_values_that_are_not_finite_multiply_in_full(files: Any, tmp_path: Path) -> None:
    trainer = trainer_on(files["even"], tmp_path)
    blocks = trainer.placed.weights.transformer.blocks()
    with trainer.placed.low_bit.measured(blocks):
        for sums in blocks[-1][1].linears()["linear1"].meter.sums:
            sums.fill_(torch.nan)
    assert trainer.placed.low_bit.full == {("single", "linear1"): ("forward", "backward")}
    trainer.placed.low_bit.set(blocks)
    (note,) = trainer.placed.low_bit.notes()
    assert "14 of the 16 layers" in note and "linear1 of single (off by inf going forward and inf going back)" in note
    (row,) = (r for r in trainer.placed.low_bit.facts()["low_bit_matmul"]["layers"] if r["layer"] == "linear1")
    assert row["forward_error"] == "not finite"
