"""A run that is validated and goes on from a state has the earlier points and the best LoRA, or says what it lacks."""

import errno
import json

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.train.loop import best_lora
from tessera.train.watch.validation import Validation
from tiny.train.runs import Watcher, cancel_at, mixed_data, sample, train, training_data


def held_out():
    return training_data(sample("unseen a", 4, 4), sample("unseen b", 6, 4))


def best_of(folder):
    (file,) = folder.glob("*-best.safetensors")
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["tessera_best"]), load_file(file)


def run_folder(root):
    (folder,) = root.iterdir()
    return folder


def test_a_resumed_run_has_the_earlier_points_and_the_same_best(tiny_flux, tmp_path, monkeypatch):
    losses = Validation.losses

    def least_at_4(self, trainer):
        return [loss - 2 * (trainer.progress.step == 4) for loss in losses(self, trainer)]

    monkeypatch.setattr(Validation, "losses", least_at_4)
    options = {"steps": 7, "validation": {"part": 0.2, "every_n_steps": 2, "min_sigma": 0.5}, "save_every": 3}
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole", watcher := Watcher(), **options)
    assert [step for step, _ in watcher.validations] == [0, 2, 4, 6, 7]
    least = min(whole.validation, key=lambda point: point["loss"])
    assert least["step"] == 4
    assert whole.summary["validation"]["best"]["step"] == least["step"]
    for step in (4, 5):
        with pytest.raises(InterruptProcessingException):
            train(tiny_flux, mixed_data(), tmp_path / str(step), cancel_at(step), **options)
        resumed = train(tiny_flux, mixed_data(), tmp_path / str(step), **options)
        assert resumed.validation == whole.validation and resumed.loss == whole.loss
        assert resumed.summary["validation"]["best"] == whole.summary["validation"]["best"]
        (said, tensors), (expected, reference) = (best_of(run_folder(tmp_path / name)) for name in (str(step), "whole"))
        assert said == expected and said["loss"] == least["loss"]
        assert all(torch.equal(tensors[name], reference[name]) for name in reference)


def test_a_lora_whose_own_name_ends_in_best_is_not_taken_for_the_best(tiny_flux, tmp_path):
    options = {"validation": {"data": held_out(), "every_n_steps": 2}, "output_name": "the-best", "save_every": 0}
    first = train(tiny_flux, mixed_data(), tmp_path, steps=3, **options)
    best = first.summary["validation"]["best"]
    watcher = Watcher()
    state = f"{first.path.parent.name}/state-000003.tessera"
    resumed = train(tiny_flux, mixed_data(), tmp_path, watcher, resume=state, seed=4, steps=4, **options)
    assert not [note for note in watcher.notes if "is not saved any more" in note]
    least = min((point for point in resumed.validation if point["step"]), key=lambda point: point["loss"])
    best_entry = resumed.summary["validation"]["best"]
    assert best_entry["loss"] == least["loss"] <= best["loss"]


@pytest.mark.parametrize("changed", [{"seed": 1}, {"sigmas": "0.5"}, {"data": None}], ids=str)
def test_points_of_other_noise_or_pictures_are_not_carried_over(changed, tiny_flux, tmp_path):
    options = {"data": held_out(), "every_n_steps": 2, "at_start": False}
    train(tiny_flux, mixed_data(), tmp_path, steps=2, validation=options, save_every=0)
    if "data" in changed:
        changed = {"data": training_data(sample("unseen c", 4, 4))}
    resumed = train(
        tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), steps=4, validation=options | changed, save_every=0
    )
    assert [point["step"] for point in resumed.validation] == [2, 4] and watcher.validations[0][0] == 2
    message = "The state was validated on other pictures or noise, so its validation losses are not carried over."
    assert message in watcher.notes


def test_a_run_that_goes_on_elsewhere_takes_the_best_with_it(tiny_flux, tmp_path):
    options = {"validation": {"data": held_out(), "every_n_steps": 2}, "optimizer": {"learning_rate": 0.1}}
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path, cancel_at(4), **options)
    first = run_folder(tmp_path)
    first_best, first_tensors = best_of(first)
    resume = f"{first.name}/state-000004.tessera"
    result = train(tiny_flux, mixed_data(), tmp_path, **options, resume=resume, steps=5, output_name="other")
    last_best, tensors = best_of(result.path.parent)
    assert result.path.parent != first and result.summary["validation"]["best"]["file"] == "other-best.safetensors"
    least = min(result.validation, key=lambda point: point["loss"])
    assert last_best["step"] == least["step"]
    assert last_best["step"] != first_best["step"] or all(
        torch.equal(tensors[name], first_tensors[name]) for name in first_tensors
    )


