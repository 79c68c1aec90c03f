"""Threads of a run: a small model on the CPU has one, and what was set before is there again afterwards."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tessera.nodes.train import run as module
from tessera.train.config.threads import SMALL, threads_for
from tiny.train.runs import Watcher, mixed_data, run_settings


@pytest.fixture
def two_threads():
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(count)


def model_of(device: str, size: int) -> Any:
    return SimpleNamespace(load_device=torch.device(device), model_size=lambda: size)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("device", "size", "threads"), [("cpu", SMALL, 1), ("cpu", SMALL + 1, 2), ("cuda", SMALL, 2), ("mps", SMALL, 2)]
)
def test_a_small_model_on_the_cpu_has_one_thread(device, size, threads):
    with pytest.raises(KeyError), threads_for(model_of(device, size)):
        assert torch.get_num_threads() == threads
        raise KeyError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_run_computes_so(tiny_flux, tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(module, "runs_folder", lambda: tmp_path)
    watcher = Watcher(at_step=lambda _: counts.append(torch.get_num_threads()))
    module.run(tiny_flux, mixed_data(), run_settings(steps=2), watcher, {})
    assert counts == [1, 1] and torch.get_num_threads() == 2
