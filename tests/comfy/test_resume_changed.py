"""A named state under other settings: what it was trained with stays in force or is refused, and nothing is unsaid."""

import json

import pytest
import safetensors.torch
from safetensors import safe_open
from tiny.runs import Watcher, mixed_data, train

ONE_LAYER = ("double_blocks.0.img_attn.qkv",)
TWO_LAYERS = (*ONE_LAYER, "double_blocks.0.txt_attn.qkv")


def trained(model, root, **changes):
    """The state of a run of four steps, as `resume` names it."""
    result = train(model, mixed_data(), root, steps=4, save_every=0, **changes)
    return f"{result.path.parent.name}/state-000004.tessera"


def without(path, *fields):
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
    before, after, told = NETWORKS[changed]
    state = trained(tiny_flux, tmp_path, network={"include": TWO_LAYERS} | before)
    nothing_is_loaded()
    with pytest.raises(ValueError, match=rf"^resume: that state.*{told}.*or set resume to 'off'"):
        train(tiny_flux, mixed_data(), tmp_path, network={"include": TWO_LAYERS} | after, resume=state)


def test_what_an_algorithm_does_not_read_may_change(tiny_flux, tmp_path):
    network = {"algorithm": "oft", "include": ONE_LAYER}
    state = trained(tiny_flux, tmp_path, network=network)
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, network=network | {"alpha": 8.0}, resume=state)
    assert len(watcher.losses) == 2


def test_a_state_from_before_alpha_was_kept_goes_on_and_is_refused_by_its_shapes(
    tiny_flux, tmp_path, nothing_is_loaded
):
    state = trained(tiny_flux, tmp_path, network={"include": TWO_LAYERS})
    without(tmp_path / state, "adapters", "parts")
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, network={"include": TWO_LAYERS}, resume=state)
    assert len(watcher.losses) == 2
    nothing_is_loaded()
    for after in ({"rank": 2, "alpha": 2.0}, {"algorithm": "dora"}):
        with pytest.raises(ValueError, match=r"^resume: that state was trained with another algorithm, init, rank or"):
            train(tiny_flux, mixed_data(), tmp_path, network={"include": TWO_LAYERS} | after, resume=state)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"optimizer": {"optimizer": "lion"}}, "is of the optimizer torch.AdamW and this run has pytorch_optimizer.Li"),
        ({"network": {"include": ONE_LAYER, "lora_plus_ratio": 4.0}}, "was trained without LoRA.; set lora_plus_ratio"),
    ],
)
def test_a_state_of_another_optimizer_is_refused_before_the_model_is_loaded(
    changes, told, tiny_flux, tmp_path, nothing_is_loaded
):
    network = {"network": {"include": ONE_LAYER}}
    state = trained(tiny_flux, tmp_path, **network)
    nothing_is_loaded()
    with pytest.raises(ValueError, match=rf"^resume: that state {told}"):
        train(tiny_flux, mixed_data(), tmp_path, resume=state, **(network | changes))


def test_an_average_that_ends_at_a_resume_says_so(tiny_flux, tmp_path):
    network = {"include": ONE_LAYER}
    state = trained(tiny_flux, tmp_path, network=network, optimizer={"ema_decay": 0.9})
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, network=network, resume=state)
    (note,) = [note for note in watcher.notes if "average" in note]
    assert note.startswith("The state has an average of the LoRA") and "ema_decay" in note and "step 4" in note
