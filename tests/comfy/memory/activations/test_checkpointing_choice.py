"""Checkpointing auto, the default: the fastest that fits, told, and taken again by a run that goes on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.memory.activations.cost import KernelRates
from tessera.memory.swap import block_cost
from tessera.memory.swap import plan as swap_plan
from tessera.memory.swap.block_cost import LEAST_BUDGET
from tessera.memory.swap.plan import Way
from tessera.nodes.options.memory import TesseraMemory
from tessera.nodes.train.train_lora import TesseraTrainLora
from tessera.train.checkpoint.state import read_header
from tessera.train.config.settings import MemoryOptions
from tessera.train.placement import auto
from tiny.compile.compiling import Ops
from tiny.nodes.prompt import executed
from tiny.train.runs import Watcher, mixed_data, train

AUTO = {"checkpointing": "auto"}
ON_CPU = "in the computer's memory ("


def free(monkeypatch: pytest.MonkeyPatch, bytes_: int) -> None:
    monkeypatch.setattr(auto, "free_memory", lambda device: bytes_)


def run(model: Any, folder: Path, steps: int, **memory: Any) -> tuple[Any, list[str]]:
    """(the result, what was told)."""
    watcher = Watcher()
    result = train(model, mixed_data(), folder, watcher, steps=steps, save_every=0, memory=memory or AUTO)
    return result, watcher.notes


def test_auto_is_what_an_unconnected_memory_means_and_what_the_node_shows():
    assert MemoryOptions().checkpointing == "auto" and MemoryOptions().blocks_to_swap == 0
    checkpointing = TesseraMemory.INPUT_TYPES()["required"]["checkpointing"][1]
    assert checkpointing["default"] == "auto"
    assert "the fastest that fits" in TesseraTrainLora.INPUT_TYPES()["optional"]["memory"][1]["tooltip"]


@pytest.mark.parametrize("saved", ["none", "selective", "full"])
def test_a_saved_workflow_keeps_its_value(saved):
    assert executed(TesseraMemory, checkpointing=saved, attention="auto").result[0] == MemoryOptions(saved)


@pytest.mark.parametrize(("bytes_", "mode"), [(2**40, "none"), (1, "full")])
def test_with_nothing_connected_the_fastest_that_fits_is_taken_and_told(bytes_, mode, tiny_flux, tmp_path, monkeypatch):
    free(monkeypatch, bytes_)
    result, notes = run(tiny_flux, tmp_path, steps=1)
    (plan,) = (note for note in notes if f"checkpointing {mode}" in note)
    assert ON_CPU in plan and plan.startswith("Everything fits " if mode == "none" else "Needs ")
    assert result.summary["checkpointing"] == mode and result.summary["memory_plan"] == plan
    assert result.summary["blocks_swapped"] == 0


def test_a_run_that_goes_on_takes_its_choice_again_where_that_fits(tiny_flux, tmp_path, monkeypatch):
    free(monkeypatch, 1)
    first, _ = run(tiny_flux, tmp_path, steps=1)
    free(monkeypatch, 2**40)  # enough for none, which would be faster
    second, notes = run(tiny_flux, tmp_path, steps=2)
    assert "Resumed at step 1." in notes
    assert first.summary["checkpointing"] == second.summary["checkpointing"] == "full"
    assert not any("continues with" in note for note in notes)


def test_a_choice_that_does_not_fit_any_more_is_said(tiny_flux, tmp_path, monkeypatch):
    free(monkeypatch, 2**40)
    run(tiny_flux, tmp_path, steps=1)
    free(monkeypatch, 1)
    result, notes = run(tiny_flux, tmp_path, steps=2)
    assert result.summary["checkpointing"] == "full"
    assert (
        "The state was saved with checkpointing = none and continues with full, so the result may differ by rounding "
        "from an uninterrupted run."
    ) in notes


def just_room_for_least(monkeypatch: pytest.MonkeyPatch, model: Any, folder: Path) -> None:
    """A device with room for the plan that keeps attention's results and little else, on which bytes cost nothing: by
    a GPU's ratios, attention over 32 tokens is too little to count."""
    monkeypatch.setattr(block_cost, "H100_RATES", KernelRates(1e9, 1e9, 1e9, 1e15))
    trainer = tiny.make_trainer(model, mixed_data(), folder, steps=1, memory=MemoryOptions())
    automatic = trainer.placed.memory.automatic
    assert automatic is not None
    free(monkeypatch, automatic._plan(automatic._only_way(Way("selective", LEAST_BUDGET))).device_bytes)
    monkeypatch.setattr(swap_plan, "ROOMY", 1.0)  # else full recompute, as fast by these rates, were less tight
    trainer.close()


