"""A training adapter: a LoRA that is in force while training, and absent from previews and from the file."""

import json
import math
import runpy
from dataclasses import fields, replace
from pathlib import Path

import comfy.sd
import numpy as np
import pytest
import torch
from tessera.common.fingerprint import changed_fields
from tessera.lora.base import apply_training_adapter, with_base
from tessera.lora.files.formats import convert
from tessera.lora.files.lora_model import LoraModel
from tessera.lora.options import NetworkOptions
from tessera.lora.source import LoraSource
from tessera.lora.warm_start import read_warm_start
from tessera.models.catalogue.registry import family_of
from tessera.nodes.options.lora_files import low_noise_source
from tessera.nodes.options.network import TesseraLoraNetwork
from tessera.nodes.train.inherited_settings import shared_lora_notes
from tessera.nodes.train.run import run
from tessera.train.train_lora import RunRequest, train_lora
from tiny.lora.lora_files import patched_deltas, random_update, random_updates
from tiny.native import ROWS, build, data_of
from tiny.train.runs import Watcher, mixed_data, run_settings, train

PREVIEW, PRESERVATION = (
    runpy.run_path(str(Path(__file__).parents[1] / "train" / file))
    for file in ("watch/test_preview.py", "objective/test_preservation.py")
)
ADAPTER = "turbo_training_adapter.safetensors"
CONVOLUTION = "input_blocks.1.0.in_layers.2"
PROJ = "double_blocks.0.img_attn.proj"


def source(tensors, name=ADAPTER):
    return LoraSource(name, name, lambda: tensors)


def updates_of(model, factor=1.0):
    updates = {name: replace(part, up=factor * part.up) for name, part in random_updates(model).items()}
    return convert(LoraModel.from_modules(updates), "diffusers")


def same_lora(actual, expected):
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in actual)


def test_a_training_adapter_is_in_force_while_training_and_in_no_preview_and_no_file(tiny_flux, tiny_vae, tmp_path):
    """With preservation and validation: both see the model with the adapter. The base LoRA stays in the previews."""
    base, adapter = updates_of(tiny_flux), updates_of(tiny_flux, -0.5)
    base_model, _ = comfy.sd.load_lora_for_models(tiny_flux, None, base, 0.2, 0)
    loaded, _ = comfy.sd.load_lora_for_models(base_model, None, adapter, 0.4, 0)
    options = {"steps": 2, "objective": {"preservation_weight": 1.0}, "compile": "off"}
    options |= {"validation": {"part": 0.34, "every_n_steps": 1}, "output_name": "with_adapter"}
    network = {"base_lora": source(base, "base.safetensors"), "base_strength": 0.2}
    network |= {"training_adapter": source(adapter), "training_adapter_strength": 0.4}
    watcher, data = Watcher(), PRESERVATION["data"]()
    settings = run_settings(**options, network=network)
    result = run(tiny_flux, data, settings, watcher, {}, [PREVIEW["preview"](tiny_vae, every=0)])
    expected = train_lora(RunRequest(loaded, data, run_settings(**options), tmp_path, Watcher()))
    assert result.loss == expected.loss and result.validation == expected.validation and result.validation
    assert same_lora(result.lora, expected.lora)
    message = f"Trained with {ADAPTER} at strength 0.4 on the model; previews and the saved LoRA don't have it."
    assert message in watcher.notes

    start, end = (PREVIEW["read"](result.path.parent, f"step00000{step}_0.png") for step in (0, 2))
    assert np.array_equal(start, PREVIEW["core_picture"](base_model, tiny_vae, None, 5))
    assert np.array_equal(end, PREVIEW["core_picture"](base_model, tiny_vae, result.path, 5))
    assert not np.array_equal(end, PREVIEW["core_picture"](loaded, tiny_vae, result.path, 5))
    assert with_base(tiny_flux, NetworkOptions(training_adapter=source(adapter))) is tiny_flux

    message = json.loads(result.lora.metadata["tessera"])["network"]
    assert message["training_adapter"]["name"] == ADAPTER and message["training_adapter_strength"] == 0.4
    assert not tiny_flux.patches


def test_a_training_adapter_makes_another_run_and_none_makes_the_run_of_before():
    def key(**network):
        settings = run_settings(network=network)
        return settings.key(settings.lineage("data", "model"))

    first, other = source({}), source({}, "other.safetensors")
    keys = {
        key(),
        key(training_adapter=first),
        key(training_adapter=other),
        key(training_adapter=first, training_adapter_strength=0.5),
    }
    assert len(keys) == 4
    assert not any(name.startswith("training_adapter") for name in changed_fields(run_settings().network))
    assert key(training_adapter=first, training_adapter_low_noise=other) == key(training_adapter=first)


@pytest.mark.parametrize("name", ["training_adapter", "training_adapter_low_noise", "base_lora"])
def test_the_file_of_an_adapter_belongs_to_what_the_node_is_known_by(name, tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"one")
    monkeypatch.setattr("folder_paths.get_filename_list", lambda _: [file.name])
    monkeypatch.setattr("folder_paths.get_full_path", lambda _, name: str(tmp_path / name))
    fingerprint = TesseraLoraNetwork.fingerprint_inputs(**{name: file.name})
    file.write_bytes(b"another")
    assert (
        fingerprint
        != TesseraLoraNetwork.fingerprint_inputs(**{name: file.name})
        != TesseraLoraNetwork.fingerprint_inputs()
    )
    assert math.isnan(TesseraLoraNetwork.fingerprint_inputs(**{name: None}))


