"""An adapter that no table names: everything that is said or written about it comes from its class."""

import json
import logging

import comfy.sd
import comfy.utils
import pytest
import tiny
import torch
from tessera.lora import options
from tessera.lora.files.formats import convert
from tessera.lora.options import NetworkOptions
from tessera.lora.plan import describe_network
from tessera.lora.source import LoraSource
from tessera.models.adapters.lora import LoraAdapter
from tessera.models.adapters.registry import ADAPTERS
from tessera.models.catalogue.registry import family_of
from tessera.train.optim.checks import check_optimizer
from tessera.train.optim.options import OptimizerOptions
from tiny.lora.adapters import fill
from tiny.train.runs import mixed_data, train

NEW = {"algorithm": "glora", "rank": 4, "alpha": 8.0}


class SumAdapter(LoraAdapter):
    """Half of GLoRA (Chavan et al. 2023, arXiv 2306.07967): delta W = alpha / rank · b1 · b2."""

    algorithm = "glora"
    inits = ("gaussian",)
    has_norm = has_pair = fits_any = in_kohya = False
    multiplies_weight = True
    no_training_adapter = "which was only made up"
    unlike_matrices = "a stack of matrices"

    @classmethod
    def network_args(cls, spec):
        return {"algo": "glora"}

    @classmethod
    def layer_notes(cls, layers):
        return [f"glora has {len(layers)} layers."]

    @classmethod
    def check_layers(cls, layers):
        if any(spec.rank > 64 for _, spec, _ in layers):
            raise ValueError("glora has no rank above 64.")

    @classmethod
    def reads_as(cls, name, suffixes):
        return name == "glora"

    def tensors(self):
        a1, a2 = torch.zeros(self.in_features, self.spec.rank), torch.zeros(self.spec.rank, self.in_features)
        pairs = {"a1.weight": a1, "a2.weight": a2, "b1.weight": self.up, "b2.weight": self.down}
        return pairs | {"alpha": torch.tensor(float(self.spec.alpha))}


class StackAdapter(SumAdapter):
    """Trains a stack of matrices."""

    @classmethod
    def shapes(cls, spec, out_features, in_features):
        return super().shapes(spec, out_features, in_features) | {"stack": (2, spec.rank, spec.rank)}


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "glora", SumAdapter)
    monkeypatch.setattr(options, "ALGORITHMS", tuple(ADAPTERS))


def test_a_new_adapter_is_planned_saved_read_merged_and_started_from(tiny_flux, tmp_path, caplog):
    network = NetworkOptions(**NEW, init="gaussian")
    assert "glora has " in describe_network(network, family_of(tiny_flux), tiny_flux.model)
    changes = {**NEW, "init": "gaussian"}
    first = train(tiny_flux, mixed_data(), tmp_path / "first", steps=2, network=changes)
    header = first.lora.metadata
    assert (header["ss_network_module"], header["ss_network_dim"]) == ("lycoris.kohya", "4")
    assert json.loads(header["ss_network_args"]) == {"algo": "glora"}
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path / "other", network=network)
    name, adapter = next(iter(trainer.network.adapters.items()))
    fill(adapter, 1)
    expected = (2.0 * adapter.up @ adapter.down).detach()
    tensors = convert(trainer.network.snapshot(), "comfyui")
    trainer.close()
    with caplog.at_level(logging.WARNING):
        patched, _ = comfy.sd.load_lora_for_models(tiny_flux, None, dict(tensors), 1.0, 0.0)
    assert caplog.records == []
    key = f"diffusion_model.{name}.weight"
    moved = patched.patch_weight_to_device(key, return_weight=True) - comfy.utils.get_attr(tiny_flux.model, key)
    torch.testing.assert_close(moved.float(), expected, rtol=1e-2, atol=1e-3)
    start = LoraSource.from_lora(convert(first.lora, "kohya"))
    still = {"steps": 1, "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0}}
    second = train(tiny_flux, mixed_data(), tmp_path / "second", **still, network={**changes, "start_from": start})
    for key, tensor in first.lora.items():
        torch.testing.assert_close(second.lora[key], tensor, rtol=1e-6, atol=1e-7)
    more = train(tiny_flux, mixed_data(), tmp_path / "first", steps=3, network=changes, resume="latest")
    assert more.summary["steps_done"] == 3
    with pytest.raises(ValueError, match="is a glora .* and the network trains lokr; set algorithm to glora"):
        train(tiny_flux, mixed_data(), tmp_path / "third", network={"algorithm": "lokr", "start_from": start})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init": "kaiming"}, "init is kaiming, which is for .*, and algorithm is glora; set init to gaussian"),
        ({"scale_weight_norms": 1.0}, "update is not known; set .* to 0, or algorithm to lora, loha or lokr."),
        ({"lora_plus_ratio": 4.0}, "glora has no two matrices A and B; set lora_plus_ratio to 1"),
        (
            {"training_adapter": LoraSource("x", "y")},
            "algorithm is glora, which was only made up; set algorithm to lora",
        ),
    ],
)
def test_options_of_a_new_adapter_are_refused_by_what_its_class_says(changes, message):
    with pytest.raises(ValueError, match=message):
        NetworkOptions(**{**NEW, "init": "gaussian", **changes})


def test_a_layer_that_it_cannot_have_is_refused(tiny_flux):
    with pytest.raises(ValueError, match="glora has no rank above 64"):
        describe_network(NetworkOptions("glora", 65, init="gaussian"), family_of(tiny_flux), tiny_flux.model)


def test_an_optimizer_of_matrices_is_refused(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "glora", StackAdapter)
    with pytest.raises(ValueError, match="muon trains matrices only, and glora trains a stack of matrices; "):
        check_optimizer(OptimizerOptions("muon"), torch.device("cpu"), NetworkOptions(**NEW, init="gaussian"))
