"""The validation loss is what it says, changes nothing of the training, and picks the best LoRA."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.train.config.settings import MemoryOptions, ValidationOptions
from tessera.train.objective.noise import sample_noise
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions
from tessera.train.step.order import StepOrder
from tessera.train.watch.validation import Validation
from tiny.compile.compiling import Graphs
from tiny.train.runs import Watcher, mixed_data, run_settings, sample, train, training_data
from torch._dynamo.exc import TorchDynamoException

TESTS = Path(__file__).parents[3]
flux_forward = runpy.run_path(str(TESTS / "reference" / "flux.py"))["flux_forward"]
SIGMAS = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def to_tokens(latent):
    channels, height, width = latent.shape
    h, w = height // 2, width // 2
    tokens = latent.reshape(channels, h, 2, w, 2).permute(1, 3, 0, 2, 4).reshape(1, h * w, 4 * channels)
    rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    return tokens, torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).reshape(1, h * w, 3)


def reference_losses(data, weights, lora, seed, guidance):
    """Written out in fp64: at each sigma the mean over the samples of mean((v − (noise − x0))²), masked."""
    tensors = {name: tensor.double() for name, tensor in weights.items()}
    means = []
    for sigma in SIGMAS:
        losses = []
        for item in data.samples:
            read = item.load()
            x0 = (read.latent.double() - 0.1159) * 0.3611
            noise = sample_noise(x0.shape, generator(seed, "validation noise", item.name)).double()
            sigma_value = float(torch.tensor(sigma, dtype=torch.float32))
            tokens, ids = to_tokens((1 - sigma_value) * x0 + sigma_value * noise)
            target, _ = to_tokens(noise - x0)
            text, pooled = read.text.double(), read.conditioning["pooled_output"].double()
            level, guidance_value = (torch.tensor([number], dtype=torch.float64) for number in (sigma_value, guidance))
            velocity = flux_forward(tensors, tokens, ids, text, pooled, level, guidance_value, num_heads=1, lora=lora)
            error = (velocity - target).square().mean(dim=2)[0]
            counted = torch.ones_like(error) if read.weights is None else read.weights.double()
            losses.append(float((error * counted).sum() / counted.sum()))
        means.append(sum(losses) / len(losses))
    return means


def held_out():
    return training_data(sample("unseen a", 4, 4), sample("unseen b", 6, 4), sample("unseen c", 2, 8))


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=str)
def test_the_loss_equals_an_fp64_reference(backend, tiny_files, tiny_flux, tmp_path):
    """With dropout, which is off here, with a mask and the guidance of training, with swapped blocks, and in batches of
    which the last is short."""
    first, *rest = held_out().samples
    read = replace(first.load(), weights=torch.linspace(0, 1, first.tokens))
    held_data = training_data(replace(first, load=lambda *_: read), *rest)
    options = ValidationOptions(data=held_data, seed=7)
    network, memory = NetworkOptions(rank=4, alpha=8.0, dropout=0.5), MemoryOptions("none", blocks_to_swap=2)
    settings = {"validation": options, "network": network, "memory": memory, "batch_size": 2}
    settings["objective"] = ObjectiveOptions(guidance=3.5)
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, backend=backend, held_out=held_data, **settings)
    tiny.fill_up_matrices(trainer)
    lora = {n: (down.detach().double(), up.detach().double(), 2.0) for n, (down, up) in trainer.network.pairs.items()}
    expected = reference_losses(held_data, load_file(tiny_files["flux"]), lora, 7, 3.5)
    assert trainer.watchers[0].losses(trainer.view()) == pytest.approx(expected, rel=1e-4)
    assert all(p.grad is None for p in trainer.network.parameters())
    trainer.close()


def test_measured_weights_are_those_that_would_be_saved(tiny_flux, tmp_path):
    held_data = held_out()
    settings = {"validation": ValidationOptions(data=held_data), "optimizer": OptimizerOptions(ema_decay=0.9)}
    settings["optimizer"] = replace(settings["optimizer"], learning_rate=1e-2)
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path, held_out=held_data, **settings)
    trainer.run()
    (first, last) = trainer.progress.validation
    assert (first["step"], last["step"]) == (0, 4)
    average = trainer.learner.average
    trainer.learner.average = None
    assert trainer.watchers[0].losses(trainer.view()) != pytest.approx(last["losses"], rel=1e-7)
    with torch.no_grad():
        for name, tensor in trainer.network.master_weights().items():
            tensor.copy_(average.master_weights[name])
    assert trainer.watchers[0].losses(trainer.view()) == last["losses"]
    trainer.close()


def test_runs_of_other_objectives_are_measured_at_the_same_sigmas_with_the_same_noise(tiny_flux, tmp_path):
    data, points = mixed_data(), []
    for objective in ({}, {"timestep_sampling": "uniform", "shift": 3.0, "loss": "l1", "noise_offset": 0.1}):
        options = {"objective": objective, "steps": 2, "validation": {"part": 0.4}, "save_every": 0}
        points.append(train(tiny_flux, data, tmp_path, **options).validation)
    assert points[0][0] == points[1][0] and points[0][0]["sigmas"] == SIGMAS
    assert points[0][1]["losses"] != points[1][1]["losses"]
    other = train(tiny_flux, data, tmp_path, steps=2, validation={"part": 0.4, "seed": 1}).validation
    assert other[0]["loss"] != points[0][0]["loss"]


def test_training_is_bit_equal_with_and_without_it(tiny_flux, tmp_path):
    options = {"batch_size": 2, "network": {"dropout": 0.2}, "optimizer": {"optimizer": "adamw_schedulefree"}}
    plain = train(tiny_flux, mixed_data(), tmp_path / "plain", **options)
    watched = train(
        tiny_flux, mixed_data(), tmp_path / "watched", **options, validation={"every_n_steps": 1, "data": held_out()}
    )
    assert watched.loss == plain.loss
    assert all(torch.equal(watched.lora[name], plain.lora[name]) for name in plain.lora)
    assert [point["step"] for point in watched.validation] == [0, 1, 2, 3, 4, 5, 6]
    assert "validation" not in plain.summary
    part = train(tiny_flux, mixed_data(), tmp_path / "part", **options, validation={"part": 0.4})
    remaining = [item for item in mixed_data().samples if item.name not in part.summary["validation"]["samples"]]
    plain_run = train(tiny_flux, training_data(*remaining), tmp_path / "without", **options)
    assert len(remaining) == 3 and part.loss == plain_run.loss
    assert all(torch.equal(part.lora[name], plain_run.lora[name]) for name in plain_run.lora)


def test_held_out_samples_are_never_trained_on_and_leave_whole(tiny_flux, tmp_path, monkeypatch):
    clips = [replace(sample(f"film {n}, frames {n}", 4, 4, repeats=3), file=f"film {n // 2}") for n in range(8)]
    clips += [replace(sample(f"kept {n}", 4, 4), regularisation=True) for n in range(20)]
    files, draw = [], StepOrder.next_micro_batches

    def spy(self, *args):
        micro_batches = draw(self, *args)
        files.extend(self.samples[index].file for micro in micro_batches for index, _ in micro)
        return micro_batches

    monkeypatch.setattr(StepOrder, "next_micro_batches", spy)
    result = train(tiny_flux, training_data(*clips), tmp_path, steps=20, validation={"part": 0.3, "every_n_steps": 20})
    names = result.summary["validation"]["samples"]
    held_files = {clip.file for clip in clips if clip.name in names}
    assert len(held_files) == 1 and len(names) == 2
    assert set(files) == {f"film {n}" for n in range(4)} - held_files | {""}


def test_validation_compiles_nothing_that_is_not_planned_and_nothing_twice(tiny_flux, tmp_path):
    """Its own size is one graph of each block kind more; sizes that training has, none."""
    torch._dynamo.reset()
    held_data = training_data(sample("as trained", 2, 8), sample("of its own", 4, 5))
    options = ValidationOptions(data=held_data, every_n_steps=2)
    counted, graphs = Graphs(), []
    network = NetworkOptions(rank=4, dropout=0.3)
    trainer = tiny.make_trainer(
        *(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path),
        **{"backend": "eager", "steps": 4, "batch_size": 2, "network": network},
        **{"validation": options, "held_out": held_data},
    )
    trainer.observer.validated = lambda *_: graphs.append(counted())
    trainer.run()
    assert trainer.placed.execution.runner.planned_graphs == 2 * 2
    assert graphs == [2 * 2] * 3, "at the start, with the size that is trained later, and twice in between"
    assert trainer.summary()["graphs_compiled"] == 2 * 2 and trainer.summary()["graph_breaks"] == 0
    trainer.close()


def test_a_list_of_sigmas_is_measured_in_place_of_the_nine(tiny_flux, tmp_path):
    options = {"steps": 2, "validation": {"data": held_out()}}
    nine = train(tiny_flux, mixed_data(), tmp_path / "nine", **options).validation[0]
    options["validation"]["sigmas"] = "0.5, 0.1;0.5\n0.8"
    listed = train(tiny_flux, mixed_data(), tmp_path / "listed", **options)
    point = listed.validation[0]
    assert point["sigmas"] == listed.summary["validation"]["sigmas"] == [0.1, 0.5, 0.8]
    expected = [nine["losses"][place] for place in (0, 4, 7)]
    assert point["losses"] == pytest.approx(expected, rel=1e-5)
    assert point["loss"] == pytest.approx(sum(expected) / 3, rel=1e-5)


def test_a_run_with_other_sigmas_is_another_run():
    def key(**validation):
        return run_settings(validation=ValidationOptions(**validation)).key("lineage")

    assert len({key(), key(sigmas="0.5"), key(sigmas="0.5 0.8")}) == 3
    assert key() == key(sigmas="")


@pytest.mark.parametrize("text", ["0.5, half", "0", "1.5", "-0.1 0.5", "nan"])
def test_a_sigma_that_is_none_is_quoted(text):
    with pytest.raises(ValueError, match=r"^sigmas has '(half|0|1\.5|-0\.1|nan)'; give numbers above 0 and up to 1"):
        ValidationOptions(sigmas=text)


def test_a_list_that_leaves_nothing_or_holds_too_much_is_refused():
    assert ValidationOptions(sigmas="0.9 0.2 0.5", min_sigma=0.5).noise_levels == (0.5, 0.9)
    with pytest.raises(ValueError, match="^sigmas is '0.2, 0.3', and none of them is between min_sigma 0.5 and max"):
        ValidationOptions(sigmas="0.2, 0.3", min_sigma=0.5)
    with pytest.raises(ValueError, match="^sigmas has 101 noise levels; give at most 100"):
        ValidationOptions(sigmas=" ".join(str(k / 200) for k in range(1, 102)))


def test_training_that_makes_the_loss_no_better_is_said_and_the_start_is_not_the_best(tiny_flux, tmp_path, monkeypatch):
    note_start = "The validation loss never went below its value at the start"
    for lowest in (1.5, 0.5):
        losses = iter((1.0, 2.0, lowest))
        monkeypatch.setattr(Validation, "losses", lambda *_, losses=losses: [next(losses)] * 9)
        options = {"steps": 2, "validation": {"data": held_out(), "every_n_steps": 1}}
        result = train(tiny_flux, mixed_data(), tmp_path / str(lowest), watcher := Watcher(), **options)
        best = result.summary["validation"]["best"]
        assert (best["step"], best["loss"]) == (2, lowest)
        assert any(note.startswith(note_start) for note in watcher.notes) == (lowest > 1)


def test_earlier_one_of_equal_losses_stays_the_best(tiny_flux, tmp_path, monkeypatch):
    losses = iter((1.0, 0.5, 0.5, 0.5))
    monkeypatch.setattr(Validation, "losses", lambda *_: [next(losses)] * 9)
    options = {"steps": 3, "validation": {"data": held_out(), "every_n_steps": 1}}
    result = train(tiny_flux, mixed_data(), tmp_path, **options)
    assert result.summary["validation"]["best"]["step"] == 1


def test_after_each_measurement_the_progress_says_what_comes_next(tiny_flux, tmp_path):
    options = {"steps": 2, "validation": {"data": held_out(), "every_n_steps": 1}}
    train(tiny_flux, mixed_data(), tmp_path, watcher := Watcher(), **options)
    phases = watcher.phases[watcher.phases.index("Validating at step 0") :]
    assert phases == ["Validating at step 0", "Training", "Validating at step 1", "Training", "Validating at step 2"]


def test_validation_that_cannot_be_measured_ends_in_one_sentence(tiny_flux, tmp_path):
    data = training_data(sample("only one", 4, 4))
    with pytest.raises(ValueError, match="takes 1 of the 1 file of data, so nothing is left to train on"):
        train(tiny_flux, data, tmp_path, validation={"part": 0.5})
    with pytest.raises(ValueError, match="takes 4 of the 4 files"):
        train(tiny_flux, training_data(*mixed_data().samples[:4]), tmp_path, validation={"part": 0.9})
    with pytest.raises(ValueError, match="part is 0 and data is not connected"):
        ValidationOptions(part=0.0)
    with pytest.raises(ValueError, match="^validation: data is empty"):
        train(tiny_flux, data, tmp_path, validation={"data": training_data()})
    with pytest.raises(ValueError, match="min_sigma must be the smaller one"):
        ValidationOptions(min_sigma=0.5, max_sigma=0.5)
    with pytest.raises(ValueError, match="every_n_steps is 0"):
        ValidationOptions(every_n_steps=0)
    assert not any(tmp_path.iterdir())


def test_compiling_that_does_not_work_is_found_out_here_and_the_run_goes_on_eager(tiny_flux, tmp_path, monkeypatch):
    """The measurement at the start is the first thing that compiles."""
    calls, losses = [], Validation.own_losses

    def fails_once(self, trainer):
        calls.append(trainer.placed.execution.runner.planned_graphs)
        if len(calls) == 1:
            raise TorchDynamoException("no compiler")
        return losses(self, trainer)

    monkeypatch.setattr(Validation, "own_losses", fails_once)
    watcher = Watcher()
    options = {"steps": 1, "validation": {"data": held_out()}}
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, **options, compile="auto")
    assert calls[0] > 0 and calls[1:] == [0, 0] and len(result.validation) == 2
    assert sum("Compiling failed, so training runs uncompiled" in note for note in watcher.notes) == 1
