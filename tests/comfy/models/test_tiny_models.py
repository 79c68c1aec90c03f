"""The tiny checkpoints load through ComfyUI's loaders and behave like models."""

import logging

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny.nodes.workflow import fit_workflow


def sample_over(model, latent, positive, negative=None, steps=2, cfg=1.0, seed=1):
    import comfy.sample

    latent = comfy.sample.fix_empty_latent_channels(model, latent)
    noise = comfy.sample.prepare_noise(latent, seed)
    return comfy.sample.sample(
        model, noise, steps, cfg, "euler", "simple", positive, negative or positive, latent, disable_pbar=True
    )


def sample(model, positive):
    return sample_over(model, torch.zeros(1, 16, 8, 16), positive)


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
    positive = tiny.conditioning("flux", 16)
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
        original = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        change = ((run() - reference).norm() / reference.norm()).item()
        with torch.no_grad():
            parameter.copy_(original)
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


MODELS = {
    "flux": ("Flux", {"double_blocks": 2, "single_blocks": 2}),
    "flux2": ("Flux2", {"double_blocks": 2, "single_blocks": 2}),
    "wan": ("WAN21", {"blocks": 2}),
    "wan_vace": ("WAN21_Vace", {"blocks": 2, "vace_blocks": 2}),
    "qwen_image": ("QwenImage", {"transformer_blocks": 2}),
    "sdxl": ("SDXL", {"input_blocks": 6, "output_blocks": 6}),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_tiny_model_loads_whole_as_its_class(name, tiny_files, caplog):
    with caplog.at_level(logging.INFO):
        model = tiny.load_model(name, tiny_files[name])
    assert not [r for r in caplog.records if "missing" in r.message or "unexpected" in r.message or "left" in r.message]
    kind, lists = MODELS[name]
    assert type(model.model).__name__ == kind
    assert {n: len(getattr(model.model.diffusion_model, n)) for n in lists} == lists
    assert model.model_dtype() == torch.float32
    assert tiny_files[name].stat().st_size < 25e6


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_gives_the_same_finite_latent_again_and_another_seed_another(name, tiny_files):
    model = tiny.load_model(name, tiny_files[name])
    first, repeated, other = (tiny.sample(model, name, width=96, height=64, length=7, seed=seed) for seed in (1, 1, 2))
    assert first.isfinite().all() and first.std() > 0.1
    assert torch.equal(first, repeated)
    assert (first - other).abs().max() > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_the_text_and_its_pooled_output_change_what_each_tiny_model_samples(name, tiny_files):
    model = tiny.load_model(name, tiny_files[name])
    size = tiny.empty_latent(name, 64, 64).shape[1:]
    latent = torch.zeros(1, *size)
    ((text, extra),), ((other_text, other_extra),) = (tiny.conditioning(name, 6, seed) for seed in (1, 2))
    variants = [(text, extra), (other_text, extra)] + ([(text, other_extra)] if extra else [])
    assert ("pooled_output" in extra) == (name in ("flux", "sdxl"))
    first, *rest = (sample_over(model, latent, [list(variant)]) for variant in variants)
    for other in rest:
        assert (other - first).norm() > 1e-2 * first.norm()


@pytest.mark.parametrize("name", MODELS)
def test_each_tiny_model_takes_batches_guidance_and_texts_of_unlike_length(name, tiny_files):
    model = tiny.load_model(name, tiny_files[name])
    frames = 5 if name.startswith("wan") else 1
    result = tiny.sample(
        model, name, width=64, height=96, length=9, negative_length=5, batch=2, cfg=3.0, frames=frames, steps=1
    )
    spatial = (6, 4) if name == "flux2" else (12, 8)
    times = {"wan": (2,), "wan_vace": (2,), "qwen_image": (1,)}.get(name, ())
    channels = {"sdxl": 4, "flux2": 128}.get(name, 16)
    assert result.shape == (2, channels, *times, *spatial)
    assert result.isfinite().all()


def test_the_tiny_model_that_core_loads_anew_by_itself_is_the_same(tiny_files):
    model = tiny.load_qwen_image(tiny_files["qwen_image"])
    load, arguments = model.cached_patcher_init
    reloaded = load(*arguments, disable_dynamic=True)
    assert torch.equal(*(tiny.sample(m, "qwen_image", steps=1) for m in (model, reloaded)))


def test_the_detection_knows_full_sizes_alone_once_the_tiny_file_is_loaded(tiny_files):
    import comfy.model_detection

    original = comfy.model_detection.model_config_from_unet
    tiny.load_sdxl(tiny_files["sdxl"])
    assert comfy.model_detection.model_config_from_unet is original


def test_the_text_encoders_of_one_file_load_whole(tiny_files, caplog):
    with caplog.at_level(logging.DEBUG):
        tiny.load_text_encoder(tiny_files["umt5"])
        tiny.load_text_encoder(tiny_files["qwen"])
    assert not [r.message for r in caplog.records if "clip missing" in r.message]


def test_wan_clip_gives_at_least_512_tokens_of_which_those_after_the_end_are_zero(tiny_files):
    clip = tiny.load_wan_clip(tiny_files["umt5"])
    ((text, _),) = encode(clip, "a fox")
    assert text.shape == (1, 512, tiny.T5_WIDTH)
    tokens = len("a fox") + 2  # a space before the first word, the end after the last
    assert text[0, :tokens].abs().amax(1).min() > 0.1 and not text[0, tokens:].any()


def test_qwen_clip_gives_as_many_tokens_as_the_prompt_has_and_drops_the_template(tiny_files):
    clip = tiny.load_qwen_clip(tiny_files["qwen"])
    ((text, extra),) = encode(clip, "a red fox")
    ((longer, _),) = encode(clip, "a red fox in the snow")
    assert text.shape == (1, 8, tiny.QWEN_TEXT_WIDTH) and longer.shape == (1, 11, tiny.QWEN_TEXT_WIDTH)
    assert "attention_mask" not in extra
    assert torch.allclose(text[:, :3], longer[:, :3], atol=1e-5)  # it reads from left to right
    assert 0.5 < text.std() < 2 and (text[:, 3:] - longer[:, 3:8]).abs().max() > 0.1


@pytest.mark.parametrize("frames", [1, 5])
def test_tiny_wan_vae_loads_whole_and_has_the_cells_of_the_real_one(frames, tiny_files, caplog):
    with caplog.at_level(logging.DEBUG):
        vae = tiny.load_vae(tiny_files["wan_vae"])
    assert not [r for r in caplog.records if "VAE keys" in r.message]
    picture = torch.rand(frames, 32, 48, 3, generator=torch.Generator().manual_seed(5))
    latent = vae.encode(picture)
    assert latent.shape == (1, 16, (frames - 1) // 4 + 1, 4, 6) and latent.std() > 0.1
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(6))
    decoded = vae.decode(noise)
    assert decoded.shape == (1, frames, 32, 48, 3)
    assert decoded.isfinite().all() and decoded.std() > 0.1
    assert vae.latent_channels == 16


VIDEO = {"class_type": "EmptyHunyuanLatentVideo", "inputs": {"width": 832, "height": 480, "length": 81}}
PICTURE = {"class_type": "EmptySD3LatentImage", "inputs": {"width": 1328, "height": 1328}}


def text_to_picture(loader, clip_type, empty):
    """An API workflow for a family's real files. `loader` is the node that loads the diffusion model."""
    empty["inputs"]["batch_size"] = 1
    sampler = {"seed": 7, "steps": 20, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    linked = {"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0]}
    return {
        "model": {"class_type": loader, "inputs": {"unet_name": "real.safetensors", "weight_dtype": "default"}},
        "clip": {"class_type": "CLIPLoader", "inputs": {"clip_name": "real.safetensors", "type": clip_type}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "real.safetensors"}},
        "positive": {"class_type": "CLIPTextEncode", "inputs": {"text": "a fox in the snow", "clip": ["clip", 0]}},
        "negative": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["clip", 0]}},
        "empty": empty,
        "sample": {"class_type": "KSampler", "inputs": linked | {"latent_image": ["empty", 0]} | sampler},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sample", 0], "vae": ["vae", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": clip_type}},
        "latent": {"class_type": "SaveLatent", "inputs": {"samples": ["sample", 0], "filename_prefix": clip_type}},
    }


