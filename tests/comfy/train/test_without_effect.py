"""What is set and has no effect on a run is said in one sentence before it begins; what has one is not."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from tessera.data.samples import TrainingData
from tessera.lora.source import LoraSource
from tessera.models.registry import family_of
from tessera.nodes.model.block_swap import TesseraBlockSwap
from tessera.nodes.train.inherited_settings import inherited_memory
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.objective.timestep_sampling import Strata
from tessera.train.preflight.checks import check_run
from tessera.train.preflight.notes import guidance_notes, memory_notes, saving_notes, weight_notes
from tessera.train.preview.previewer import Preview, Previewer, preview_notes
from tessera.train.preview.sampling import Sampling, Stages, sample_latent
from tessera.train.settings import MemoryOptions, ValidationOptions
from tessera.train.train_lora import RunRequest, train_lora
from tiny.compile.compiling import make_lora
from tiny.models.sampling import conditioning
from tiny.train.runs import Watcher, mixed_data, run_settings, sample, train, training_data


@pytest.mark.parametrize(("name", "takes"), [("flux", True), ("schnell", False), ("wan", False)])
def test_a_guidance_is_told_where_the_model_has_no_input_for_it(tiny_files, name, takes):
    model = tiny.load_model(name, tiny_files[name])
    family = family_of(model)
    (said,) = list(guidance_notes(family, model.model, ObjectiveOptions(guidance=3.5), ())) or [""]
    assert said.startswith("guidance is not used: ") == (not takes)
    assert not list(guidance_notes(family, model.model, ObjectiveOptions(), ()))


def test_flux2_klein_and_qwen_image_have_no_input_for_guidance(tmp_path):
    with torch.inference_mode():
        klein = tiny.load_flux2(tiny.write_flux2(tmp_path / "klein.safetensors", guidance=False))
        dev = tiny.load_flux2(tiny.write_flux2(tmp_path / "dev.safetensors"))
        qwen = tiny.load_qwen_image(tiny.write_qwen_image(tmp_path / "qwen.safetensors"))
    assert [family_of(model).takes_guidance(model.model) for model in (klein, dev, qwen)] == [False, True, False]
    (said,) = guidance_notes(family_of(klein), klein.model, ObjectiveOptions(guidance=2.0), ())
    assert said == "guidance is not used: FLUX.2 (klein) has no input for it."


def test_what_is_known_to_be_distilled_names_its_adapter_or_its_base(tiny_files, tmp_path):
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
    for network, told in (({}, True), ({"training_adapter": source}, False)):
        notes = check_run(schnell, data, run_settings(network=network)).notes
        assert any("plain training undoes that" in note for note in notes) == told


@pytest.mark.parametrize(("given", "told"), [(3.5, True), (1.0, False), (torch.tensor([3.5]), True), (None, False)])
def test_a_guidance_on_positive_that_training_replaces_is_told(tiny_flux, given, told):
    plain = sample("a", 4, 4)
    tensors = plain.load()
    known = {**tensors.conditioning} | ({} if given is None else {"guidance": given})
    one = replace(plain, conditioning=frozenset(known), load=lambda *_: replace(tensors, conditioning=known))
    checked = check_run(tiny_flux, TrainingData((one,), "guided"), run_settings())
    said = [note for note in checked.notes if "guidance" in note]
    sentence = "positive has a guidance of 3.5, but training uses 1, as guidance on Training Objective says."
    assert said == ([sentence] if told else [])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, None),
        (
            {"activation_budget": 0.3, "checkpointing": "full"},
            "activation_budget is not used: it belongs to checkpointing selective, which is",
        ),
        ({"activation_budget": 0.3, "checkpointing": "selective"}, None),
        ({"activation_budget": 0.3, "checkpointing": "auto"}, None),
        ({"prefetch_blocks": 2}, "prefetch_blocks is not used: blocks_to_swap is 0."),
        ({"prefetch_blocks": 2, "pin_memory": "off"}, "prefetch_blocks and pin_memory are not used: blocks_to_swap is"),
        ({"blocks_to_swap": -1, "prefetch_blocks": 2, "pin_memory": "off"}, None),
        ({"blocks_to_swap": 4, "prefetch_blocks": 2}, None),
        (
            {"blocks_to_swap": 3, "prefetch_blocks": 2},
            "prefetch_blocks is 2 with 3 swapped blocks, so all of them are ",
        ),
    ],
)
def test_memory_options_that_nothing_reads_are_told(options, told):
    notes = list(memory_notes(MemoryOptions(**options)))
    assert len(notes) == (told is not None) and all(note.startswith(told) for note in notes)


@pytest.mark.parametrize("prefetch", [1, 2])
def test_with_a_slot_for_each_swapped_block_none_is_copied_again_and_that_is_told(tiny_flux, tmp_path, prefetch):
    watcher = Watcher()
    memory = {"blocks_to_swap": 3, "prefetch_blocks": prefetch, "pin_memory": "on"}
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, steps=3, memory=memory)
    all_there = result.summary["block_copies"] == 3
    assert any("and nothing is saved" in note for note in watcher.notes) == all_there == (prefetch == 2)
    if not torch.cuda.is_available():
        assert "pin_memory has no effect without a CUDA device." in watcher.notes


def test_what_training_memory_says_of_a_swap_that_the_model_has_is_told(tiny_flux):
    with torch.inference_mode(False):
        swapped = TesseraBlockSwap.execute(tiny_flux, 3, 1, "auto").result[0]
    told = "prefetch_blocks of the connected Training Memory is not used: block swap is set on the MODEL; "
    _, notes = inherited_memory(swapped, MemoryOptions(prefetch_blocks=2))
    assert notes[0] == "blocks_to_swap is 3, as set on the MODEL." and notes[1].startswith(told)
    assert len(inherited_memory(swapped, MemoryOptions())[1]) == 1
    taken, notes = inherited_memory(swapped, MemoryOptions(blocks_to_swap=2, prefetch_blocks=2))
    assert taken.prefetch_blocks == 2 and not any("not used" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"keep_last": 2}, None),
        ({"keep_last": 2, "save_every": 0}, "keep_last is not used: no LoRA is saved on the way, as save_every and"),
        (
            {"keep_last": 2, "save_every": 6},
            ("keep_last is not used: no LoRA is", "so it is saved .* a crash loses it;"),
        ),
        (
            {"keep_last": 2, "save_every": 6, "validation": {"every_n_steps": 5}},
            ("keep_last is not used: no LoRA but the best is", "so its state is .* a crash leaves the best LoRA only;"),
        ),
        ({"keep_last": 2, "save_every": 5}, None),
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
def test_what_is_never_saved_or_kept_is_told(settings, told):
    notes = list(saving_notes(run_settings(**settings), Strata(1, 5)))  # six steps
    told = () if told is None else (told,) if isinstance(told, str) else told
    assert len(notes) == len(told) and all(re.search(part, note) for part, note in zip(told, notes, strict=True))


@pytest.mark.parametrize(
    ("weights", "preservation", "told"),
    [((0.5, 0.5), 0.0, True), ((0.5, 1.0), 0.0, False), ((1.0, 1.0), 0.0, False), ((0.5, 0.5), 1.0, False)],
)
def test_a_loss_weight_that_all_share_is_told(weights, preservation, told):
    samples = [replace(sample(f"{number}", 4, 4), loss_weight=weight) for number, weight in enumerate(weights)]
    notes = list(weight_notes(ObjectiveOptions(preservation_weight=preservation), samples))
    assert [note.startswith("loss_weight is 0.5 for all pictures") for note in notes] == [True] * told


def test_saves_are_foretold_as_they_come(tiny_flux, tmp_path):
    """keep_last is told to do nothing exactly where no LoRA is saved on the way."""
    data = training_data(*(sample(f"{n}", 4, 4) for n in range(3)))
    for number, saving in enumerate(({"save_every_epochs": 1}, {"save_every_epochs": 2}, {"save_every": 4})):
        root, watcher = tmp_path / str(number), Watcher()
        result = train(tiny_flux, data, root, watcher, steps=5, keep_last=1, **{"save_every": 0, **saving})
        saved = any("-step" in name for name in result.summary["files"])
        assert any(note.startswith("keep_last is not used") for note in watcher.notes) == (not saved)


def test_a_part_beside_data_of_its_own_is_told(tiny_flux):
    def told(**validation):
        options = ValidationOptions(data=training_data(sample("own", 4, 4)), **validation)
        return [n for n in check_run(tiny_flux, mixed_data(), run_settings(validation=options)).notes if "part of" in n]

    assert told(part=0.3) == [
        "part of Validation is not used, because data is connected to it and all of that is measured."
    ]
    assert not told()


def sampling(vae=None, **changes):
    return Sampling(vae, conditioning("flux", 16), **{"width": 64, "height": 48, "steps": 2, **changes})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"negative": True}, "negative is not used: at cfg 1 the sampler runs the positive prompt alone"),
        ({"negative": True, "cfg": 2.0}, None),
        ({"negative": True, "sampler_name": "euler_cfg_pp"}, None),
        ({"latent": True}, "width and height are not used: latent_image sets the size."),
        ({"latent": True, "width": 1024, "height": 1024}, None),
        ({"fps": 24.0}, "fps is not used: the prompt is sampled as a picture."),
        ({"fps": 24.0, "frames": 5}, None),
    ],
)
def test_what_a_preview_does_not_read_is_told(changes, told):
    changes = dict(changes)
    if changes.pop("negative", False):
        changes["negative"] = conditioning("flux", 16, 1)
    if changes.pop("latent", False):
        changes["latent_image"] = {"samples": torch.zeros(1, 16, 6, 8)}
    notes = preview_notes([Preview(sampling(**changes))], SimpleNamespace(model_options={}))
    assert notes == ([] if told is None else [notes[0]])
    assert told is None or notes[0].startswith(f"preview: prompt 1: {told}")


@pytest.mark.parametrize("sampler", ["euler", "euler_cfg_pp"])
def test_a_negative_prompt_at_cfg_1_is_told_exactly_where_core_does_not_run_it(tiny_flux, sampler):
    given = sampling(sampler_name=sampler, negative=conditioning("flux", 16, 1))
    other = replace(given, negative=conditioning("flux", 16, 2))
    with torch.inference_mode():
        first, second = (sample_latent(Stages(tiny_flux), one, 5, lambda: None) for one in (given, other))
    told = preview_notes([Preview(given)], tiny_flux)
    assert torch.equal(first, second) == (len(told) == 1)


def test_previews_of_a_run_that_was_finished_without_them_are_told(tiny_flux, tiny_vae, tmp_path):
    previews = [Previewer([Preview(sampling(tiny_vae))], tiny_flux)]
    told = "It was trained without previews; to train it again with them, change output_name or seed."

    def run(name, watchers):
        watcher, settings = Watcher(), run_settings(steps=1, output_name=name)
        train_lora(RunRequest(tiny_flux, training_data(sample("a", 4, 4)), settings, tmp_path, watcher, None, watchers))
        return watcher.notes

    assert told not in run("without", ())
    assert told in run("without", previews)
    run("with", previews)
    assert told not in run("with", previews) and told not in run("without", ())
