"""Captions of several lengths share a batch exactly: a sample's gradients are those of its caption alone, unpadded."""

from typing import Any

import pytest
import tiny
import torch
from family_cases import CASES
from tessera.models.family import NoisySample
from tiny.train.reference_gradients import lora_gradients
from tiny.train.runs import training_data
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], ids=["flash", "math"])
def test_three_captions_in_one_batch_give_the_gradients_of_three_batches_of_one(case_file, tmp_path, kernel, backend):
    """Sample by sample: in a padded batch where only its velocity counts, and alone with its caption as it is."""
    case = CASES["qwen-image-edit-2511"]
    data = training_data(*case.batches()["references"]())
    lengths = [5, 40, 128]
    trainers = {
        name: tiny.make_trainer(case.load(case_file(case)), data, tmp_path / name, backend=backend_name)
        for name, backend_name in (("together", backend), ("alone", None))
    }
    direction = torch.randn(3, 24, 64, generator=torch.Generator().manual_seed(7))
    for place, length in enumerate(lengths):
        with sdpa_kernel(kernel):
            together = single_gradients(trainers["together"], data, (0, 1, 2), 128, place, direction)
        alone = single_gradients(trainers["alone"], data, (place,), length, 0, direction[place : place + 1])
        assert together.keys() == alone.keys()
        for name, value in alone.items():
            assert float((together[name] - value).norm()) <= 2e-5 * float(value.norm()), name


def single_gradients(
    trainer: Any, data: Any, batch: tuple[int, ...], text_length: int, place: int, direction: Tensor
) -> dict[str, Tensor]:
    """The gradients of <velocity of the sample at `place`, its direction>."""
    tiny.fill_up_matrices(trainer)
    read = [data.samples[i].load() for i in batch]
    samples = [NoisySample(r.latent, r.text, r.conditioning, 24, text_length) for r in read]
    sigma = torch.tensor([0.2, 0.5, 0.9])[list(batch)]
    velocity = trainer.placed.velocity(
        trainer.context.family.forward.inputs(trainer.context.patcher, samples, sigma, 1.0), (0, 0)
    )
    trainer.learner.zero_grad()
    (velocity[place] * direction[place]).sum().backward()
    return lora_gradients(trainer)
