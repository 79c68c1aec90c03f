"""Loss by picture: what hurts ranks last, the run's bits stay, the work stays in its budget, and resume continues."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from PIL import Image
from tessera.common.rng import generator
from tessera.data.samples import SampleTensors
from tessera.nodes.loras.loss_by_picture import TesseraLossByPicture
from tessera.nodes.train.run import outputs
from tessera.train.report.observer import STOP
from tessera.train.watch import picture_losses
from tessera.train.watch.rotation import budget
from tessera.train.watch.validation import row_losses
from tiny.train.runs import Watcher, cancel_at, run_settings, sample, train, training_data

OPTIONS = {"every_n_steps": 20, "at_start": False, "keep_best": False, "loss_by_picture": True}


def of_one_thing(name, thing="fox", text="fox"):
    """A sample of 4 x 4 tokens in the plain colour of a thing, a little uneven, with the text of a caption."""
    colour = sample(thing, 4, 4).load().latent[:, :1, :1]
    caption = sample(f"caption {text}", 4, 4).load()
    uneven = 0.3 * torch.randn(16, 8, 8, generator=generator(0, name))
    tensors = SampleTensors(6 * colour + uneven, caption.text, caption.conditioning)
    return replace(sample(name, 4, 4), load=lambda *_: tensors)


def foxes():
    """Seven pictures of a fox, of which one shows something else under the caption of the fox."""
    return training_data(*(of_one_thing(f"{n}.png", thing="house" if n == 3 else "fox") for n in range(7)))


def held_out():
    return training_data(of_one_thing("unseen 1.png"), of_one_thing("unseen 2.png"))


@pytest.fixture(scope="module")
def run(tiny_files, tmp_path_factory):
    """A finished run with the option, and one without it."""
    tiny_flux = tiny.load_flux(tiny_files["flux"])
    root = tmp_path_factory.mktemp("runs")
    options = {"steps": 72, "batch_size": 2, "save_every": 0}
    # At high noise the caption decides what the model expects; at low noise the picture itself shows through.
    validation = OPTIONS | {"data": held_out(), "sigmas": "0.9"}
    with_it = train(tiny_flux, foxes(), root / "with", validation=validation, **options)
    validation = validation | {"loss_by_picture": False}
    return with_it, train(tiny_flux, foxes(), root / "without", validation=validation, **options)


def test_a_mislabelled_picture_ranks_last_relative_to_the_base_model(run):
    report = run[0].pictures
    assert [picture["file"] for picture in report["pictures"]][-1] == "3.png"
    verdicts = {picture["file"]: picture["verdict"] for picture in report["pictures"]}
    assert len(verdicts) == 7 == report["of"] and verdicts.pop("3.png") == "resists"
    assert set(verdicts.values()) == {"learns"} and report["leave_out"] == ["3.png"]
    *learnt, last = (picture["relative"] for picture in report["pictures"])
    assert max(learnt) < report["held_out"] + 0.05 < 1 and last > max(learnt) + 0.1
    with Image.open(run[0].picture_sheet) as sheet:
        assert sheet.width == 1024


def test_the_run_is_bit_equal_with_and_without_it(run):
    with_it, without = run
    assert with_it.loss == without.loss and with_it.validation == without.validation
    assert all(torch.equal(with_it.lora[name], without.lora[name]) for name in without.lora)
    assert without.pictures is None and without.picture_sheet is None


def test_the_random_state_is_restored_and_the_work_is_within_its_budget(tiny_flux, tmp_path, monkeypatch):
    batches, states = [], []

    def spy(*arguments, **named):
        torch.rand(3)  # as a model's own code might
        batches.append(arguments[1])
        return row_losses(*arguments, **named)

    monkeypatch.setattr(picture_losses, "row_losses", spy)
    watcher = Watcher(at_step=lambda step: states.append(torch.get_rng_state()))
    settings = {"steps": 80, "validation": OPTIONS | {"data": held_out(), "every_n_steps": 1000}}
    result = train(tiny_flux, foxes(), tmp_path, watcher, save_every=0, **settings)
    assert len(batches) == budget(run_settings(steps=80), 80) == 12
    assert len(result.pictures["pictures"]) == 4 and result.pictures["sigmas"] == [0.5]
    assert any("measured 4 of 7 pictures, which is what 5% of the run buys" in note for note in watcher.notes)
    assert torch.equal(states[-1], torch.get_rng_state())


def test_turns_between_the_steps_are_spent_evenly_and_within_the_budget(tiny_flux, tmp_path, monkeypatch):
    steps: list[int] = []
    seeds: set[int] = set()

    def spy(run, inputs, seed, **options):
        steps.append(run.progress.step)
        seeds.add(seed)
        return row_losses(run, inputs, seed, **options)

    monkeypatch.setattr(picture_losses, "row_losses", spy)
    validation = OPTIONS | {"data": held_out(), "every_n_steps": 10, "sigmas": "0.5"}
    pictures = training_data(*foxes().samples[2:5])
    train(tiny_flux, pictures, tmp_path, steps=80, batch_size=1, save_every=0, validation=validation)
    # Of 12 forwards the end takes 8: three pictures and a held-out one, with the LoRA and without it. Half of the rest
    # buys a picture at half of the run, whose base model is then known: one forward less is left for the end.
    assert len(seeds) == 1, "the noise of a picture is the same at every step"
    assert steps == [40] * 2 + [80] * 7 and len(steps) <= budget(run_settings(steps=80), 80) == 12


def test_a_picture_whose_loss_is_not_finite_is_not_ranked(tiny_flux, tmp_path, monkeypatch):
    """As in fp16, where one picture may overflow at one noise."""

    def overflow(run, inputs, seed, *, trained):
        losses = row_losses(run, inputs, seed, trained=trained)
        rows = zip(inputs, losses, strict=True)
        return [math.nan if trained and item.name == "1.png" else loss for (item, _, _), loss in rows]

    monkeypatch.setattr(picture_losses, "row_losses", overflow)
    data = training_data(*foxes().samples[:2])
    validation = OPTIONS | {"data": held_out(), "sigmas": "0.5"}
    report = train(tiny_flux, data, tmp_path, steps=60, batch_size=1, save_every=0, validation=validation).pictures
    assert [picture["file"] for picture in report["pictures"]] == ["0.png"] and math.isfinite(report["median"])


def test_a_cancelled_run_goes_on_to_the_same_ranking(tiny_flux, tmp_path):
    options = {"steps": 40, "batch_size": 4, "save_every": 0, "validation": OPTIONS | {"data": held_out()}}
    options["validation"] |= {"every_n_steps": 10, "sigmas": "0.5"}
    few = training_data(*foxes().samples[2:5])
    whole = train(tiny_flux, few, tmp_path / "whole", **options)
    earlier = [picture["earlier"] for picture in whole.pictures["pictures"]]
    assert any(earlier), "some had their turn before the last step"
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, few, tmp_path / "cancelled", cancel_at(33), **options)
    again = train(tiny_flux, few, tmp_path / "cancelled", **options)
    assert again.pictures == whole.pictures and again.loss == whole.loss


def test_pictures_of_regularisation_are_not_measured(tiny_flux, tmp_path):
    preserved = replace(of_one_thing("reg.png", "dog", "dog"), regularisation=True)
    data = training_data(*foxes().samples[:2], preserved)
    options = {"steps": 60, "batch_size": 2, "save_every": 0, "validation": OPTIONS | {"data": held_out()}}
    report = train(tiny_flux, data, tmp_path, **options).pictures
    assert report["of"] == 2 and sorted(picture["file"] for picture in report["pictures"]) == ["0.png", "1.png"]


def test_stop_measures_what_its_steps_buy(tiny_flux, tmp_path):
    watcher = Watcher()
    watcher.asks[40] = frozenset({STOP})
    options = {"steps": 80, "batch_size": 2, "save_every": 0}
    options["validation"] = OPTIONS | {"data": held_out(), "every_n_steps": 1000}
    stopped = train(tiny_flux, foxes(), tmp_path, watcher, **options)
    assert stopped.stopped and stopped.pictures["step"] == 40
    assert 0 < len(stopped.pictures["pictures"]) < 7


def test_the_node_shows_the_sheet_and_lists_what_resists(run):
    _, losses, _ = outputs(run[0])
    with torch.inference_mode():
        sheet, leave_out, text = TesseraLossByPicture.execute(losses).result
        redrawn = TesseraLossByPicture.execute({"pictures": {**losses["pictures"], "sheet": "/etc/sheet.png"}}).result
    assert sheet.shape[2:] == (1024, 3) and redrawn[0].shape == sheet.shape
    assert leave_out == "3.png"
    assert text.startswith("7 of 7 pictures, measured at step 72 against the base model at the same noise.")
    assert "Resist (look at their captions, or leave them out): 3.png " in text
    for other in (outputs(run[1])[1], {"pictures": {"report": {"pictures": []}}}):
        with pytest.raises(ValueError, match="^loss has no losses of single pictures; connect Validation"):
            TesseraLossByPicture.execute(other)
