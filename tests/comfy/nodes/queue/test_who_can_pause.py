"""Runs that can be paused, and those that train to their end."""

from types import SimpleNamespace

import pytest
from tessera.nodes.common import training_now
from tessera.nodes.train import run_routes, train_lora


@pytest.mark.parametrize("can_pause", [True, False])
def test_only_a_run_that_goes_on_in_the_queue_can_be_paused(can_pause, monkeypatch, tmp_path):
    runs = run_routes.Runs()
    monkeypatch.setattr(runs, "folder", lambda id: SimpleNamespace(path=tmp_path) if id == "a" else None)
    training_now.begin(tmp_path, "1", "prompt", can_pause)
    try:
        assert runs.can_pause("a") is can_pause and not runs.can_pause("unknown")
    finally:
        training_now.end()
    assert not runs.can_pause("a")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({"has_queue": False}, "runs without ComfyUI's queue"),
        ({"devices": "0,1"}, "on several devices"),
        ({"resume": "off", "model_low_noise": "a model"}, "needs resume 'latest' with two experts"),
        ({"resume": "latest", "model_low_noise": "a model"}, ""),
        ({"resume": "off"}, ""),
    ],
)
def test_a_run_that_trains_to_its_end_says_why(changes, sentence, monkeypatch):
    monkeypatch.setattr(train_lora, "chosen_devices", lambda devices: [0, 1] if devices == "0,1" else [])
    request = {"devices": "this one", "resume": "latest", "model_low_noise": None, "has_queue": True} | changes
    turn = SimpleNamespace(has_queue=request.pop("has_queue"))
    reason = train_lora.finishes_first(turn, **request)
    assert sentence in reason and bool(reason) == bool(sentence)
