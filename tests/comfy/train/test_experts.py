"""Wan 2.2's two experts in one queue: each run is what a run of that expert alone would be."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from safetensors.torch import load_file
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import choose_targets
from tessera.lora.source import LoraSource
from tessera.models.blocks import linear_shapes
from tessera.models.catalogue.registry import family_of
from tessera.nodes.options.lora_files import low_noise_source
from tessera.nodes.train.inherited_settings import shared_lora_notes
from tessera.train.config.expert_pair import HIGH, LOW
from tessera.train.config.settings import MemoryOptions
from tessera.train.experts import ExpertObserver, plan_experts
from tessera.train.objective import batch
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.preflight.checks import check_run
from tessera.train.report.observer import StepReport
from tessera.train.train_lora import RunRequest, train_lora
from tiny.lora.lora_files import random_update
from tiny.models.wan import wan_sample
from tiny.train.runs import Watcher, cancel_at, run_settings, sample, training_data


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    i2v = tiny.write_wan(folder / "i2v.safetensors", variant="2.2-i2v-14b", layers=1)
    pair = [tiny.write_wan(folder / f"{side}.safetensors", layers=1, seed=seed) for side, seed in ((HIGH, 1), (LOW, 2))]
    return {HIGH: pair[0], LOW: pair[1], "i2v": i2v}


@pytest.fixture
def experts(files):
    return tiny.load_wan(files[HIGH]), tiny.load_wan(files[LOW])


def clips():
    return training_data(wan_sample("a", (1, 4, 4)), wan_sample("b", (2, 2, 4)), wan_sample("c", (4, 2, 2)))


def planned(experts, **changes):
    settings = run_settings(output_name="film", save_every=0, **changes)
    return plan_experts(*experts, clips(), settings)


def run_both(experts, root, watcher=None, **changes):
    observer = watcher or Watcher()
    return [
        train_lora(RunRequest(e.model, clips(), e.settings, root, ExpertObserver(observer, e, number, 2)))
        for number, e in enumerate(planned(experts, **changes))
    ]


def test_progress_and_the_time_left_are_those_of_both(experts):
    watcher, reports = Watcher(), []
    watcher.step = reports.append
    for number, expert in enumerate(planned(experts, steps=4)):
        ExpertObserver(watcher, expert, number, 2).step(StepReport(3, 4, 0.5, 1e-4, 2.0, 2.0))
    assert [(report.step, report.steps, report.seconds_left) for report in reports] == [(3, 8, 10.0), (7, 8, 2.0)]


def test_both_in_one_queue_give_the_files_of_each_alone(experts, tmp_path, monkeypatch):
    sigmas = []
    draw = batch.sample_sigma
    monkeypatch.setattr(batch, "sample_sigma", lambda *args: sigmas.append(draw(*args)) or sigmas[-1])
    watcher = Watcher()
    results = run_both(experts, tmp_path / "both", watcher)
    assert [result.path.name for result in results] == ["film_high_noise.safetensors", "film_low_noise.safetensors"]
    assert min(sigmas[:6]) >= 0.875 >= max(sigmas[6:]) and len(sigmas) == 12
    assert watcher.steps_done == 12 and any(text.startswith("Low noise expert: ") for text in watcher.phases)

    ranges = {HIGH: {"min_sigma": 0.875}, LOW: {"max_sigma": 0.875}}
    for model, side, together in zip(experts, (HIGH, LOW), results, strict=True):
        settings = run_settings(output_name=f"film_{side}", save_every=0, objective=ranges[side])
        alone = train_lora(RunRequest(model, clips(), settings, tmp_path / "alone", Watcher()))
        assert alone.loss == together.loss
        tensors, other = load_file(alone.path), load_file(together.path)
        assert tensors.keys() == other.keys() and all(torch.equal(tensors[key], other[key]) for key in tensors)
        assert alone.path.parent.name == together.path.parent.name  # one key: either finds the other's files


def test_the_second_goes_on_where_it_was_cancelled_and_the_first_is_not_trained_again(experts, tmp_path):
    whole = run_both(experts, tmp_path / "whole")
    with pytest.raises(InterruptProcessingException):
        run_both(experts, tmp_path / "broken", cancel_at(6 + 3))
    watcher = Watcher()
    resumed = run_both(experts, tmp_path / "broken", watcher)
    assert any("High noise expert: This run already finished" in note for note in watcher.notes)
    assert any("Low noise expert: Resumed at step 3" in note for note in watcher.notes)
    assert [r.loss for r in resumed] == [w.loss for w in whole]


def test_pair_under_other_settings_resumes_the_second_by_name_and_finds_the_first(experts, tmp_path):
    """The state that the message of a run that breaks off names is of one expert only."""

    def cancelled(step, **changes):
        with pytest.raises(InterruptProcessingException):
            run_both(experts, tmp_path, cancel_at(step), **changes)

    def goes_on(steps, **changes):
        watcher = Watcher()
        high, _ = run_both(experts, tmp_path, watcher, steps=steps, resume=low.as_posix(), **changes)
        notes = [note for note in watcher.notes if note.startswith("High noise expert: No run had these settings")]
        assert all(note.endswith("; set resume to 'off' to train from step 0.") for note in notes)
        return high.path.parent, len(watcher.losses), notes

    slower = {"optimizer": {"learning_rate": 1e-3}}
    cancelled(1, steps=2)
    (first,) = (path.relative_to(tmp_path) for path in tmp_path.rglob("*.tessera"))
    cancelled(2 + 1, steps=2, resume=first.as_posix(), **slower)
    (low,) = (path.relative_to(tmp_path) for path in tmp_path.glob("film_low_noise (*)/*.tessera"))
    (folder_of_pair,) = {path.parent for path in tmp_path.rglob("film_high_noise.safetensors")}
    assert folder_of_pair.name != first.parent.name
    folder, steps, (note,) = goes_on(2, **slower)
    assert (folder, steps) == (folder_of_pair, 1) and f"this one continues {folder_of_pair.name}" in note
    # It is gone on with too where it is not finished.
    folder, steps, (note,) = goes_on(3, **slower)
    assert steps == 1 + 2 and folder != folder_of_pair and f"this one continues {folder_of_pair.name}" in note
    # A run with these settings from its start comes before it.
    cancelled(1, steps=4, **slower)
    assert goes_on(4, **slower)[1:] == (3 + 3, [])


def test_a_named_state_goes_to_the_expert_it_is_of(experts):
    state = "styles/film_low_noise (001)/state-000003.tessera"
    settings = run_settings(output_name="styles/film", resume=state)
    high, low = plan_experts(*experts, clips(), settings)
    assert (high.settings.resume, low.settings.resume) == ("latest", state)
    settings = replace(settings, resume="styles/other (001)/state-000003.tessera")
    with pytest.raises(ValueError, match="is a state of neither film_high_noise nor film_low_noise"):
        plan_experts(*experts, clips(), settings)


def test_a_state_that_does_not_fit_the_second_is_refused_before_the_first_is_trained(experts, tmp_path):
    _, low = run_both(experts, tmp_path, steps=1)
    state = f"{low.path.parent.name}/state-000001.tessera"
    changed = run_settings(output_name="film", resume=state, network={"rank": 2})
    with pytest.raises(ValueError, match="^resume: that state was trained with rank 4"):
        plan_experts(*experts, clips(), changed, tmp_path)
    assert plan_experts(*experts, clips(), run_settings(output_name="film", resume=state), tmp_path)


def test_a_disk_without_room_for_both_is_told_before_the_first_is_trained(experts, tmp_path, monkeypatch):
    results = run_both(experts, tmp_path / "whole")
    size = sum(path.stat().st_size for path in results[0].path.parent.iterdir())
    usage = shutil.disk_usage(tmp_path)

    def plan(free, root, as_run=lambda expert: expert.settings):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
        return plan_experts(*experts, clips(), run_settings(output_name="film", save_every=0), root, as_run)

    message = (
        "^output_name: the disk with the output folder has only .* free, but the runs of the two experts write at least"
    )
    with pytest.raises(ValueError, match=message):
        plan(size * 3 // 2, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert plan(2 * size, tmp_path / "new")
    assert plan(size * 3 // 2, tmp_path / "whole")  # both are finished
    with pytest.raises(ValueError, match=message):  # as these settings are not those of their runs
        plan(
            size * 3 // 2,
            tmp_path / "whole",
            lambda expert: replace(expert.settings, memory=MemoryOptions(blocks_to_swap=1)),
        )


@pytest.mark.parametrize(
    ("objective", "high", "low"),
    [
        ({}, (0.875, 1.0), (0.0, 0.875)),
        ({"expert_boundary": 0.6}, (0.6, 1.0), (0.0, 0.6)),
        ({"min_sigma": 0.2, "max_sigma": 0.95}, (0.875, 0.95), (0.2, 0.875)),
    ],
)
def test_the_noise_levels_are_shared_at_the_boundary(experts, objective, high, low):
    ranges = [
        (e.settings.objective.min_sigma, e.settings.objective.max_sigma) for e in planned(experts, objective=objective)
    ]
    assert ranges == [high, low]
    assert [e.side for e in planned(experts)] == [HIGH, LOW]


def test_image_to_video_shares_them_at_its_own(files, tmp_path):
    pair = (
        tiny.load_wan(files["i2v"]),
        tiny.load_wan(tiny.write_wan(tmp_path / "l.safetensors", variant="2.2-i2v-14b", layers=1, seed=5)),
    )
    data = training_data(wan_sample("a", (2, 2, 4), "2.2-i2v-14b"))
    settings = run_settings()
    (high, low) = plan_experts(*pair, data, settings)
    assert high.settings.objective == replace(ObjectiveOptions(), min_sigma=0.9)
    assert low.settings.objective == replace(ObjectiveOptions(), max_sigma=0.9)


def test_models_that_are_no_pair_of_experts_are_refused_before_anything_is_loaded(experts, files, tiny_flux, tmp_path):
    settings = run_settings()
    high, low = experts
    with pytest.raises(ValueError, match="are the same weights; connect the high noise expert"):
        plan_experts(high, tiny.load_wan(files[HIGH]), clips(), settings)
    with pytest.raises(ValueError, match="connect the two experts of one Wan 2.2 model"):
        plan_experts(high, tiny.load_wan(files["i2v"]), clips(), settings)
    small = tiny.load_wan(tiny.write_wan(tmp_path / "small.safetensors", layers=2))
    with pytest.raises(ValueError, match="are Wan models of different size"):
        plan_experts(high, small, clips(), settings)
    pictures = training_data(sample("p", 4, 4))
    with pytest.raises(ValueError, match="model_low_noise is for Wan 2.2's second expert, and model is FLUX.1"):
        plan_experts(tiny_flux, tiny_flux, pictures, settings)
    with pytest.raises(ValueError, match="leaves nothing for the high noise expert"):
        planned(experts, objective={"max_sigma": 0.5})


def test_shift_by_resolution_goes_by_the_tokens_of_one_frame(experts, monkeypatch):
    high, _ = experts
    sizes = []
    monkeypatch.setattr(batch, "sample_sigma", lambda options, generator, tokens, *rest: sizes.append(tokens) or 0.5)
    family, samples = family_of(high), clips().samples
    for item in samples:
        step_batch = batch.make_batch(
            high, family, [(item, item.load())], ObjectiveOptions(), torch.device("cpu"), 0, (0, 0)
        )
        assert step_batch.inputs.tokens.shape[1] == item.tokens
    assert sizes == [16, 8, 4]  # 1, 2 and 4 latent frames


def test_a_boundary_without_a_second_expert_makes_no_other_run(experts, tmp_path):
    high, _ = experts
    watcher = Watcher()
    plain = train_lora(RunRequest(high, clips(), run_settings(steps=1), tmp_path, Watcher()))
    settings = run_settings(steps=1, objective={"expert_boundary": 0.6})
    repeat = train_lora(RunRequest(high, clips(), settings, tmp_path, watcher))
    assert repeat.path == plain.path and "already finished" in watcher.notes[-1]


def test_dropout_is_said_to_work_within_the_blocks(experts):
    high, _ = experts
    network = {"dropout": 0.1, "include": ("head.head", "blocks.*.ffn.*")}
    assert (
        "dropout works only inside the blocks, so 1 trained layer outside has none."
        in check_run(high, clips(), run_settings(network=network)).notes
    )


def test_each_expert_is_measured_at_the_noise_levels_that_it_is_used_for(experts, tmp_path):
    watcher = Watcher()
    high, low = run_both(experts, tmp_path, watcher, steps=2, validation={"part": 0.3})
    assert [(point["step"], point["sigmas"][0], point["sigmas"][-1]) for point in high.validation] == [
        (step, pytest.approx(0.8875), pytest.approx(0.9875)) for step in (0, 2)
    ]
    assert low.validation[0]["sigmas"] == pytest.approx([0.0875 * k for k in range(1, 10)])
    assert high.summary["validation"]["samples"] == low.summary["validation"]["samples"]
    assert [step for step, _ in watcher.validations] == [0, 2, 2, 4]
    with pytest.raises(ValueError, match="min_sigma 0.9 to max_sigma 1 of validation leave nothing for the low noise"):
        planned(experts, validation={"min_sigma": 0.9})
    sides = planned(experts, validation={"sigmas": "0.1 0.5 0.9"})
    assert [side.settings.validation.noise_levels for side in sides] == [(0.9,), (0.1, 0.5)]
    with pytest.raises(ValueError, match="leave nothing for the high noise expert, which has 0.875 to 1"):
        planned(experts, validation={"sigmas": "0.1 0.5"})


def lora_of(model, seed):
    """A LoRA on every layer that is trained, as the MODEL's family has them."""
    targets = choose_targets(family_of(model), model.model, NetworkOptions())
    shapes = linear_shapes(model.model)
    updates = {name: random_update(*shapes[name], seed + i) for i, name in enumerate(targets)}
    return LoraSource.from_lora(convert(LoraModel.from_modules(updates)), f"lora {seed}")


