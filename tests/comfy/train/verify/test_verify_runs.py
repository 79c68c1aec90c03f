"""`verify` on Training Memory in whole runs: who gets a certificate, a resumed run, the final file."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from tessera.data.samples import Sample, SampleTensors
from tessera.models.catalogue.registry import family_of
from tessera.train.certificate import certificate
from tessera.train.certificate import watcher as certificates
from tessera.train.report.errors import CannotContinue, TrainingStopped
from tiny.native import ROWS, build, data_of
from tiny.native.rows import qwen_image21
from tiny.train.runs import Watcher, cancel_at, mixed_data, train, training_data

BY_NAME = {row.name: row for row in ROWS}
BY_RULE = "joy-image"


def run(name: str, root: Path, watcher: Any = None, **changes: Any) -> Any:
    row = BY_NAME[name]
    return train(build(row), data_of(row), root, watcher, **{"memory": {"verify": "auto"}, **changes})


def test_a_model_that_is_known_by_rule_gets_one_and_a_resumed_run_keeps_it(tmp_path, monkeypatch):
    with pytest.raises(InterruptProcessingException):
        run(BY_RULE, tmp_path, cancel_at(2), steps=4)
    (summary,) = tmp_path.rglob("summary.json")
    certificate = json.loads(summary.read_text())["certificate"]
    assert (
        "forward equal, gradients within" in certificate["text"]
        and certificate["file"]["layers_loaded"] == certificate["file"]["layers"]
    )

    def fail_again(*_: Any) -> Any:
        raise AssertionError("checked again")

    monkeypatch.setattr(certificates, "make_certificate", fail_again)
    watcher = Watcher()
    result = run(BY_RULE, tmp_path, watcher, steps=4)
    assert result.summary["certificate"] == certificate
    assert any(note.startswith(certificate["text"]) and "checked when the run began" in note for note in watcher.notes)
    assert result.summary["final_file"]["layers_loaded"] == result.summary["final_file"]["layers"] > 0
    assert result.summary["final_file"]["layers_that_differ"] == 0


def test_a_run_that_crashes_keeps_it(tmp_path, monkeypatch):
    from tessera.train import train_lora

    monkeypatch.setattr(train_lora, "_write_summary", lambda *_: None)
    with pytest.raises(InterruptProcessingException):
        run(BY_RULE, tmp_path, cancel_at(1), steps=2)
    (summary,) = tmp_path.rglob("summary.json")
    certificate = json.loads(summary.read_text())["certificate"]
    monkeypatch.undo()
    monkeypatch.setattr(certificates, "make_certificate", None)
    assert run(BY_RULE, tmp_path, steps=2).summary["certificate"] == certificate


def test_a_check_without_memory_is_left_out_and_made_when_the_run_goes_on(tmp_path, monkeypatch):
    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(certificate, "check_execution", out_of_memory)
    with pytest.raises(InterruptProcessingException):
        run(BY_RULE, tmp_path, cancel_at(1), steps=2)
    (summary,) = tmp_path.rglob("summary.json")
    record = json.loads(summary.read_text())["certificate"]
    assert record["not_checked"] == {"blocks": "it is out of memory"} and "gradients within" in record["text"]
    monkeypatch.undo()
    assert "not_checked" not in run(BY_RULE, tmp_path, steps=2).summary["certificate"]


def test_a_rank_that_leaves_during_a_check_ends_the_run(tmp_path, monkeypatch):
    def leave_run(*_: Any) -> Any:
        raise CannotContinue("Device 1 has left the run")

    monkeypatch.setattr(certificate, "targets_without_gradient", leave_run)
    with pytest.raises((CannotContinue, TrainingStopped), match="Device 1 has left the run"):
        run(BY_RULE, tmp_path, steps=1)


def test_a_row_whose_class_is_newer_than_the_tests_comfyui_gets_one(tmp_path):
    source = torch.Generator().manual_seed(0)
    latent = torch.randn(qwen_image21.CHANNELS, 4, 6, generator=source)
    tensors = SampleTensors(latent, torch.randn(1, 5, qwen_image21.TEXT, generator=source), {})
    data = training_data(Sample("a", (1, 4, 6), 24, 5, lambda *_: tensors))
    with qwen_image21.newer_comfyui():
        model = qwen_image21.load()
        assert family_of(model).name == "qwen-image-2.1"
        result = train(model, data, tmp_path, steps=1, memory={"verify": "auto"})
    assert result.summary["certificate"]["text"].startswith("Qwen Image 2.1: forward equal, gradients within")


def test_off_makes_none_and_a_named_model_needs_none(tmp_path):
    unchecked = run(BY_RULE, tmp_path / "a", steps=1, memory={"verify": "off"})
    named_run = run("z-image", tmp_path / "b", steps=1)
    assert "certificate" not in unchecked.summary and "certificate" not in named_run.summary
    assert named_run.summary["final_file"]["layers_loaded"] == named_run.summary["final_file"]["layers"]


def test_on_checks_a_forward_of_our_own_too(tmp_path, tiny_flux):
    watcher = Watcher()
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, steps=1, memory={"verify": "on", "blocks_to_swap": 1})
    certificate = result.summary["certificate"]
    assert (
        certificate["text"].startswith("FLUX.1: forward equal, gradients within")
        and certificate["text"] in watcher.notes
    )
    assert max(certificate["gradients"].values()) < 2e-3 and certificate["effect_difference"] < 1e-3


def test_weights_and_matmuls_in_int8_get_one(tmp_path, tiny_files):
    model = tiny.load_flux(tiny_files["flux"], torch.bfloat16)
    data = tiny.make_data([(6, 6), (4, 9)], [40, 40])  # enough tokens for int8 matmuls
    memory = {"verify": "on", "quantize": "int8", "low_bit_matmul": "int8", "blocks_to_swap": 1}
    summary = train(model, data, tmp_path, steps=1, memory=memory).summary
    certificate = summary["certificate"]
    assert (
        certificate["text"].startswith("FLUX.1: forward equal, gradients within") and "not_checked" not in certificate
    )
    assert certificate["seconds"] > 0 and certificate["peak_memory_mib"] > 0
    assert {layer["forward"] for layer in summary["low_bit_matmul"]["layers"]} == {"int8"}


def test_layers_that_the_file_lacks_are_said(tmp_path, monkeypatch, tiny_flux):
    from tessera.lora.files import formats
    from tessera.train.loop import lora_writer

    save = lora_writer.save_lora

    def without_one(path: Any, lora: Any, *rest: Any, **kwargs: Any) -> None:
        remaining = {key: tensor for key, tensor in lora.items() if "double_blocks_0_img_attn_qkv" not in key}
        save(path, type(lora)(remaining, lora.metadata, lora.names), *rest, **kwargs)

    assert formats.save_lora is save
    monkeypatch.setattr(lora_writer, "save_lora", without_one)
    watcher = Watcher()
    train(tiny_flux, mixed_data(), tmp_path, watcher, steps=1)
    assert any("layers of the LoRA file: not double_blocks.0.img_attn.qkv" in note for note in watcher.notes)


def test_core_s_rounding_is_told_of_a_quantised_model(tmp_path, tiny_files):
    model = tiny.load_flux(tiny_files["flux"], torch.float8_e4m3fn)
    watcher = Watcher()
    result = train(model, mixed_data(), tmp_path, watcher, steps=3)
    (said,) = (note for note in watcher.notes if note.startswith("ComfyUI rounds this LoRA into the model's fp8"))
    assert f"changes {result.summary['final_file']['rounding']:.0%} of its effect" in said
    assert 0 < result.summary["final_file"]["rounding"]


def test_a_file_that_cannot_be_checked_is_said(tmp_path, monkeypatch, tiny_flux):
    from tessera.train.certificate import final_file

    def fails(*_: Any) -> Any:
        raise RuntimeError("a loader of tomorrow")

    monkeypatch.setattr(final_file, "check_file", fails)
    watcher = Watcher()
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, steps=1)
    assert "final_file" not in result.summary
    assert any("could not be checked with ComfyUI's loader" in note for note in watcher.notes)


def test_rounding_that_cannot_be_measured_leaves_the_rest_of_the_check(tmp_path, monkeypatch, tiny_files):
    from tessera.train.certificate import final_file

    monkeypatch.setattr(final_file, "small_inputs", lambda *_: None)
    watcher = Watcher()
    model = tiny.load_flux(tiny_files["flux"], torch.float8_e4m3fn)
    result = train(model, mixed_data(), tmp_path, watcher, steps=1)
    assert result.summary["final_file"]["layers_loaded"] == result.summary["final_file"]["layers"] > 0
    assert "rounding" not in result.summary["final_file"]
    assert any("could not be measured" in note for note in watcher.notes)
