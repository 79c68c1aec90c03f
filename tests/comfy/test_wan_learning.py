"""A LoRA of one clip, judged by ComfyUI's own forward and sampler with the LoRA loaded by its own loader."""

import dataclasses

import comfy.model_management
import pytest
import tiny
import torch
from tiny.learning import WHOLE, assert_draws, assert_loss_falls, sampled, with_lora
from tiny.runs import train, training_data
from tiny.wan_core import core_velocity, padded_text, tokens_of


def core_loss(model, sample, sigma):
    """mean((v − (noise − x0))²) of core's velocity on noise of its own, over the frames that are noisy."""
    comfy.model_management.load_models_gpu([model])
    x0 = model.model.process_latent_in(sample.load().latent[None])
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(9))
    x_t = (1 - sigma) * x0 + sigma * noise
    x_t[:, :, : sample.clean_frames] = x0[:, :, : sample.clean_frames]
    with torch.no_grad():
        velocity = core_velocity(model, sample, sigma, x_t)
    first = sample.clean_frames * sample.tokens // sample.grid[0]
    wanted = tokens_of((noise - x0)[0]).flatten(0, 1)[None]
    return float((velocity - wanted)[:, first:].square().mean())


def drawn(model, sample):
    """The noisy frames that core's sampler draws, with the clean ones given as its image-to-video nodes give them."""
    read = sample.load()
    mask = torch.ones(1, 1, *read.latent.shape[1:])
    mask[:, :, : sample.clean_frames] = 0
    start = read.latent * (1 - mask[0])
    return sampled(model, start, padded_text(sample), read.conditioning, noise_mask=mask)[:, sample.clean_frames :]


def clip_of(name, variant, scale):
    """A clip of one colour: its text is no part of Wan's self-attention, so under noise a token would know its place
    from the edges of the clip alone, which takes longer to learn than a test may run."""
    sample = tiny.wan_sample(
        name, (2, 2, 3), variant, text=40, text_length=512, clean_frames=int(variant == "2.2-5b"), scale=scale
    )
    read = sample.load()
    same = dataclasses.replace(read, latent=read.latent[:, :1, :1, :1].expand_as(read.latent).contiguous())
    return dataclasses.replace(sample, load=lambda *_: same)


# scale: the latents' deviation, so much above that of noise that a clip is known when the part of it is.
@pytest.mark.parametrize(("variant", "scale"), [("2.1-t2v", 8.0), ("2.2-5b", 3.0)])
def test_training_on_two_clips_lowers_their_loss_and_the_sampler_draws_each_by_its_caption(tmp_path, variant, scale):
    model = tiny.load_wan(tiny.write_wan(tmp_path / "wan.safetensors", variant=variant))
    samples = [clip_of(name, variant, scale) for name in ("a fox", "a crow")]
    result = train(
        model,
        training_data(*samples),
        tmp_path / "runs",
        steps=120,
        batch_size=2,
        save_every=0,
        network=WHOLE,
        optimizer={"learning_rate": 3e-3, "lr_scheduler": "cosine"},
    )
    learned = with_lora(model, result)
    for sample in samples:
        assert_loss_falls(lambda m, sigma, sample=sample: core_loss(m, sample, sigma), model, learned)
        wanted = sample.load().latent[:, sample.clean_frames :]
        assert_draws(lambda m, sample=sample: drawn(m, sample), wanted, (model, learned), near=0.35, far=1.0)
