"""Stop and keep, Save now and Sample now: they take effect between two steps and change nothing of what is trained."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tessera.nodes.common import training_now
from tessera.train.preview.sampling import Sampling
from tessera.train.report.observer import SAMPLE, SAVE, STOP
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch.previewer import Preview, Previewer
from tiny.models.sampling import conditioning
from tiny.train.runs import Watcher, mixed_data, run_settings, train

OPTIONS = {"steps": 8, "batch_size": 2, "network": {"rank": 8, "alpha": 4.0, "dropout": 0.2}, "save_every": 3}
OPTIMIZERS = [
    {"learning_rate": 1e-2, "lr_scheduler": "cosine", "warmup_steps": 2},
    {"optimizer": "adamw_schedulefree", "learning_rate": 1e-2, "warmup_steps": 2},
]


def asking(**asks_by_step):
    watcher = Watcher()
    watcher.asks = {int(step.removeprefix("step")): frozenset(names) for step, names in asks_by_step.items()}
    return watcher


def assert_same(first, second):
    assert first.loss == second.loss
    assert first.lora.keys() == second.lora.keys()
    assert not [name for name in first.lora if not torch.equal(first.lora[name], second.lora[name])]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "schedule-free"])
def test_a_stopped_run_is_kept_and_goes_on_to_what_an_uninterrupted_one_gives(optimizer, tiny_flux, tmp_path):
    options, data = OPTIONS | {"optimizer": optimizer}, mixed_data()
    whole = train(tiny_flux, data, tmp_path / "whole", **options)
    stopped = train(tiny_flux, data, tmp_path / "stopped", asking(step2={SAVE}, step5={STOP}), **options)
    folder = stopped.path.parent
    assert (stopped.summary["status"], stopped.summary["steps_done"]) == ("stopped", 5)
    assert stopped.saved and stopped.stopped and stopped.loss == whole.loss[:5]
    sentence = "Stopped at step 5 and saved; Run goes on from there."
    assert sentence in stopped.summary["notes"]
    assert json.loads((folder / "progress.jsonl").read_text().splitlines()[-1])["text"] == sentence
    tensors = load_file(stopped.path)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in stopped.lora.items())
    assert (
        folder / f"{stopped.path.stem}_steps" / f"{stopped.path.stem}-step000002.safetensors"
    ).is_file()  # saved when it was asked
    assert (folder / "state-000005.tessera").is_file()

    resumed = train(tiny_flux, data, tmp_path / "stopped", watcher := Watcher(), **options)
    assert "Resumed at step 5." in watcher.notes and resumed.path == stopped.path
    assert resumed.summary["status"] == "finished"
    assert_same(resumed, whole)


def test_asked_at_the_last_step_they_change_nothing(tiny_flux, tmp_path):
    result = train(tiny_flux, mixed_data(), tmp_path, asking(step8={SAVE, STOP}), **OPTIONS)
    assert result.summary["status"] == "finished" and not result.stopped
    assert not list(result.path.parent.rglob("*-step000008.safetensors"))


def test_sampled_when_it_is_asked_and_trained_on_as_without(tiny_flux, tiny_vae, tmp_path):
    def sampled(name, watcher):
        size = {"width": 64, "height": 48, "steps": 1, "sampler_name": "euler_ancestral"}
        previews = [
            Preview(Sampling(tiny_vae, conditioning("flux", 16), **size), interval, False) for interval in (0, 4)
        ]
        watchers = [Previewer(previews, tiny_flux)]
        options = run_settings(**OPTIONS)
        return train_lora(RunRequest(tiny_flux, mixed_data(), options, tmp_path / name, watcher, None, watchers))

    plain = train(tiny_flux, mixed_data(), tmp_path / "plain", **OPTIONS)
    sampled_run = sampled("asked", watcher := asking(step3={SAMPLE}, step5={SAMPLE, SAVE}))
    assert_same(sampled_run, plain)
    assert [step for step, _ in watcher.sheets] == [3, 4, 5, 8]
    folder = sampled_run.path.parent
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines() if line]
    assert [line["step"] for line in lines if line["kind"] == "preview"] == [3, 4, 5, 8]
    rows = [(3, 0), (3, 1), (4, 1), (5, 0), (5, 1), (8, 0), (8, 1)]
    assert sampled_run.summary["previews"]["files"] == [f"previews/step{step:06d}_{row}.png" for step, row in rows]
    stopped = sampled("stopped", watcher := asking(step5={STOP}))
    assert [step for step, _ in watcher.sheets] == [4, 5]  # as at the last step
    assert stopped.summary["status"] == "stopped"


def test_requests_to_a_run_are_done_once_and_by_no_later_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    training_now.begin(first, "6", "prompt 1")
    assert not training_now.ask(second, "prompt 1", STOP) and not training_now.ask(first, "prompt 2", STOP)
    assert training_now.take_requests() == set()
    assert training_now.ask(first, "prompt 1", SAVE)
    assert [training_now.take_requests() for _ in range(2)] == [{SAVE}, set()]
    assert training_now.ask(first, "prompt 1", STOP)  # behind its last step
    training_now.end()
    assert not training_now.ask(first, "prompt 1", STOP)
    training_now.begin(second, "6", "prompt 2")
    assert training_now.take_requests() == set()
    training_now.end()
