"""Nodes that sample or encode many times give back after each what ComfyUI gives back at the end of a node."""

import sys
from types import ModuleType

import comfy.memory_management
import comfy.model_management
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.common import core
from tessera.compile.settings import CompileSettings
from tessera.compile.tune.inputs import StepSize, step_inputs
from tessera.compile.tune.search import tune
from tessera.data.folders.dataset import scan_images
from tessera.train.preview.compare import Column, compare
from tessera.train.preview.sampling import Sampling, Stages
from tessera.train.train_lora import RunRequest, train_lora
from tessera.train.watch.previewer import Preview, Previewer
from tiny.data.preparing import prepare
from tiny.models.sampling import conditioning
from tiny.train.runs import Watcher, run_settings, sample, training_data

CALLS = ("reset_cast_buffers", "cleanup_prefetch_queues", "vbars_reset_watermark_limits")


@pytest.fixture
def given_back(monkeypatch):
    """The names of core's calls, in their order."""
    called: list[str] = []
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    for module, name in core._AT_END_OF_NODE:
        if module not in sys.modules:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
        monkeypatch.setattr(sys.modules[module], name, lambda name=name: called.append(name), raising=False)
    return called


def sampling(vae, **changes):
    return Sampling(vae, conditioning("flux", 16), width=64, height=48, steps=1, **changes)


def nothing(*_):
    return


def test_each_call_is_that_of_core_and_one_that_is_not_there_is_left_out(given_back, monkeypatch):
    core.end_of_node()
    assert given_back == list(CALLS)
    monkeypatch.delattr(comfy.model_management, "reset_cast_buffers")
    monkeypatch.setitem(sys.modules, "comfy.model_prefetch", None)
    core.end_of_node()
    assert given_back == [*CALLS, CALLS[2]]


def test_end_of_a_node_calls_nothing_without_dynamic_vram_as_in_core(given_back, monkeypatch):
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", False)
    core.end_of_node()
    assert given_back == []


def test_core_s_own_calls_leave_the_models_loaded(tiny_flux, monkeypatch):
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    with torch.inference_mode():
        picture = tiny.sample(tiny_flux, "flux")
        loaded = [entry.model for entry in core.loaded_models()]
        core.end_of_node()
        assert [entry.model for entry in core.loaded_models()] == loaded
        assert torch.equal(tiny.sample(tiny_flux, "flux"), picture)


def test_after_every_preview_and_before_training_takes_its_weights(tiny_flux, tiny_vae, tmp_path, given_back):
    previews = [Preview(sampling(tiny_vae, seed=seed), 1, False, True) for seed in (1, 2)]
    data = training_data(sample("a", 4, 4))
    watchers = [Previewer(previews, tiny_flux)]
    result = train_lora(
        RunRequest(tiny_flux, data, run_settings(steps=2), tmp_path, Watcher(), CompileSettings("eager"), watchers)
    )
    assert len(result.summary["previews"]["files"]) == 4 and result.summary["comfyui"] == core.features()
    # Each picture is sampled and decoded, which are two nodes in ComfyUI.
    assert given_back == list(CALLS) * (1 + 4 * 2)


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_after_every_compared_cell(tiny_flux, tiny_vae, given_back, monkeypatch, end):
    def fail():
        if end == "failed":
            raise InterruptedError

    with torch.inference_mode():
        try:
            compare(Stages(tiny_flux), [sampling(tiny_vae, seeds=2)], [Column("a"), Column("b")], fail, nothing)
        except InterruptedError:
            assert end == "failed"
    assert given_back == list(CALLS) * (4 * 2 if end == "finished" else 1)


def test_after_every_tuned_setting_and_after_eager(tiny_flux, given_back):
    inputs = step_inputs(tiny_flux, StepSize(64, 64, text_length=16, cfg=1.0))
    trials = [CompileSettings(backend="aot_eager"), CompileSettings(backend="eager", scope="stack")]
    result = tune(tiny_flux, inputs, 600, trials, nothing)
    assert len(result.measured) == 2
    assert given_back == list(CALLS) * 3


def test_after_every_encoded_picture(tiny_vae, tiny_clip, tmp_path, given_back):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        pixels = np.random.default_rng(seed).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a red fox")
    options = {"megapixels": 0.01, "max_graphs": 1, "fit": "whole grids", "max_text_length": 256}
    for _ in range(2):  # what is in the cache is not encoded again
        prepare(scan_images(folder), tiny_vae, tiny_clip, cache_dir=tmp_path / "cache", **options)
        assert given_back == list(CALLS) * 3
