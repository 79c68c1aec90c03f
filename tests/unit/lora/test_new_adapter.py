"""An adapter that no table names: everything that is said or written about it comes from its class."""

import json

import pytest
import torch
from tessera.lora import options
from tessera.lora.options import NetworkOptions
from tessera.models.adapters.loha import LohaAdapter
from tessera.models.adapters.registry import ADAPTERS
from tessera.train.checkpoint.metadata import _network_args
from tessera.train.optim.checks import check_optimizer
from tessera.train.optim.options import OptimizerOptions


class StackAdapter(LohaAdapter):
    """Trains a stack of matrices, whose norm is not known."""

    algorithm = "stack"
    has_norm = False

    @classmethod
    def shapes(cls, spec, out_features, in_features):
        return super().shapes(spec, out_features, in_features) | {"stack": (2, spec.rank, spec.rank)}


@pytest.fixture(autouse=True)
def stack(monkeypatch):
    monkeypatch.setitem(ADAPTERS, "stack", StackAdapter)
    monkeypatch.setattr(options, "ALGORITHMS", tuple(ADAPTERS))


def test_the_file_of_a_new_adapter_names_it_as_lycoris_would():
    network = NetworkOptions(algorithm="stack", rank=2, alpha=2.0, rank_dropout=0.1)
    assert json.loads(_network_args(network, {})) == {"algo": "stack", "rank_dropout": "0.1"}


def test_an_optimizer_of_matrices_is_refused():
    with pytest.raises(ValueError, match="muon trains matrices only, and stack trains tensors that are no matrices; "):
        check_optimizer(OptimizerOptions("muon"), torch.device("cpu"), NetworkOptions(algorithm="stack"))


def test_a_limit_of_its_norm_is_refused():
    with pytest.raises(ValueError, match="update is not known; set .* to 0, or algorithm to lora, loha or lokr."):
        NetworkOptions(algorithm="stack", scale_weight_norms=1.0)