def test_before_full_attentions_results_are_kept_and_the_run_does_as_planned(tiny_flux, tmp_path, monkeypatch):
    just_room_for_least(monkeypatch, tiny_flux, tmp_path / "measured")
    memory = MemoryOptions(activation_budget=0.6)
    trainer = tiny.make_trainer(tiny_flux, mixed_data(), tmp_path, steps=1, memory=memory)
    plan = trainer.placed.memory.automatic.plan
    assert plan.fits and (plan.checkpointing, plan.budget) == ("selective", LEAST_BUDGET)
    assert "checkpointing selective, saving only attention's results" in plan.text
    trainer.train_step.forward_backward(
        [tiny.micro_batch(0)]
    )  # the first one checks the forward, which has attention too
    with Ops() as ops:
        trainer.train_step.forward_backward([tiny.micro_batch(0)])
    # Attention of each block once, all products of the blocks again: no part of them is kept, as 0.6 would have it.
    forward = sum(n for name, n in ops.counts.items() if "attention" in name and "backward" not in name)
    assert forward == len(trainer.placed.weights.transformer.blocks()) == 4
    trainer.close()
    explicit = tiny.make_trainer(tiny_flux, mixed_data(), tmp_path, steps=1, memory=MemoryOptions("full"))
    explicit.train_step.forward_backward([tiny.micro_batch(0)])
    with Ops() as full:
        explicit.train_step.forward_backward([tiny.micro_batch(0)])
    assert all(ops.counts[name] == full.counts[name] for name in ("mm", "addmm"))
    explicit.close()


def test_a_run_that_goes_on_takes_its_budget_again_and_a_state_without_one_the_asked(tiny_flux, tmp_path, monkeypatch):
    just_room_for_least(monkeypatch, tiny_flux, tmp_path / "measured")
    first, _ = run(tiny_flux, tmp_path, steps=1)
    assert first.summary["checkpointing"] == "selective"
    (state,) = tmp_path.rglob("state-*")
    assert read_header(state).environment["activation_budget"] == str(LEAST_BUDGET)
    free(monkeypatch, 2**40)
    second, notes = run(tiny_flux, tmp_path, steps=2)
    assert "Resumed at step 1." in notes and not any("continues with" in note for note in notes)
    assert "saving only attention's results" in second.summary["memory_plan"]
    options, none = MemoryOptions(activation_budget=0.3), {"checkpointing": "none"}
    assert auto.chosen_before({"checkpointing": "selective"}, options) == Way("selective", 0.3)
    assert auto.chosen_before({}, options) is None and auto.chosen_before(none, options) == Way("none", 0.0)


def test_blocks_that_are_placed_anew_run_with_the_planned_budget(tiny_flux, tmp_path, monkeypatch):
    free(monkeypatch, 2**40)
    trainer = tiny.make_trainer(tiny_flux, mixed_data(), tmp_path, steps=1, memory=MemoryOptions("selective"))
    assert auto.choice_facts(trainer.placed.memory.options) == {
        "checkpointing": "selective",
        "activation_budget": "0.5",
    }
    assert auto.choice_facts(MemoryOptions("full")) == {"checkpointing": "full"}
    # Placed anew under another budget, the blocks are run by another runner; under the same by the same.
    runner = trainer.placed.execution.runner
    trainer.placed.rebuild(0)
    assert trainer.placed.execution.runner is runner
    trainer.placed.memory.options = replace(trainer.placed.memory.options, activation_budget=LEAST_BUDGET)
    trainer.placed.rebuild(0)
    assert trainer.placed.execution.runner is not runner
    assert trainer.placed.execution.runner.checkpointing.memory.activation_budget == LEAST_BUDGET
    trainer.close()


def test_a_state_that_chose_nothing_binds_nothing(tiny_flux, tmp_path):
    first, _ = run(tiny_flux, tmp_path, steps=1, checkpointing="selective")
    second, notes = run(tiny_flux, tmp_path, steps=2)
    assert (first.summary["checkpointing"], second.summary["checkpointing"]) == ("selective", "none")
    assert not any("continues with" in note for note in notes)


def test_a_step_that_runs_out_of_memory_goes_on_with_less_and_the_state_holds_that(tiny_flux, tmp_path, monkeypatch):
    free(monkeypatch, 2**40)
    trainer = tiny.make_trainer(tiny_flux, mixed_data(), tmp_path, steps=2, memory=MemoryOptions())
    assert trainer.train_step.retries.environment["checkpointing"] == "none"
    loss, failing = trainer.train_step.losses.batch_loss, [True]

    def runs_out(*args: Any) -> Any:
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss(*args)

    trainer.train_step.losses.batch_loss = runs_out
    trainer.run()
    mode = trainer.placed.memory.options.checkpointing
    assert mode in ("selective", "full") and trainer.train_step.retries.environment["checkpointing"] == mode