def test_a_disk_too_full_for_the_best_lora_of_another_folder_is_noted_and_training_goes_on(
    tiny_flux, tmp_path, monkeypatch
):
    options = {"validation": {"data": held_out(), "every_n_steps": 2}, "optimizer": {"learning_rate": 0.1}}
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path, cancel_at(4), **options)
    first = run_folder(tmp_path)

    def no_room(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(best_lora, "_copy", no_room)
    watcher, resume = Watcher(), f"{first.name}/state-000004.tessera"
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, **options, resume=resume, steps=5, output_name="other")
    assert result.summary["steps_done"] == 5
    assert any(f"The best LoRA so far stays in '{first.name}' only." in note for note in watcher.notes)


def test_a_least_loss_without_its_lora_is_said_and_the_best_counts_from_there(tiny_flux, tmp_path, monkeypatch):
    """Gone on from step 2 elsewhere, after step 3 of the first run overwrote the LoRA of step 1."""
    table = [9.0, 1.0, 3.0, 0.5, 4.0]
    monkeypatch.setattr(Validation, "losses", lambda self, trainer: [table[trainer.progress.step]] * 9)
    options = {"steps": 4, "validation": {"data": held_out(), "every_n_steps": 1}, "save_every": 2}
    first = train(tiny_flux, mixed_data(), tmp_path, **options)
    assert first.summary["validation"]["best"]["step"] == 3
    table[3] = 2.5
    options |= {"resume": f"{first.path.parent.name}/state-000002.tessera", "optimizer": {"learning_rate": 2e-2}}
    other = train(tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), **options)
    assert [point["loss"] for point in other.validation] == [9.0, 1.0, 3.0, 2.5, 4.0]
    assert other.summary["validation"]["best"]["step"] == 3 and best_of(other.path.parent)[0]["loss"] == 2.5
    message = (
        "The LoRA with the lowest validation loss so far, 1 at step 1, is not saved any more; the best counts from "
        "step 2 on."
    )
    assert message in watcher.notes

    options |= {"resume": f"{other.path.parent.name}/state-000004.tessera", "steps": 5, "output_name": "third"}
    table.append(2.7)
    third = train(tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), **options)
    assert third.summary["validation"]["best"]["step"] == 3
    assert message.replace("the best counts from step 2 on", "the best saved one is that of step 3") in watcher.notes
    options |= {"validation": {"data": held_out(), "every_n_steps": 1, "keep_best": False}, "output_name": "fourth"}
    train(tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), **options)
    assert not [note for note in watcher.notes if "is not saved any more" in note]


def test_samples_trained_on_before_a_resume_are_not_said_to_be_new(tiny_flux, tmp_path):
    def run_notes(**changes):
        result = train(tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), steps=4, **changes)
        notes = [note for note in watcher.notes if note.startswith("Held out") or "new pictures" in note]
        return result.path.parent.name, result.summary["validation"]["samples"], notes

    plain = train(tiny_flux, mixed_data(), tmp_path, steps=2, save_every=0).path.parent.name
    resume = f"{plain}/state-000002.tessera"
    folder, names, notes = run_notes(validation={"part": 0.4}, resume=resume)
    name_list = ", ".join(sorted(names))
    trained_on = "Up to step 2 these were trained on; the validation loss says nothing about new pictures."
    assert len(names) == 2 and notes == [f"Held out for validation: {name_list}. {trained_on}"]
    # It stays so in what goes on from there, and a run from its start has them out all along.
    state = f"{folder}/state-000004.tessera"
    assert run_notes(validation={"part": 0.4}, resume=state, output_name="again")[2] == notes
    folder, _, notes = run_notes(validation={"part": 0.4}, output_name="new")
    assert notes == [f"Held out for validation and not trained on: {name_list}."]
    # Other noise levels are no other pictures.
    resume = f"{folder}/state-000002.tessera"
    assert run_notes(validation={"part": 0.4, "min_sigma": 0.5}, resume=resume, output_name="high")[2] == notes
    _, names, notes = run_notes(validation={"part": 0.2, "seed": 8}, resume=resume, output_name="others")
    assert notes == [
        f"Held out for validation: {names[0]}. Up to step 2 these may have been trained on; if so, the validation loss "
        "says nothing about new pictures."
    ]
    assert not run_notes(validation={"data": held_out()}, resume=f"{plain}/state-000002.tessera", output_name="own")[2]
