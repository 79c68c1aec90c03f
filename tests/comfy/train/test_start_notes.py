"""Notes before a run begins: a sentence on each thing that it reads otherwise than a user may expect, and no other."""

import re
from dataclasses import replace

import pytest
import tiny
import torch
from tessera.data.samples import TrainingData
from tessera.lora.source import LoraSource
from tessera.models.catalogue.registry import family_of
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.timestep_sampling import Strata
from tessera.train.preflight.checks import check_run
from tessera.train.preflight.notes import memory_notes, saving_notes
from tessera.train.preview.sampling import Sampling
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch.previewer import Preview, Previewer
from tiny.compile.compiling import make_lora
from tiny.models.sampling import conditioning
from tiny.train.runs import Watcher, mixed_data, run_settings, sample, train, training_data


def test_distilled_models_name_their_adapter_or_their_base(tiny_files, tmp_path):
    with torch.inference_mode():
        klein = tiny.load_flux2(tiny.write_flux2(tmp_path / "klein.safetensors", guidance=False))
        dev = tiny.load_flux2(tiny.write_flux2(tmp_path / "dev.safetensors"))
    flux, schnell = (tiny.load_model(name, tiny_files[name]) for name in ("flux", "schnell"))
    said = [family_of(model).distillation_notes(model.model) for model in (flux, schnell, dev, klein)]
    assert [len(notes) for notes in said] == [0, 1, 0, 1]
    assert "choose ostris/FLUX.1-schnell-training-adapter (pytorch_lora_weights.safetensors) at training" in said[1][0]
    assert "train on klein base and look at the LoRA on klein (model of Training Preview)" in said[3][0]


def test_a_run_that_does_something_about_it_is_not_told(tiny_files):
    schnell = tiny.load_model("schnell", tiny_files["schnell"])
    data = training_data(sample("a", 4, 4))
    source = LoraSource("adapter", "adapter", lambda: make_lora(schnell))
    for network, expected in (({}, True), ({"training_adapter": source}, False)):
        notes = check_run(schnell, data, run_settings(network=network)).notes
        assert any("plain training undoes that" in note for note in notes) == expected


@pytest.mark.parametrize(
    ("guidance", "expected"), [(3.5, True), (1.0, False), (torch.tensor([3.5]), True), (None, False)]
)
def test_a_guidance_on_positive_that_training_replaces_is_told(tiny_flux, guidance, expected):
    plain = sample("a", 4, 4)
    tensors = plain.load()
    conditioning = {**tensors.conditioning} | ({} if guidance is None else {"guidance": guidance})
    item = replace(
        plain, conditioning=frozenset(conditioning), load=lambda *_: replace(tensors, conditioning=conditioning)
    )
    checked = check_run(tiny_flux, TrainingData((item,), "guided"), run_settings())
    said = [note for note in checked.notes if "guidance" in note]
    sentence = "positive has a guidance of 3.5, but training uses 1, as guidance on Training Objective says."
    assert said == ([sentence] if expected else [])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"blocks_to_swap": 4, "prefetch_blocks": 2}, None),
        (
            {"blocks_to_swap": 3, "prefetch_blocks": 2},
            "prefetch_blocks is 2 with 3 swapped blocks, so all of them are ",
        ),
    ],
)
def test_a_prefetch_that_leaves_nothing_to_swap_is_told(options, expected):
    notes = list(memory_notes(MemoryOptions(**options)))
    assert len(notes) == (expected is not None) and all(note.startswith(expected) for note in notes)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_with_a_slot_for_each_swapped_block_none_is_copied_again_and_that_is_told(tiny_flux, tmp_path, prefetch):
    watcher = Watcher()
    memory = {"blocks_to_swap": 3, "prefetch_blocks": prefetch, "pin_memory": "on"}
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, steps=3, memory=memory)
    all_there = result.summary["block_copies"] == 3
    assert any("and nothing is saved" in note for note in watcher.notes) == all_there == (prefetch == 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"save_every": 6, "validation": {"every_n_steps": 5}},
            "so its state is .* a crash leaves the best LoRA only;",
        ),
        ({"save_every": 5}, None),
        ({"save_every": 0}, None),
        (
            {"save_every": 6},
            "save_every is 6 and the run has 6 steps, so it is saved only at the end, at Cancel and at ",
        ),
        (
            {"save_every": 6, "validation": {"every_n_steps": 5, "keep_best": False}},
            "save_every is 6 .* so it is saved .* and a crash loses it;",
        ),
        (
            {"save_every": 0, "save_every_epochs": 2, "validation": {"every_n_steps": 5}},
            "save_every_epochs is 2 .* so nothing but the best LoRA is saved before its end",
        ),
        ({"save_every": 0, "save_every_epochs": 1}, None),
        ({"save_every": 0, "save_every_epochs": 2}, "save_every_epochs is 2 and the run has 1.2 epochs"),
        (
            {"validation": {"every_n_steps": 6}},
            "keep_best has nothing to compare: every_n_steps of Validation is 6 and the run",
        ),
        ({"validation": {"every_n_steps": 6, "keep_best": False}}, None),
        ({"validation": {"every_n_steps": 5}}, None),
    ],
)
def test_saves_that_never_happen_are_told(settings, expected):
    notes = list(saving_notes(run_settings(**settings), Strata(1, 5)))  # six steps
    expected = () if expected is None else (expected,) if isinstance(expected, str) else expected
    assert len(notes) == len(expected) and all(
        re.search(part, note) for part, note in zip(expected, notes, strict=True)
    )


def sampling(vae=None, **changes):
    return Sampling(vae, conditioning("flux", 16), **{"width": 64, "height": 48, "steps": 2, **changes})


def test_previews_of_a_run_that_was_finished_without_them_are_told(tiny_flux, tiny_vae, tmp_path):
    previews = [Previewer([Preview(sampling(tiny_vae))], tiny_flux)]
    message = "It was trained without previews; to train it again with them, change output_name or seed."

    def run(name, watchers):
        watcher, settings = Watcher(), run_settings(steps=1, output_name=name)
        train_lora(RunRequest(tiny_flux, training_data(sample("a", 4, 4)), settings, tmp_path, watcher, None, watchers))
        return watcher.notes

    assert message not in run("without", ())
    assert message in run("without", previews)
    run("with", previews)
    assert message not in run("with", previews) and message not in run("without", ())
