"""The tiny checkpoints load through ComfyUI's loaders and behave like models."""

import logging

import pytest
import tiny
import torch


def sample(model, positive, steps=2, size=(8, 16), seed=1):
    import comfy.sample

    latent = torch.zeros(1, 16, *size)
    noise = comfy.sample.prepare_noise(latent, seed)
    return comfy.sample.sample(
        model, noise, steps, 1.0, "euler", "simple", positive, positive, latent, denoise=1.0, disable_pbar=True
    )


def encode(clip, text):
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def test_flux_clip_gives_text_and_pooled_output_of_the_widths_that_the_tiny_flux_takes(tiny_clip):
    ((text, extra),) = encode(tiny_clip, "a red fox in the snow")
    assert text.shape == (1, 256, tiny.T5_WIDTH)
    assert extra["pooled_output"].shape == (1, tiny.CLIP_WIDTH)
    assert text.isfinite().all() and 0.5 < text.std() < 2
    ((other, _),) = encode(tiny_clip, "a blue fox in the snow")
    assert (other - text).abs().max() > 0.1


@pytest.mark.parametrize("name", ["flux", "schnell"])
def test_tiny_flux_samples_to_finite_values_that_depend_on_the_prompt(name, tiny_files, tiny_clip):
    model = tiny.load_flux(tiny_files[name])
    first, second = (sample(model, encode(tiny_clip, text)) for text in ("a fox", "a castle at night"))
    assert first.shape == (1, 16, 8, 16)
    assert first.isfinite().all() and first.std() > 0.1
    assert (first - second).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"dtype": torch.bfloat16}, 0.02),
        ({"dtype": torch.float16}, 0.005),
        ({"dtype": torch.float8_e4m3fn}, 0.2),
        ({"dtype": torch.bfloat16, "fp8": True}, 0.2),
    ],
    ids=["bf16", "fp16", "fp8", "scaled fp8"],
)
def test_files_of_other_dtypes_load_and_come_near_the_fp32_model(options, tolerance, tmp_path, tiny_flux, caplog):
    positive = [[torch.randn(1, 16, tiny.T5_WIDTH), {"pooled_output": torch.randn(1, tiny.CLIP_WIDTH)}]]
    with caplog.at_level(logging.WARNING):
        model = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", **options))
    assert not [r for r in caplog.records if "missing" in r.message or "unexpected" in r.message]
    reference, result = sample(tiny_flux, positive), sample(model, positive)
    error = (reference - result).norm() / reference.norm()
    assert 0 < error < tolerance


def test_every_parameter_of_the_tiny_flux_influences_its_output(tiny_flux):
    model = tiny_flux.model.diffusion_model
    generator = torch.Generator().manual_seed(3)
    x, text, pooled = (
        torch.randn(shape, generator=generator)
        for shape in ((1, 16, 4, 6), (1, 5, tiny.T5_WIDTH), (1, tiny.CLIP_WIDTH))
    )

    def run():
        with torch.no_grad():
            return model(x, torch.tensor([0.6]), text, pooled, guidance=torch.tensor([3.5]))

    reference = run()
    assert 0.1 < reference.std() < 10
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        change = ((run() - reference).norm() / reference.norm()).item()
        with torch.no_grad():
            parameter.copy_(kept)
        assert change > 1e-4, (name, change)
    assert torch.equal(run(), reference)


@pytest.mark.parametrize("sigma", [0.3, 0.6, 0.95])
def test_the_tiny_denoiser_gives_nearly_the_best_velocity_for_data_of_small_variance(sigma, tmp_path):
    model = tiny.load_flux(tiny.write_flux(tmp_path / "flux.safetensors", denoiser=True)).model.diffusion_model
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 16, 16, 16), (1, 16, 16, 16), (1, 9, tiny.T5_WIDTH), (1, tiny.CLIP_WIDTH))
    data, noise, text, pooled = (torch.randn(shape, generator=generator) for shape in shapes)
    data *= 0.05**0.5
    x = (1 - sigma) * data + sigma * noise
    with torch.no_grad():
        velocity = model(x, torch.tensor([sigma]), text, pooled, guidance=torch.tensor([1.0]))
    factor = (noise - data).flatten() @ x.flatten() / (x.flatten() @ x.flatten())  # regression of velocity on x
    error = (velocity - factor * x).square().mean().sqrt()
    assert error < 0.25 and (factor * x).square().mean().sqrt() > 3 * error


@pytest.mark.parametrize("name", ["vae", "vae4"])
def test_tiny_vae_gives_a_picture_back_as_its_means_over_cells_of_eight(name, tiny_files):
    vae = tiny.load_vae(tiny_files[name])
    picture = torch.rand(1, 32, 48, 3, generator=torch.Generator().manual_seed(5))
    latent = vae.encode(picture)
    assert latent.shape == (1, 16 if name == "vae" else 4, 4, 6)
    means = torch.nn.functional.avg_pool2d(picture.movedim(-1, 1), 8)
    expected = torch.nn.functional.interpolate(means, scale_factor=8).movedim(1, -1)
    assert (vae.decode(latent) - expected).abs().max() < 0.02


def test_the_models_of_another_family_are_of_another_family(other_family):
    import comfy.model_base

    assert isinstance(other_family["model"].model, comfy.model_base.WAN21)
    ((text, extra),) = encode(other_family["clip"], "a fox")
    assert text.shape == (1, 77, tiny.CLIP_WIDTH)
    assert other_family["vae"].latent_channels == 4
