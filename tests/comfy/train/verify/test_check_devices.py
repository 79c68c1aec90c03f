"""The checks before the first step where the device is not the host: they compute on it, as the steps do."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.train.certificate.certificate import make_certificate
from tessera.train.report.observer import SilentObserver
from tiny.memory.two_devices import DEVICE, TwoDevices
from tiny.models.qwen_image import qwen_sample
from tiny.native import ROWS, build, data_of
from tiny.train.runs import sample, training_data

NATIVE = {row.name: row for row in ROWS if row.name in ("z-image", "sd1.5", "ltx-2.3")}
OWN = ("flux", "wan", "qwen_image")
# Small numbers that a forward reads where they are, and what is copied to the host to be compared there.
HARMLESS = {"ragged_attention", "copy_"}


def make_sample(family: str, name: str) -> Any:
    if family == "wan":
        return tiny.wan_sample(name, (2, 2, 4))
    return qwen_sample(name, 4, 4) if family == "qwen_image" else sample(name, 4, 4)


def trainer_of(name: str, files: Any, folder: Path) -> Any:
    if name in NATIVE:
        patcher, data = build(NATIVE[name], torch.float32), data_of(NATIVE[name])
    else:
        patcher, data = (
            tiny.load_model(name, files[name]),
            training_data(*(make_sample(name, sample_name) for sample_name in "ab")),
        )
    patcher.load_device = DEVICE
    return tiny.make_trainer(patcher, data, folder)


@pytest.mark.parametrize("name", [*OWN, *NATIVE])
def test_the_first_check_computes_on_the_device(name, tiny_files, tmp_path) -> None:
    trainer = trainer_of(name, tiny_files, tmp_path)
    devices = TwoDevices()
    devices.put_weights_of(trainer)
    trainer.train_step.batches.reader.prefetch(tiny.micro_batch(0))
    with devices.watched():
        trainer.placed.check_forward(trainer.train_step.batches.make(tiny.micro_batch(0), (0, 0)).inputs)
    assert trainer.placed.checks.forward_done
    assert not devices.mixed.keys() - HARMLESS
    trainer.close()


@pytest.mark.parametrize("name", NATIVE)
def test_a_run_of_comfyuis_own_forward_computes_on_the_device(name, tiny_files, tmp_path) -> None:
    trainer = trainer_of(name, tiny_files, tmp_path)
    devices = TwoDevices()
    devices.put_weights_of(trainer)
    with devices.watched():
        trainer.run()
    assert trainer.progress.step == trainer.settings.steps
    assert not devices.mixed.keys() - HARMLESS
    trainer.close()


@pytest.mark.parametrize("name", ["flux", "z-image"])
def test_the_certificate_is_made_on_the_device(name, tiny_files, tmp_path) -> None:
    trainer = trainer_of(name, tiny_files, tmp_path)
    devices = TwoDevices()
    devices.put_weights_of(trainer)
    with devices.watched():
        make_certificate(
            trainer.placed, list(trainer.network.adapters), trainer.context.data.samples, 1.0, SilentObserver()
        )
    assert not devices.mixed.keys() - HARMLESS
    trainer.close()
