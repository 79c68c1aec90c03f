"""A LoRA of one edit, judged by ComfyUI's own forward and sampler with the LoRA loaded by its own loader."""

import comfy.model_management
import comfy.sample
import comfy.sd
import pytest
import tiny
import torch
from tiny.qwen_data import qwen_sample
from tiny.runs import train, training_data

SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9)


def core_loss(model, tensors, sigma):
    """mean((v − (noise − x0))²) with v = (x_t − denoised) / sigma from core's apply_model, on noise of its own."""
    comfy.model_management.load_models_gpu([model])
    x0 = model.model.process_latent_in(tensors.latent[None])
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(9))
    x_t = (1 - sigma) * x0 + sigma * noise
    conds = model.model.extra_conds(cross_attn=tensors.text, noise=x_t, device=x_t.device, **tensors.conditioning)
    args = {name: cond.process_cond(1, area=None, device=x_t.device).cond for name, cond in conds.items()}
    with torch.no_grad():
        denoised = model.model.apply_model(x_t, torch.tensor([sigma]), **args)
    return float(((x_t - denoised) / sigma - (noise - x0)).square().mean())


def sampled(model, tensors):
    empty = torch.zeros_like(tensors.latent[None])
    noise = comfy.sample.prepare_noise(empty, 1)
    positive = [[tensors.text, tensors.conditioning]]
    return comfy.sample.sample(
        model, noise, 8, 1.0, "euler", "simple", positive, positive, empty, denoise=1.0, disable_pbar=True
    )[0]


@pytest.mark.parametrize(
    "timestep_zero", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["qwen-image", "2511"]
)
def test_training_on_one_edit_lowers_its_loss_and_makes_the_sampler_draw_it(tmp_path, timestep_zero):
    model = tiny.load_qwen_image(
        tiny.write_qwen_image(tmp_path / "qwen.safetensors", layers=1, timestep_zero=timestep_zero)
    )
    # A random base has to be changed whole to learn a picture, so every Linear is trained.
    data = training_data(qwen_sample("the picture", 4, 4, references=[(4, 4)] if timestep_zero else ()))
    tensors = data.samples[0].load()
    result = train(
        model,
        data,
        tmp_path,
        steps=450,
        batch_size=2,
        save_every=0,
        network={"rank": 64, "alpha": 64.0, "include": ("*",)},
        optimizer={"learning_rate": 3e-3, "lr_scheduler": "cosine"},
        objective={"shift": 1.0},
    )
    with_lora = comfy.sd.load_lora_for_models(model, None, dict(result.lora), 1.0, 0)[0]
    before = [core_loss(model, tensors, sigma) for sigma in SIGMAS]
    after = [core_loss(with_lora, tensors, sigma) for sigma in SIGMAS]
    assert all(a < b / 5 for a, b in zip(after, before, strict=True)), (before, after)

    size = tensors.latent.norm()
    far, near = ((sampled(m, tensors) - tensors.latent).norm() / size for m in (model, with_lora))
    assert near < 0.4 and far > 1.5, (far, near)
