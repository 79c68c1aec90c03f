"""What looks at a run between its steps is called when everything due is saved, and changes nothing of the run."""

import comfy.model_management
import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from tessera.train.report.errors import TrainingStopped
from tessera.train.train_lora import RunRequest, train_lora
from tiny.train.runs import Watcher, mixed_data, run_settings


class Looks:
    """Keeps the steps at which it was called, and what was saved by then. `at` raises at that step."""

    def __init__(self, failing_step=None, error=None):
        self.failing_step, self.error = failing_step, error
        self.views, self.saved = [], []

    def between_steps(self, run):
        self.views.append(run.progress.step)
        self.saved.append(run.progress.saved_step)
        if run.progress.step == self.failing_step:
            raise self.error
        comfy.model_management.unload_all_models()
        run.learner.snapshot()

    def is_due(self, step, steps):
        return True

    def summary(self, run):
        return {"seen": self.views}


def run(model, folder, *watchers, **settings):
    trainer = tiny.make_trainer(model, tiny.make_data([(4, 6)], [16]), folder, steps=4, save_every=2, **settings)
    trainer.watchers += watchers
    try:
        trainer.run()
    finally:
        trainer.placed.weights.unload()
    return trainer


def test_a_watcher_is_called_at_the_start_and_after_each_step_when_what_is_due_is_saved(tiny_flux, tmp_path):
    quiet = run(tiny_flux, tmp_path / "quiet")
    watched = run(tiny_flux, tmp_path / "watched", looks := Looks())
    assert looks.views == [0, 1, 2, 3, 4]
    assert looks.saved == [0, 0, 2, 2, 2]
    assert watched.progress.loss == quiet.progress.loss
    for name, master in watched.network.master_weights().items():
        assert torch.equal(master, quiet.network.master_weights()[name])


@pytest.mark.parametrize("error", [InterruptProcessingException(), torch.OutOfMemoryError("CUDA out of memory")])
def test_end_of_a_watcher_ends_the_run_which_is_saved(tiny_flux, tmp_path, error):
    ends = type(error) if isinstance(error, InterruptProcessingException) else TrainingStopped
    with pytest.raises(ends):
        run(tiny_flux, tmp_path, looks := Looks(failing_step=3, error=error))
    assert looks.views == [0, 1, 2, 3]
    assert (tmp_path / "test_steps" / "test-step000003.safetensors").is_file()


def test_sentences_of_a_watcher_stand_in_the_summary(tiny_flux, tmp_path):
    result = train_lora(
        RunRequest(tiny_flux, mixed_data(), run_settings(steps=2), tmp_path, Watcher(), watchers=[Looks()])
    )
    assert result.summary["seen"] == [0, 1, 2]
