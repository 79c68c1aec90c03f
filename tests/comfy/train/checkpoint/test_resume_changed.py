"""A named state under other settings: what it was trained with stays in force or is refused, and nothing is unsaid."""

import json
from dataclasses import asdict

import pytest
import safetensors.torch
from comfy.model_management import InterruptProcessingException
from safetensors import safe_open
from tessera.lora.options import NetworkOptions
from tessera.train.checkpoint.history import continued_from
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.optim.options import OptimizerOptions
from tiny.train.runs import Watcher, cancel_at, mixed_data, train, training_data

ONE_LAYER = ("double_blocks.0.img_attn.qkv",)
TWO_LAYERS = (*ONE_LAYER, "double_blocks.0.txt_attn.qkv")


def trained(model, root, **changes):
    """The state of a run of four steps, as `resume` names it."""
    result = train(model, mixed_data(), root, steps=4, save_every=0, **changes)
    return f"{result.path.parent.name}/state-000004.tessera"


def drop_fields(path, *fields):
    """The state as it was written before these fields were."""
    with safe_open(path, "pt") as file:
        plain = json.loads(file.metadata()["tessera"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    plain = {name: value for name, value in plain.items() if name not in fields}
    safetensors.torch.save_file(tensors, path, metadata={"tessera": json.dumps(plain)})


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("the model was loaded")

    def forbid():
        monkeypatch.setattr("tessera.train.train_lora.Trainer", fail)

    return forbid


NETWORKS = {
    "alpha": ({}, {"alpha": 8.0}, r"alpha 4 .* here has 8.*; set alpha to 4"),
    "alpha of some layers": (
        {"rank_patterns": "double_blocks.0.txt_attn.*: alpha=2"},
        {"rank_patterns": "double_blocks.0.txt_attn.*: alpha=3"},
        r"alpha 2 in double_blocks.0.txt_attn.qkv .* here has 3",
    ),
    "constraint": (
        {"algorithm": "oft", "constraint": 1e-4},
        {"algorithm": "oft"},
        r"constraint 0.0001 .* here has 0.*; set constraint to 0.0001",
    ),
    "rank": ({}, {"rank": 2, "alpha": 2.0}, r"rank 4 .* here has 2; set rank to 4"),
    "algorithm": ({}, {"algorithm": "dora"}, r"algorithm lora .* here has dora; set algorithm to lora"),
    "init": ({}, {"init": "pissa"}, r"init kaiming .* here has pissa; set init to kaiming"),
    "layers": (
        {},
        {"include": ONE_LAYER},
        r"trained 2 layers and .* here trains 1 .*txt_attn.qkv only there.* targets",
    ),
}


@pytest.mark.parametrize("changed", NETWORKS)
def test_a_state_of_another_network_is_refused_before_the_model_is_loaded(
    changed, tiny_flux, tmp_path, nothing_is_loaded
):
    before, after, message = NETWORKS[changed]
    state = trained(tiny_flux, tmp_path, network={"include": TWO_LAYERS} | before)
    nothing_is_loaded()
    with pytest.raises(ValueError, match=rf"^resume: that state.*{message}.*or set resume to 'off'"):
        train(tiny_flux, mixed_data(), tmp_path, network={"include": TWO_LAYERS} | after, resume=state)


def test_options_that_an_algorithm_does_not_read_may_change(tiny_flux, tmp_path):
    network = {"algorithm": "oft", "include": ONE_LAYER}
    state = trained(tiny_flux, tmp_path, network=network)
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, network=network | {"alpha": 8.0}, resume=state)
    assert len(watcher.losses) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"optimizer": "lion"}}, "is of the optimizer torch.AdamW and this run has pytorch_optimizer.Li"),
        ({"network": {"include": ONE_LAYER, "lora_plus_ratio": 4.0}}, "was trained without LoRA.; set lora_plus_ratio"),
    ],
)
def test_a_state_of_another_optimizer_is_refused_before_the_model_is_loaded(
    changes, message, tiny_flux, tmp_path, nothing_is_loaded
):
    network = {"network": {"include": ONE_LAYER}}
    state = trained(tiny_flux, tmp_path, **network)
    nothing_is_loaded()
    with pytest.raises(ValueError, match=rf"^resume: that state {message}"):
        train(tiny_flux, mixed_data(), tmp_path, resume=state, **(network | changes))


def test_an_average_that_ends_at_a_resume_says_so(tiny_flux, tmp_path):
    network = {"include": ONE_LAYER}
    state = trained(tiny_flux, tmp_path, network=network, optimizer={"ema_decay": 0.9})
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, network=network, resume=state)
    (note,) = [note for note in watcher.notes if "average" in note]
    assert note.startswith("The state has an average of the LoRA") and "ema_decay" in note and "step 4" in note


def entries_of(result):
    """Earlier parts by the LoRA's metadata; the summary says the same."""
    with safe_open(result.path, "pt") as file:
        earlier = json.loads(file.metadata()["tessera"])["continued_from"]
    assert result.summary.get("continued_from", []) == earlier
    return earlier


def test_a_lora_says_what_its_earlier_parts_were_made_with(tiny_flux, tmp_path):
    network = {"network": {"include": ONE_LAYER}, "save_every": 0}
    first = train(tiny_flux, mixed_data(), tmp_path, steps=2, seed=5, **network)
    assert entries_of(first) == []
    state = f"{first.path.parent.name}/state-000002.tessera"
    slower = network | {"optimizer": {"learning_rate": 1e-3}}
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path, cancel_at(3), resume=state, steps=4, **slower)
    second = train(tiny_flux, mixed_data(), tmp_path, resume=state, steps=4, **slower)
    part = {"from_step": 0, "to_step": 2, "settings": {"optimizer": {"learning_rate": 1e-2}, "seed": 5}}
    assert entries_of(second) == [part]

    # A third part with other data; what a part had is told against the last one.
    state = f"{second.path.parent.name}/state-000004.tessera"
    fewer = training_data(*mixed_data().samples[:3])
    third = train(tiny_flux, fewer, tmp_path, resume=state, seed=5, **slower)
    older, two = entries_of(third)
    assert older["settings"]["optimizer"] == {"learning_rate": 1e-2} and "seed" not in older["settings"]
    assert (two["from_step"], two["to_step"]) == (2, 4) and two["settings"]["seed"] == 3
    for entry in (older, two):
        assert entry["settings"].keys() >= {"data", "data_fingerprint", "samples"}
        assert "model_fingerprint" not in entry["settings"]


def test_an_option_that_there_was_not_yet_is_no_change():
    old_settings = {"seed": 5, "objective": {"shift": 3.0}, "network": {"rank": 4}}
    options = {"network": asdict(NetworkOptions(rank=4)), "optimizer": asdict(OptimizerOptions())}
    new_settings = {"seed": 6, "objective": asdict(ObjectiveOptions(guidance_loss_scale=2.0)), **options}
    (told_of,) = continued_from([{"made_with": old_settings, "to_step": 2}, {"made_with": new_settings}])
    assert told_of["settings"] == {"seed": 5, "objective": {"shift": 3.0, "guidance_loss_scale": 0.0}}
