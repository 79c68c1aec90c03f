"""A LoRA of one picture, judged by ComfyUI's own forward and sampler with the LoRA loaded by its own loader."""

import comfy.model_management
import comfy.sample
import comfy.sd
import torch
from tiny.runs import sample, train, training_data

SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)


def core_loss(model, tensors, sigma):
    """mean((v − (noise − x0))²) with v = (x_t − denoised) / sigma from core's apply_model, on noise of its own."""
    comfy.model_management.load_models_gpu([model])
    x0 = model.model.process_latent_in(tensors.latent[None])
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(9))
    x_t = (1 - sigma) * x0 + sigma * noise
    pooled = tensors.conditioning["pooled_output"]
    with torch.no_grad():
        level, guidance = torch.tensor([sigma]), torch.tensor([1.0])
        denoised = model.model.apply_model(x_t, level, c_crossattn=tensors.text, y=pooled, guidance=guidance)
    return float(((x_t - denoised) / sigma - (noise - x0)).square().mean())


def sampled(model, tensors):
    empty = torch.zeros_like(tensors.latent[None])
    noise = comfy.sample.prepare_noise(empty, 1)
    positive = [[tensors.text, {**tensors.conditioning, "guidance": 1.0}]]
    return comfy.sample.sample(
        model, noise, 8, 1.0, "euler", "simple", positive, positive, empty, denoise=1.0, disable_pbar=True
    )[0]


def test_training_on_one_picture_lowers_its_loss_and_makes_the_sampler_draw_it(tiny_flux, tmp_path):
    # FLUX's latents have a deviation near 1 / 0.3611; a random base has to be changed whole to learn one, so every
    # Linear is trained.
    data = training_data(sample("the picture", 4, 4, scale=2.77))
    tensors = data.samples[0].load()
    result = train(
        tiny_flux,
        data,
        tmp_path,
        steps=450,
        batch_size=2,
        save_every=0,
        network={"rank": 64, "alpha": 64.0, "include": ("*",)},
        optimizer={"learning_rate": 3e-3, "lr_scheduler": "cosine"},
    )
    with_lora = comfy.sd.load_lora_for_models(tiny_flux, None, dict(result.lora), 1.0, 0)[0]
    before = [core_loss(tiny_flux, tensors, sigma) for sigma in SIGMAS]
    after = [core_loss(with_lora, tensors, sigma) for sigma in SIGMAS]
    assert all(a < b / 5 for a, b in zip(after, before, strict=True)), (before, after)

    size = tensors.latent.norm()
    far, near = ((sampled(model, tensors) - tensors.latent).norm() / size for model in (tiny_flux, with_lora))
    assert near < 0.35 and far > 1.5, (far, near)
