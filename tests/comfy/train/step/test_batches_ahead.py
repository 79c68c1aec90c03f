"""The next step's first batch is made before a step is read, and nothing else of the run changes by it."""

import weakref
from typing import Any

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from tessera.train.checkpoint.state import load_state
from tessera.train.loop.train_step import TrainStep
from tessera.train.report.observer import SAMPLE
from tessera.train.step import batches as step_batches
from tiny.train.runs import Watcher, cancel_at, mixed_data, sample, train, training_data


class Sees:
    """A watcher that has something to do after these steps."""

    def __init__(self, events: list[Any], *steps: int) -> None:
        self.events, self.steps = events, steps

    def is_due(self, step: int, steps: int) -> bool:
        return step in self.steps

    def between_steps(self, run: Any) -> None:
        if run.progress.step in self.steps:
            self.events.append(("watcher", run.progress.step))

    def summary(self, run: Any) -> dict[str, Any]:
        return {}


@pytest.fixture
def events(monkeypatch) -> list[Any]:
    """("make", step, micro-batch), ("read", step) and ("update", step) in the order in which they happen."""
    log: list[Any] = []
    original = step_batches.make_batch
    read = TrainStep.finite
    updated = TrainStep.optimizer_step

    def make(*args: Any) -> Any:
        log.append(("make", *args[6]))
        return original(*args)

    def finite(self: Any, total: Any) -> float:
        log.append(("read", self.progress.step))
        return read(self, total)

    def optimizer_step(self: Any) -> None:
        log.append(("update", self.progress.step))
        updated(self)

    monkeypatch.setattr(step_batches, "make_batch", make)
    monkeypatch.setattr(TrainStep, "finite", finite)
    monkeypatch.setattr(TrainStep, "optimizer_step", optimizer_step)
    return log


def step(number: int, *middle: Any) -> list[Any]:
    """The reading of a step, what is made before it, and its update."""
    return [*middle, ("read", number), ("update", number)]


def test_the_next_first_batch_is_made_before_the_read_and_none_after_the_last_step(events, tiny_flux, tmp_path):
    summary = train(tiny_flux, mixed_data(), tmp_path, steps=3, gradient_accumulation=2).summary
    assert all(summary[f"{part}_seconds"] > 0 for part in ("host", "data")) and summary["wait_seconds"] >= 0
    assert summary["device_seconds"] is None
    first, second, third = (("make", number, 1) for number in range(3))
    assert events == [
        ("make", 0, 0),
        *step(0, first, ("make", 1, 0)),
        *step(1, second, ("make", 2, 0)),
        *step(2, third),
    ]


def test_batch_is_not_made_ahead_of_a_watcher_that_has_something_to_do(events, tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, mixed_data(), tmp_path, steps=3)
    trainer.watchers.append(Sees(events, 1))
    trainer.run()
    trainer.close()
    assert events == [
        ("make", 0, 0),
        *step(0),
        ("watcher", 1),
        ("make", 1, 0),
        *step(1, ("make", 2, 0)),
        *step(2),
    ]


def test_batch_is_not_made_ahead_of_a_validation_that_is_due(events, tiny_flux, tmp_path):
    data = training_data(*(sample(f"picture {n}", 4, 4) for n in range(6)))
    train(tiny_flux, data, tmp_path, steps=4, validation={"part": 0.3, "every_n_steps": 2})
    assert events == [
        *(("make", 0, 0), *step(0, ("make", 1, 0)), *step(1)),
        *(("make", 2, 0), *step(2, ("make", 3, 0)), *step(3)),
    ]


def test_a_batch_that_was_made_ahead_makes_room_for_a_preview_that_is_asked_for(events, tiny_flux, tmp_path):
    watcher = Watcher()
    watcher.asks = {1: frozenset({SAMPLE})}
    train(tiny_flux, mixed_data(), tmp_path, watcher, steps=3)
    assert events == [
        ("make", 0, 0),
        *step(0, ("make", 1, 0)),
        *(("make", 1, 0), *step(1, ("make", 2, 0))),
        *step(2),
    ]


def test_batch_made_ahead_leaves_none_of_its_own_step(tiny_flux, tmp_path, monkeypatch):
    """So the memory plan counts one batch."""
    original = step_batches.make_batch
    alive = []
    batches = []

    def make(*args: Any) -> Any:
        alive.append(sum(ref() is not None for ref in batches))
        batch = original(*args)
        batches.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(step_batches, "make_batch", make)
    train(tiny_flux, mixed_data(), tmp_path, steps=3, batch_size=2, gradient_accumulation=2)
    assert alive == [0] * 6


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_was_made_ahead_of_a_cancel_is_trained_on_once(accumulation, tiny_flux, tmp_path, monkeypatch):
    indices, trained = [], TrainStep.micro_batch

    def recorded(self: Any, requests: Any, *args: Any) -> None:
        indices.extend(requests)
        trained(self, requests, *args)

    monkeypatch.setattr(TrainStep, "micro_batch", recorded)
    options = {"steps": 5, "gradient_accumulation": accumulation, "save_every": 0}
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole", **options)
    uninterrupted = list(indices)
    indices.clear()
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path / "cut", cancel_at(2), **options)
    (state,) = (tmp_path / "cut").rglob("*.tessera")
    saved = load_state(state)
    assert saved.batches == saved.step * accumulation == len(indices)
    resumed = train(tiny_flux, mixed_data(), tmp_path / "cut", **options)
    assert indices == uninterrupted and resumed.loss == whole.loss
    assert all(torch.equal(resumed.lora[name], whole.lora[name]) for name in whole.lora)


def test_a_batch_that_can_not_be_made_ahead_is_made_by_its_own_step(events, tiny_flux, tmp_path, monkeypatch):
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole", steps=4)
    events.clear()
    original = step_batches.make_batch

    def make(*args: Any) -> Any:
        if ("read", 0) not in events and args[6] == (1, 0):
            events.append("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    monkeypatch.setattr(step_batches, "make_batch", make)
    result = train(tiny_flux, mixed_data(), tmp_path / "tight", steps=4)
    later = [event for number in (1, 2, 3) for event in (("make", number, 0), *step(number))]
    assert events == [("make", 0, 0), *step(0, "out of memory"), *later]
    assert result.loss == whole.loss


def test_a_model_that_is_placed_anew_finds_no_batch_in_its_way(events, tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, mixed_data(), tmp_path, steps=3)
    trainer.train_step.batches.order.start(0, 0, lambda: None)
    trainer.train_step.forward_backward(trainer.train_step.batches.for_step(0))
    trainer.train_step.retries.place_again()
    trainer.progress.step = 1
    trainer.train_step.forward_backward(trainer.train_step.batches.for_step(1))
    assert events == [("make", number, 0) for number in (0, 1, 1, 2)]
    trainer.close()