def test_each_expert_trains_with_its_own():
    high, low = source({}), source({}, "low.safetensors")
    pair = NetworkOptions(training_adapter=high, training_adapter_strength=0.5)
    assert pair.for_low_noise() == pair == pair.for_high_noise()
    apart = replace(pair, training_adapter_low_noise=low, training_adapter_strength_low_noise=0.3)
    assert apart.for_high_noise() == pair
    assert apart.for_low_noise() == NetworkOptions(training_adapter=low, training_adapter_strength=0.3)
    assert replace(apart, training_adapter_low_noise="none").for_low_noise() == NetworkOptions()
    assert shared_lora_notes(
        run_settings(network={field.name: getattr(pair, field.name) for field in fields(pair)})
    ) == [
        f"training_adapter {ADAPTER} is used for both experts; to give the low noise one its own, set "
        "training_adapter_low_noise on LoRA Network."
    ]


def test_a_convolution_of_a_native_model_is_adapted_too(tmp_path):
    """Only the convolution is: where the adapter left it out, the two losses would differ."""
    model = build(next(row for row in ROWS if row.name == "sd1.5"))
    data = data_of(next(row for row in ROWS if row.name == "sd1.5"), 1)
    weight = model.model.diffusion_model.get_submodule(CONVOLUTION).weight
    rows, columns, *kernel = weight.shape
    numbers = torch.Generator().manual_seed(0)
    tensors = {
        f"diffusion_model.{CONVOLUTION}.lora_up.weight": torch.randn(rows, 2, 1, 1, generator=numbers),
        f"diffusion_model.{CONVOLUTION}.lora_down.weight": torch.randn(2, columns, *kernel, generator=numbers),
    }
    loaded, _ = comfy.sd.load_lora_for_models(model, None, tensors, 0.5, 0)
    expected = train(loaded, data, tmp_path / "on the model", steps=2)
    network = {"training_adapter": source(tensors), "training_adapter_strength": 0.5}
    result = train(model, data, tmp_path / "adapter", steps=2, network=network)
    assert result.loss == expected.loss and same_lora(result.lora, expected.lora)
    assert result.loss != train(model, data, tmp_path / "without", steps=2).loss
    clone = model.clone()
    apply_training_adapter(clone, NetworkOptions(**network), family_of(clone))
    (delta,) = patched_deltas(model, clone).values()
    assert torch.equal(delta, patched_deltas(model, loaded)[CONVOLUTION]) and delta.any()


def test_contradicting_options_are_one_sentence(tiny_flux, tmp_path):
    lora_source = source({})
    with pytest.raises(
        ValueError, match="training_adapter_strength is 0, at which training_adapter has no effect; set"
    ):
        NetworkOptions(training_adapter=lora_source, training_adapter_strength=0.0)
    with pytest.raises(
        ValueError, match=f"training_adapter is {ADAPTER} and algorithm is dora, .*; set algorithm to l"
    ):
        NetworkOptions(training_adapter=lora_source, algorithm="dora")
    with pytest.raises(ValueError, match="training_adapter_low_noise is .* and algorithm is dora"):
        NetworkOptions(training_adapter_low_noise=lora_source, algorithm="dora")
    with pytest.raises(ValueError, match="training_adapter_low_noise is 'other'; choose"):
        NetworkOptions(training_adapter_low_noise="other")
    with pytest.raises(ValueError, match="training_adapter_low_noise: there is no LoRA 'gone.safetensors'"):
        low_noise_source("training_adapter_low_noise", "gone.safetensors")

    def refused(message, **network):
        with pytest.raises(ValueError, match=message):
            train(tiny_flux, mixed_data(), tmp_path, network=network)

    wan = convert(LoraModel.from_modules({"blocks.0.ffn.0": random_update(64, 32, 1)}))
    refused(
        f"training_adapter: {ADAPTER} has no update for FLUX.1: 0 of the 1 layer in the file",
        training_adapter=source(wan),
    )
    larger = convert(LoraModel.from_modules({PROJ: random_update(128, 256, 1)}))
    refused(r"training_adapter: .* \(.*proj: 128 x 256 there, 128 x 128 here\)", training_adapter=source(larger))


def test_changes_for_what_is_trained_are_told(tiny_flux):
    family, fits = family_of(tiny_flux), source(updates_of(tiny_flux))
    notes = apply_training_adapter(tiny_flux.clone(), NetworkOptions("oft", training_adapter=fits), family)
    assert any(note.startswith("oft multiplies the weight, and turbo_training_adapter") for note in notes)
    twice = NetworkOptions(training_adapter=fits, base_lora=fits)
    assert f"{ADAPTER} is also base_lora, so training would use it twice; set one of the two to none." in (
        apply_training_adapter(tiny_flux.clone(), twice, family)
    )
    whole = source({f"diffusion_model.{PROJ}.set_weight": torch.zeros(128, 128)}, "whole.safetensors")
    with pytest.raises(ValueError, match="start_from: whole.safetensors is a full weight .*training_adapter changes"):
        read_warm_start(NetworkOptions(start_from=whole, training_adapter=fits), family, tiny_flux.model, [PROJ])
    assert read_warm_start(NetworkOptions(start_from=whole), family, tiny_flux.model, [PROJ])[0] is not None
