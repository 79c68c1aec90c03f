"""Gradients of the forwards of our own and of ComfyUI's forward are the same: each proves the other."""

from dataclasses import replace

import pytest
import torch
from family_cases import every_case
from tessera.lora.options import NetworkOptions
from tessera.models.catalogue import registry
from tessera.train.config.settings import MemoryOptions
from tessera.train.objective.options import ObjectiveOptions
from tiny.train.reference_gradients import lora_gradients
from tiny.train.runs import training_data
from tiny.train.training import fill_up_matrices, make_trainer, micro_batch
from torch.nn import functional as F


def as_encoded(sample):
    """With its caption as the text encoder gives it: padded with zeros, which Wan attends to."""
    read = sample.load()
    padded = replace(read, text=F.pad(read.text, (0, 0, 0, sample.text_length - read.text.shape[1])))
    return replace(sample, load=lambda *_: padded)


@every_case("gradients")
def test_the_own_forward_has_the_gradients_of_comfyui_s(case, tmp_path, monkeypatch):
    path = case.write(tmp_path / "model.safetensors")
    sample = next(candidate for candidate in case.batches()["shapes"]() if not candidate.clean_frames)
    if case.padded_caption:
        sample = as_encoded(sample)
    targets = registry.family_of(case.load(path)).default_targets
    settings = {
        "network": NetworkOptions(rank=4, alpha=8.0, include=targets),
        "objective": ObjectiveOptions(shift=1.0),
        "memory": MemoryOptions(checkpointing="none"),
    }

    def trained(folder):
        trainer = make_trainer(case.load(path), training_data(sample), tmp_path / folder, **settings)
        fill_up_matrices(trainer)
        loss = trainer.train_step.forward_backward([micro_batch(0)])
        gradients = lora_gradients(trainer)
        trainer.close()
        return trainer.context.family, float(loss), gradients

    own_trainer, loss, gradients = trained("own")
    monkeypatch.setattr(registry, "FAMILIES", ())
    native, other, native_gradients = trained("native")
    assert own_trainer.name == case.family and native.name.startswith("native-")
    assert other == pytest.approx(loss, rel=1e-5)
    assert native_gradients.keys() == gradients.keys()
    largest = max(float(torch.linalg.vector_norm(value)) for value in gradients.values())
    for name, value in gradients.items():
        error = float(torch.linalg.vector_norm(native_gradients[name] - value))
        assert error <= 2e-3 * max(float(torch.linalg.vector_norm(value)), 1e-4 * largest), name