@pytest.mark.parametrize("loader", ["UNETLoader", "TesseraLoadDiffusionModel"])
@pytest.mark.parametrize(
    ("name", "names", "empty", "pictures"),
    [("wan", tiny.WAN_NAMES, VIDEO, 5), ("qwen_image", tiny.QWEN_NAMES, PICTURE, 1)],
    ids=["wan", "qwen_image"],
)
def test_a_server_samples_a_fitted_workflow_as_the_tests_do_in_their_own_process(
    loader, name, names, empty, pictures, server
):
    entry = server.run(fit_workflow(text_to_picture(loader, name, empty), names))
    assert len(entry["outputs"]["save"]["images"]) == pictures
    (saved,) = entry["outputs"]["latent"]["latents"]
    served = load_file(server.base / saved["type"] / saved["subfolder"] / saved["filename"])["latent_tensor"]

    models = server.base / "models"
    model = tiny.load_model(name, models / "diffusion_models" / names["unet_name"])
    clip = tiny.load_text_encoder(models / "text_encoders" / names["clip_name"])
    positive, negative = encode(clip, "a fox in the snow"), encode(clip, "")
    direct = sample_over(model, torch.zeros_like(served), positive, negative, cfg=3.0, seed=7)
    assert torch.allclose(served, direct, atol=1e-4) and direct.std() > 0.1
