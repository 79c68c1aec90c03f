"""Samples of one batch do not influence each other: each has the output and the gradients that it has alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tessera.models.catalogue import registry
from tessera.train.objective.batch import fixed_batch
from thinned import one_in
from tiny.native import ROWS, TRAINED, build, sample_of
from tiny.train.reference_gradients import lora_gradients
from tiny.train.runs import training_data
from tiny.train.training import fill_up_matrices, make_trainer

# What the order of sums makes in fp32; LTX-2's gates by the highest noise level of a batch made 3e-2.
BOUND = 2e-5
# Rows whose samples run one by one: by the row of facts, or since the start of a run sees the influence.
APART = {"minimax-h3", "ltx-2", "ltx-2.3", "hunyuan-image-distilled"}
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(autouse=True)
def no_family_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX, Qwen-Image and Wan run ComfyUI's forward here too."""
    monkeypatch.setattr(registry, "FAMILIES", ())


def three_samples(row: Any) -> list[tuple[Any, float]]:
    """Two of one shape with other captions and noise levels, and one of another size and level, where it may be."""
    first, second = sample_of(row, "first"), sample_of(row, "second")
    samples = [(first, 0.3), (second, 0.9)]
    height, width = row.latent[-2:]
    if height != width:
        samples.append((sample_of(replace(row, latent=(*row.latent[:-2], width, height)), "turned"), 0.6))
    return samples


def velocities(trainer: Any, samples: list[tuple[Any, float]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of each sample, and the gradients of the sum of their squares."""
    read = [(sample, sample.load(), level) for sample, level in samples]
    batch = fixed_batch(trainer.context.patcher, trainer.context.family, read, 1.0, trainer.device, 0)
    trainer.network.flat.zero_grad()
    with trainer.placed.training():
        out = trainer.placed.velocity(batch.inputs, (0, 0))
        out.float().square().sum().backward()
    return out.detach(), lora_gradients(trainer)


@pytest.mark.parametrize("row", one_in(4, TRAINED), ids=str)
def test_each_sample_of_a_batch_has_what_it_has_alone(row, tmp_path, monkeypatch):
    samples = three_samples(row)
    data = training_data(*(sample for sample, _ in samples))
    trainer = make_trainer(build(row), data, tmp_path, batch_size=len(samples))
    fill_up_matrices(trainer)
    notes: list[str] = []
    monkeypatch.setattr(trainer.placed.observer, "note", notes.append)
    together, gradients = velocities(trainer, samples)
    apart = trainer.placed.weights.transformer.record.apart or not trainer.context.family.facts.batches
    assert apart == (row.name in APART)
    expected_notes = [
        f"Samples of one batch change each other in {trainer.context.family.title}, so each runs by itself."
    ]
    assert notes == expected_notes * (apart and trainer.context.family.facts.batches)
    alone = [velocities(trainer, [member]) for member in samples]
    for index, (out, _) in enumerate(alone):
        assert float((together[index] - out[0]).norm()) <= BOUND * float(out.norm()), index
    expected = {name: sum(gradients_alone[name] for _, gradients_alone in alone) for name in gradients}
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        assert float((gradients[name] - value).norm()) <= BOUND * max(float(value.norm()), 1e-3 * largest), name
    trainer.close()


def test_a_batch_of_one_that_comes_first_leaves_the_check_of_samples_to_the_next(tmp_path, monkeypatch):
    """As the certificate has it, which looks at one sample before the first step."""
    row = BY_NAME["hunyuan-image-distilled"]
    samples = three_samples(row)[:2]
    trainer = make_trainer(build(row), training_data(*(sample for sample, _ in samples)), tmp_path, batch_size=2)
    notes: list[str] = []
    monkeypatch.setattr(trainer.placed.observer, "note", notes.append)
    velocities(trainer, samples[:1])
    assert trainer.placed.checks.forward_done and not trainer.placed.weights.transformer.record.apart
    velocities(trainer, samples)
    assert trainer.placed.weights.transformer.record.apart and len(notes) == 1
    velocities(trainer, samples)
    assert len(notes) == 1
    trainer.close()