def test_each_expert_begins_from_its_own_lora_and_stands_on_its_own(experts, tmp_path):
    """Each run is what a run of that expert alone would be with its LoRAs, and another LoRA for one is a new run of
    that one only."""
    first, second, high_base, low_base = (lora_of(experts[0], seed) for seed in (100, 200, 300, 400))
    pair = {"start_from": first, "base_lora": high_base, "base_strength": 0.1}
    pair |= {"start_from_low_noise": second, "base_lora_low_noise": low_base, "base_strength_low_noise": 0.2}
    with pytest.raises(InterruptProcessingException):
        run_both(experts, tmp_path / "both", cancel_at(2 + 1), network=pair, steps=2)
    watcher = Watcher()
    results = run_both(experts, tmp_path / "both", watcher, network=pair, steps=2)
    assert any("Low noise expert: Resumed at step 1" in note for note in watcher.notes)
    own_options = {
        HIGH: {"start_from": first, "base_lora": high_base, "base_strength": 0.1},
        LOW: {"start_from": second, "base_lora": low_base, "base_strength": 0.2},
    }
    ranges = {HIGH: {"min_sigma": 0.875}, LOW: {"max_sigma": 0.875}}
    for model, side, together in zip(experts, (HIGH, LOW), results, strict=True):
        settings = run_settings(
            output_name=f"film_{side}", save_every=0, steps=2, network=own_options[side], objective=ranges[side]
        )
        alone = train_lora(RunRequest(model, clips(), settings, tmp_path / "alone", Watcher()))
        assert alone.loss == together.loss and alone.path.parent.name == together.path.parent.name
        actual, expected = (json.loads(run.lora.metadata["tessera"])["network"] for run in (together, alone))
        assert actual == expected and actual["start_from"]["content"] == own_options[side]["start_from"].content
    repeat = run_both(experts, tmp_path / "both", network=pair | {"start_from_low_noise": "none"}, steps=2)
    assert repeat[0].path == results[0].path and repeat[1].path != results[1].path
    assert repeat[1].loss != results[1].loss


