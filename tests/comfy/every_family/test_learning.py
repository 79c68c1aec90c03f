"""A LoRA of each family learns its samples, judged by ComfyUI's own forward and sampler with the LoRA loaded by it."""

from typing import Any

import comfy.model_management
import torch
from family_cases import every_case
from tiny.models.family_case import FamilyCase
from tiny.train.learning import WHOLE, assert_draws, assert_loss_falls, sampled, with_lora
from tiny.train.runs import train, training_data
from torch import Tensor


def core_loss(case: FamilyCase, model: Any, sample: Any, sigma: float) -> float:
    """mean((v − (noise − x0))²) of ComfyUI's velocity on noise of its own, over the frames that are noisy."""
    comfy.model_management.load_models_gpu([model])
    x0 = model.model.process_latent_in(sample.load().latent[None])
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(9))
    x_t = (1 - sigma) * x0 + sigma * noise
    clean = sample.clean_frames
    if clean:
        x_t[:, :, :clean] = x0[:, :, :clean]
    velocity = case.core_velocity(model, sample, sigma, x_t=x_t)
    error = velocity - case.tokens((noise - x0)[0], sample)
    return float(error[clean * sample.tokens // sample.grid[0] :].square().mean())


def sampled_latent(case: FamilyCase, model: Any, sample: Any) -> Tensor:
    """The noisy frames that ComfyUI's sampler draws, with the clean ones given as its image-to-video nodes do."""
    read, clean = sample.load(), sample.clean_frames
    text = case.core_text(sample)
    if not clean:
        return sampled(model, torch.zeros_like(read.latent), text, read.conditioning)
    mask = torch.ones(1, 1, *read.latent.shape[1:])
    mask[:, :, :clean] = 0
    start = read.latent * (1 - mask[0])
    return sampled(model, start, text, read.conditioning, noise_mask=mask)[:, clean:]


@every_case("learning", thin=("chroma", "wan"))
def test_training_lowers_the_loss_of_its_samples_and_the_sampler_draws_each(tmp_path, case):
    run = case.learning(tmp_path)
    data = training_data(*run.samples)
    result = train(run.model, data, tmp_path / "runs", save_every=0, network=WHOLE, **run.options)
    learned = with_lora(run.model, result)
    for sample in run.samples:
        assert_loss_falls(lambda m, sigma, s=sample: core_loss(case, m, s, sigma), run.model, learned)
        latent = sample.load().latent
        latent = latent[:, sample.clean_frames :] if sample.clean_frames else latent
        assert_draws(
            lambda m, s=sample: sampled_latent(case, m, s), latent, (run.model, learned), near=run.near, far=run.far
        )
