"""An estimate counts what the run then takes, writes nothing, and says what would make a run fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tessera.compile.settings import CompileSettings
from tessera.data.samples import Preparation
from tessera.train.estimate.changes import cheapest_fitting
from tessera.train.estimate.estimate import Estimate, estimate, mean_size
from tessera.train.estimate.report import describe, table
from tessera.train.loop.train_step import TrainStep
from tessera.train.placement import auto
from tessera.train.train_lora import RunRequest
from tiny.train.runs import Watcher, mixed_data, run_settings, sample, train, training_data

GIB = 2**30


def estimated(model: Any, data: Any, root: Path, compile_settings: Any = None, **changes: Any) -> Estimate:
    return estimate(RunRequest(model, data, run_settings(**changes), root, Watcher(), compile_settings))


def one_size() -> Any:
    return training_data(sample("a", 4, 4), sample("b", 2, 8))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": {"lr_scheduler": "cosine", "ema_decay": 0.9}, "network": {"rank": 8}}],
    ids=["adamw", "with an average"],
)
def test_the_counted_bytes_are_those_of_the_run_to_the_byte(changes, tiny_flux, tmp_path):
    settings = {"steps": 2, "save_every": 0, **changes}
    result = estimated(tiny_flux, one_size(), tmp_path, **settings)
    assert not list(tmp_path.iterdir())
    run = train(tiny_flux, one_size(), tmp_path, **settings)
    (state,) = run.path.parent.glob("state-*")
    tensors = load_file(state)
    assert result.trial is not None
    assert result.parameters == run.summary["parameters"]
    assert result.lora_bytes == run.path.stat().st_size
    assert result.state_bytes == state.stat().st_size
    optimizer = (tensor for name, tensor in tensors.items() if "optimizer" in name)
    assert result.trial.optimizer_bytes == sum(tensor.nbytes for tensor in optimizer) > 8 * result.parameters
    assert (result.steps, result.loras, result.states) == (2, 1, 1)


def test_estimate_writes_no_file_and_the_run_is_the_same_after_it(tiny_flux, tmp_path):
    settings = {"steps": 3, "save_every": 1, "keep_last": 1}
    first = train(tiny_flux, one_size(), tmp_path / "first", **settings)
    before = files(tmp_path)
    longer = estimated(tiny_flux, one_size(), tmp_path / "first", **(settings | {"steps": 6}))
    assert (longer.steps, longer.loras, longer.states) == (3, 1 + 1, 2)
    finished = estimated(tiny_flux, one_size(), tmp_path / "first", **settings)
    assert finished.steps == finished.disk_bytes == 0
    assert "This run already finished, so Train LoRA returns its LoRA at once." in finished.notes
    best = estimated(tiny_flux, mixed_data(), tmp_path / "first", validation={"part": 0.3}, **settings)
    assert best.loras == 1 + 1 + 1
    assert files(tmp_path) == before
    second = train(tiny_flux, one_size(), tmp_path / "second", **settings)
    assert first.loss == second.loss and all(torch.equal(first.lora[k], second.lora[k]) for k in first.lora)


def test_graphs_are_told_apart_from_steps_and_every_size_counts(tiny_flux, tmp_path):
    data = replace(mixed_data(), preparation=Preparation("Cropping cuts off 1 %.", 3.0, 5_000_000))
    result = estimated(tiny_flux, data, tmp_path, CompileSettings("eager"), compile="auto", steps=1000)
    assert result.trial is not None and result.shapes == 2
    assert (result.trial.graphs, result.trial.planned_graphs) == (2, 4)
    assert result.trial.seconds is not None and result.trial.compile_seconds > 0
    # three samples of 16 image and 16 text tokens, two of 24 and 16
    assert mean_size(data, data.samples[-1]) == pytest.approx((3 * 32 + 2 * 40) / 5 / 40)
    assert result.step_seconds == pytest.approx(result.trial.seconds * mean_size(data, data.samples[-1]))
    text = "\n".join(describe(result))
    for part in ("for 1,000 steps", "for 2 graphs of the 4", "took 3.00 s", "Cropping cuts off 1 %.", "5.0 MB in the"):
        assert part in text


def test_calculated_changes_are_those_of_a_plan_with_these_settings(tiny_flux, tmp_path):
    data = replace(one_size(), made_with={"megapixels": 1.0})
    result = estimated(tiny_flux, data, tmp_path, batch_size=2)
    changes = {(change.name, change.after): change for change in result.changes}
    assert changes.keys() >= {("rank", 2), ("rank", 8), ("batch_size", 1), ("batch_size", 4), ("megapixels", 0.5)}
    assert changes["batch_size", 4].bytes > 0 > changes["batch_size", 1].bytes
    assert changes["batch_size", 4].seconds == pytest.approx(2)
    assert changes["checkpointing", "full"].bytes < 0 < changes["rank", 8].bytes
    assert changes["checkpointing", "full"].seconds > 1 and changes["checkpointing", "full"].keeps_result
    assert changes["quantize", "int8"].bytes < 0 and changes["quantize", "int8"].fits
    lines = table(result).splitlines()
    assert lines[0] == "Calculated from the measured step, not tried:" and len(lines) == 2 + len(result.changes)


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A step runs out of memory, on a device of so many bytes."""

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    def with_bytes(free: int) -> None:
        monkeypatch.setattr(auto, "free_memory", lambda *_: free)
        monkeypatch.setattr(TrainStep, "run", full)

    return with_bytes


def test_a_run_that_does_not_fit_names_the_three_cheapest_changes(small_card, tiny_flux, tmp_path):
    data = replace(one_size(), made_with={"megapixels": 1.0})
    settings = {"batch_size": 4, "network": {"rank": 16}}
    whole = estimated(tiny_flux, data, tmp_path, **settings)
    small_card(1)
    hopeless = estimated(tiny_flux, data, tmp_path, **settings)
    assert hopeless.trial is None and not list(tmp_path.iterdir())
    assert hopeless.lora_bytes == 4 * whole.parameters and not cheapest_fitting(hopeless.changes)
    assert "It doesn't fit: the first steps ran out of memory." in describe(hopeless)
    small_card(GIB)
    changes = cheapest_fitting(estimated(tiny_flux, data, tmp_path, **settings).changes)
    keep = [change for change in changes if change.keeps_result]
    assert len(changes) == 3 and changes[: len(keep)] == sorted(keep, key=lambda change: change.seconds) != []
    assert all(change.bytes < 0 for change in changes) and not list(tmp_path.iterdir())
