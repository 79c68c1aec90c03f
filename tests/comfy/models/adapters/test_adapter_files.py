"""The files of every adapter: ComfyUI takes each key and makes the trained weight, training begins from them, and what
other formats and readers are told."""

import json
import logging

import comfy.sd
import pytest
import tiny
import torch
from safetensors import safe_open
from tessera.lora.files.formats import convert, save_lora
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tiny.lora.adapters import ALGORITHMS, adapted_weight, fill, numbers
from tiny.models.qwen_image import qwen_sample
from tiny.train.runs import mixed_data, train, training_data


def patched_weight(model, patched, name):
    key = f"diffusion_model.{name}.weight"
    assert key in patched.patches
    return patched.patch_weight_to_device(key, return_weight=True).double()


def check_file(model, trainer, layout, folder, caplog):
    """ComfyUI's loader takes every key and makes the weight of the formula."""
    for index, adapter in enumerate(trainer.network.adapters.values()):
        fill(adapter, index)
    options, core = trainer.settings.network, model.model.diffusion_model
    expected = {}
    for name, adapter in trainer.network.adapters.items():
        with torch.no_grad():
            expected[name] = adapted_weight(options, core.get_submodule(name).weight.double(), numbers(adapter))
    path = folder / "adapter.safetensors"
    save_lora(path, trainer.network.snapshot(), layout)
    trainer.close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        tensors = comfy.utils.load_torch_file(str(path), safe_load=True)
        patched, _ = comfy.sd.load_lora_for_models(model, None, tensors, 1.0, 0.0)
    assert caplog.records == []
    assert len(patched.patches) == len(expected)
    for name, weight in expected.items():
        change = (weight - core.get_submodule(name).weight.double()).norm()
        assert (patched_weight(model, patched, name) - weight).norm() < 1e-4 * change, name


@pytest.mark.parametrize("layout", ["kohya", "comfyui"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_comfyui_makes_the_trained_weights_of_a_flux_file(tiny_flux, tmp_path, caplog, name, layout):
    network = NetworkOptions(**ALGORITHMS[name], include=("*",), exclude=("final_layer.linear",))
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path, network=network)
    check_file(tiny_flux, trainer, layout, tmp_path, caplog)


@pytest.mark.parametrize(("family", "name"), [("wan", "loha"), ("wan", "dora"), ("qwen_image", "lokr whole")])
def test_comfyui_makes_the_trained_weights_of_other_families(tiny_files, tmp_path, caplog, family, name):
    model = tiny.load_model(family, tiny_files[family])
    sample = tiny.wan_sample("one", (1, 4, 6)) if family == "wan" else qwen_sample("one", 4, 6, 5)
    network = NetworkOptions(**ALGORITHMS[name])
    trainer = tiny.make_trainer(model, training_data(sample), tmp_path, network=network)
    check_file(model, trainer, "kohya", tmp_path, caplog)


def test_adapters_that_diffusers_cannot_hold_are_one_sentence_and_lengths_stay_fp32(tiny_flux, tmp_path):
    for name in ("loha", "lokr", "dora", "oft"):
        lora = train(tiny_flux, mixed_data(), tmp_path, steps=1, network=ALGORITHMS[name]).lora
        with pytest.raises(ValueError, match="format diffusers carries plain LoRA pairs only, and .*; choose kohya"):
            convert(lora, "diffusers")
        for key, tensor in convert(lora, "kohya", "bf16").items():
            whole = key.endswith(("alpha", "dora_scale"))
            assert tensor.dtype == (torch.float32 if whole else torch.bfloat16), key


def test_the_header_names_the_algorithm_as_lycoris_does(tiny_flux, tmp_path):
    arguments = {}
    for name, changes in {**ALGORITHMS, "dropped": {"rank_dropout": 0.1}}.items():
        result = train(tiny_flux, mixed_data(), tmp_path, steps=1, network=changes)
        with safe_open(result.path, "pt") as file:
            header = file.metadata()
        arguments[name] = header["ss_network_module"], json.loads(header.get("ss_network_args", "{}"))
        assert json.loads(header["tessera"])["network"]["algorithm"] == changes.get("algorithm", "lora")
    assert arguments["lora"] == ("networks.lora_flux", {})
    assert arguments["dropped"] == ("networks.lora_flux", {"rank_dropout": "0.1"})
    assert arguments["loha"] == ("lycoris.kohya", {"algo": "loha"})
    assert arguments["lokr"] == ("lycoris.kohya", {"algo": "lokr", "factor": "4"})
    assert arguments["dora"] == ("lycoris.kohya", {"algo": "lora", "dora_wd": "True", "wd_on_output": "False"})
    assert arguments["oft constrained"] == ("lycoris.kohya", {"algo": "diag-oft", "constraint": "0.002"})


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("lora", "pissa")])
def test_a_run_begins_from_a_file_of_its_kind(tiny_flux, tmp_path, name):
    network = {**ALGORITHMS[name], "rank_patterns": "" if "lokr" in name else "single_blocks.0.*: rank=2"}
    first = train(tiny_flux, mixed_data(), tmp_path / "first", steps=3, network=network)
    still = {"steps": 1, "optimizer": {"learning_rate": 1e-30, "weight_decay": 0.0}}
    start = LoraSource.from_lora(convert(first.lora, "comfyui"))
    second = train(tiny_flux, mixed_data(), tmp_path / "second", **still, network={**network, "start_from": start})
    for key, tensor in first.lora.items():
        torch.testing.assert_close(second.lora[key], tensor, rtol=1e-6, atol=1e-7)
    assert second.loss[0] != first.loss[0]
    with pytest.raises(ValueError, match="start_from: LORA_MODEL (does not fit|is a )"):
        other = {"algorithm": "oft", "rank": 16} if "oft" in name else {**network, "rank": 5, "factor": 8}
        train(tiny_flux, mixed_data(), tmp_path / "third", network={**other, "start_from": start})
