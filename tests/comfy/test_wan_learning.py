"""A LoRA of one clip, judged by ComfyUI's own forward and sampler with the LoRA loaded by its own loader."""

import dataclasses

import comfy.model_management
import comfy.sample
import comfy.sd
import pytest
import tiny
import torch
from tiny.runs import train, training_data
from tiny.wan_core import core_velocity, padded_text, tokens_of

SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)


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


def sampled(model, sample):
    """What core's sampler draws from noise, with the clean frames given as its image-to-video nodes give them."""
    read = sample.load()
    mask = torch.ones(1, 1, *read.latent.shape[1:])
    mask[:, :, : sample.clean_frames] = 0
    start = read.latent[None] * (1 - mask)
    positive = [[padded_text(sample), read.conditioning]]
    noise = comfy.sample.prepare_noise(start, 1)
    result = comfy.sample.sample(
        model, noise, 8, 1.0, "euler", "simple", positive, positive, start, noise_mask=mask, disable_pbar=True
    )
    return result[0]


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
        # A random base has to be changed whole to learn a clip, so every Linear is trained.
        network={"rank": 64, "alpha": 64.0, "include": ("*",)},
        optimizer={"learning_rate": 3e-3, "lr_scheduler": "cosine"},
    )
    with_lora = comfy.sd.load_lora_for_models(model, None, dict(result.lora), 1.0, 0)[0]
    for sample in samples:
        before = [core_loss(model, sample, sigma) for sigma in SIGMAS]
        after = [core_loss(with_lora, sample, sigma) for sigma in SIGMAS]
        assert all(a < b / 5 for a, b in zip(after, before, strict=True)), (before, after)

        latent = sample.load().latent
        noisy = latent[:, sample.clean_frames :]
        drawn = [sampled(m, sample)[:, sample.clean_frames :] for m in (model, with_lora)]
        far, near = ((x - noisy).norm() / noisy.norm() for x in drawn)
        assert near < 0.35 and far > 1.0, (far, near)
