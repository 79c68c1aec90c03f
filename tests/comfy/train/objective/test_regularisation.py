"""Regularisation pictures and the weights of folders, in a run and from the folder on."""

from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from PIL import Image
from tessera.data.folders.dataset import scan_images
from tessera.data.folders.options import FolderOptions
from tessera.data.preparation.prepare import summary
from tessera.train.loop.train_step import TrainStep
from tessera.train.objective.batch import make_batch, strata_sizes
from tiny.data.preparing import prepare
from tiny.train.runs import cancel_at, run_settings, sample, train, training_data


def data():
    """Two pictures and three regularisation pictures at half the weight."""
    regularisation = [replace(sample(f"kept {i}", 4, 4), regularisation=True, loss_weight=0.5) for i in range(3)]
    return training_data(sample("a", 4, 4), sample("b", 2, 8), *regularisation)


def test_the_loss_of_a_batch_is_the_mean_of_its_samples_losses_by_their_weights(tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, data(), tmp_path, batch_size=2)
    tiny.fill_up_matrices(trainer)
    pair = [trainer.context.data.samples[0], trainer.context.data.samples[2]]
    step_batch = make_batch(
        trainer.context.patcher,
        trainer.context.family,
        [(item, item.load()) for item in pair],
        trainer.settings.objective,
        trainer.device,
        3,
        (0, 0),
    )
    with torch.no_grad():
        error = (
            (trainer.placed.velocity(step_batch.inputs, (0, 0)) - step_batch.target).double().square().mean(dim=(1, 2))
        )
    actual = trainer.train_step.forward_backward([tiny.micro_batch(0, 2)])
    assert actual == pytest.approx((float(error[0]) + 0.5 * float(error[1])) / 2, rel=1e-5)
    trainer.close()


def test_a_run_shows_them_every_second_time_and_goes_on_alike_after_a_cancel(tiny_flux, tmp_path, monkeypatch):
    names = []
    trained = TrainStep.micro_batch

    def recorded(self, requests, *args):
        names.extend(self.batches.context.data.samples[index].name for index, _ in requests)
        trained(self, requests, *args)

    monkeypatch.setattr(TrainStep, "micro_batch", recorded)
    options = {"steps": 8, "objective": {"stratified": "epoch"}}
    whole = train(tiny_flux, data(), tmp_path / "whole", **options)
    uninterrupted = list(names)
    names.clear()
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, data(), tmp_path / "cancelled", cancel_at(3), **options)
    resumed = train(tiny_flux, data(), tmp_path / "cancelled", **options)
    assert names == uninterrupted
    assert whole.loss == resumed.loss
    assert all(torch.equal(whole.lora[name], resumed.lora[name]) for name in whole.lora)
    assert sorted(uninterrupted[:4])[:2] == ["a", "b"] == sorted(uninterrupted[4:])[:2]
    assert {name for name in uninterrupted if name.startswith("kept")} == {"kept 0", "kept 1", "kept 2"}
    assert strata_sizes(run_settings().samples_per_step, data().samples).epoch == 4


def test_a_data_set_of_nothing_else_is_refused_before_anything_is_loaded(tiny_flux, tmp_path):
    alone = training_data(*(item for item in data().samples if item.regularisation))
    with pytest.raises(ValueError, match="All pictures are regularisation pictures"):
        train(tiny_flux, alone, tmp_path)


def test_a_folder_of_them_is_prepared_with_its_weight_and_told(tiny_vae, tiny_clip, tmp_path, monkeypatch):
    for name, count in (("own", 2), ("class", 3)):
        (tmp_path / name).mkdir()
        for index in range(count):
            pixels = np.random.default_rng(index).integers(0, 256, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
            (tmp_path / name / f"{index}.txt").write_text("a dog")
    subject_data = scan_images(tmp_path / "own", repeats=3, trigger_words="ohwx")
    class_data = scan_images(tmp_path / "class", options=FolderOptions(regularisation=True, loss_weight=0.25))
    options = {"megapixels": 0.004, "max_graphs": 1, "fit": "ragged edge", "max_text_length": 512}
    prepared = prepare(subject_data + class_data, tiny_vae, tiny_clip, cache_dir=tmp_path / "cache", **options)
    samples = prepared.data.samples
    assert [(item.regularisation, item.loss_weight) for item in samples] == [(False, 1.0)] * 2 + [(True, 0.25)] * 3
    assert "One epoch shows 12, repeats included." in summary(prepared)
    (text,) = [note for note in prepared.notes if note.startswith("Regularisation: every second showing is one of 3 ")]
    assert "6 per epoch, or 2 times" in text
    other = scan_images(tmp_path / "class", options=FolderOptions(regularisation=True, loss_weight=0.5))
    other_prepared = prepare(subject_data + other, tiny_vae, tiny_clip, cache_dir=tmp_path / "cache", **options)
    assert other_prepared.data.fingerprint != prepared.data.fingerprint

    def load(*args, **kwargs):
        raise AssertionError("something was encoded")

    monkeypatch.setattr(tiny_vae, "encode", load)
    with pytest.raises(ValueError, match="All pictures are regularisation pictures"):
        prepare(class_data, tiny_vae, tiny_clip, cache_dir=tmp_path / "none", **options)


def test_bad_weights_end_in_a_sentence():
    for weight in (0.0, -1.0, 101.0):
        with pytest.raises(ValueError, match=f"loss_weight is {weight}; set it above 0 and to at most 100"):
            FolderOptions(loss_weight=weight)