def test_options_of_a_pair_that_shares_its_loras_are_those_of_before(experts):
    """`same`, which is the default, takes the strength too; `none` takes neither."""
    common = NetworkOptions(start_from=lora_of(experts[0], 1), base_lora=lora_of(experts[0], 2), base_strength=0.5)
    assert common.for_low_noise() == common == common.for_high_noise()
    alone = replace(common, start_from_low_noise="none", base_lora_low_noise="none", base_strength_low_noise=0.3)
    assert alone.for_high_noise() == common and alone.for_low_noise() == NetworkOptions()
    with pytest.raises(ValueError, match="base_lora_low_noise is 'other'; choose"):
        NetworkOptions(base_lora_low_noise="other")


def test_settings_for_a_missing_second_expert_make_no_other_run(experts, tmp_path):
    high, _ = experts
    plain = train_lora(RunRequest(high, clips(), run_settings(steps=1), tmp_path, Watcher()))
    settings = run_settings(steps=1, network={"start_from_low_noise": lora_of(high, 1), "base_strength_low_noise": 0.5})
    repeat = train_lora(RunRequest(high, clips(), settings, tmp_path, Watcher()))
    assert repeat.path == plain.path


def test_a_message_names_the_input_of_the_expert(experts, tiny_flux):
    wrong = convert(LoraModel.from_modules({"single_blocks.0.linear2": random_update(128, 640, 1)}))
    for name in ("start_from_low_noise", "base_lora_low_noise"):
        with pytest.raises(ValueError, match=f"^{name}: LORA_MODEL has no update for"):
            planned(experts, network={name: low_noise_source(name, "same", wrong)})
        with pytest.raises(ValueError, match=f"{name} is 'none' and a LORA_MODEL is connected too; set {name} to same"):
            low_noise_source(name, "none", wrong)
        assert [low_noise_source(name, choice) for choice in ("same", "none")] == ["same", "none"]
    source = lora_of(experts[0], 1)
    with pytest.raises(ValueError, match="base_strength_low_noise is 0, at which base_lora_low_noise has no effect"):
        NetworkOptions(base_lora_low_noise=source, base_strength_low_noise=0.0)
    with pytest.raises(ValueError, match="start_from_low_noise is LORA_MODEL and init is pissa"):
        NetworkOptions(start_from_low_noise=source, init="pissa")


def test_shares_of_two_experts_are_said(experts):
    source = LoraSource("mine.safetensors", "x")
    settings = run_settings(network={"start_from": source, "base_lora": source, "base_lora_low_noise": "none"})
    assert shared_lora_notes(settings) == [
        "start_from mine.safetensors is used for both experts; to give the low noise one its own, set "
        "start_from_low_noise on LoRA Network."
    ]
    assert (
        shared_lora_notes(run_settings(network={"base_lora_low_noise": source, "base_strength_low_noise": 0.5})) == []
    )
