"""Wan's training forward says what ComfyUI's own does: all variants, clips and pictures in one batch, ragged edges."""

import comfy.model_management
import pytest
import tiny
import torch
from tessera.models.family import NoisySample, SampleFacts
from tessera.models.registry import family_of
from tiny.wan_core import core_on_kept_tokens, core_velocity
from torch import Tensor

VARIANTS = tuple(tiny.WAN_CHANNELS)
# A picture, and clips of two and three latent frames, all of 24 tokens; and with a ragged edge, all of 18.
GRIDS = [(1, 4, 6), (2, 3, 4), (3, 4, 2), (2, 2, 6)]
KEPT = [None, None, None, None]
RAGGED = [(1, 4, 5), (2, 2, 5), (3, 3, 2), (2, 3, 3)], [18, 9, 6, 9]
SIGMAS = [0.15, 0.5, 0.8, 0.95]


def captions(*lengths):
    """Samples with captions of these lengths."""
    return [SampleFacts("a.png", 1, (), 0, frozenset(), length) for length in lengths]


@pytest.fixture
def wan(tmp_path):
    def load(variant, **changes):
        return tiny.load_wan(tiny.write_wan(tmp_path / f"{variant}.safetensors", variant=variant, **changes))

    return load


def samples_of(variant, grids=GRIDS, kept=KEPT, clean_frames=0, **changes):
    return [
        tiny.wan_sample(
            f"sample {i}",
            grid,
            variant,
            keep=keep,
            text=4 + 2 * i,
            clean_frames=min(clean_frames, grid[0] - 1),
            **changes,
        )
        for i, (grid, keep) in enumerate(zip(grids, kept, strict=True))
    ]


def noisy(sample) -> NoisySample:
    """The latent stands for x_t."""
    read = sample.load()
    return NoisySample(
        read.latent, read.text, read.conditioning, sample.tokens, sample.text_length, sample.clean_frames
    )


def our_velocity(model, samples, sigmas) -> Tensor:
    from tessera.memory.weights.frozen import unload
    from tessera.models.model_patches import trainable_model

    patcher, _ = trainable_model(model)
    unload()
    family = family_of(model)
    dtype = patcher.model.get_dtype_inference()
    transformer = family.build(patcher, patcher.load_device, dtype, "auto")
    inputs = family.inputs(patcher, [noisy(s) for s in samples], torch.tensor(sigmas, device=patcher.load_device), 1.0)
    return transformer.forward(lambda block, *args: block(*args, {}), inputs).float().cpu()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("variant", "clean_frames"), [*((v, 0) for v in VARIANTS), ("2.2-5b", 1)])
def test_a_batch_of_clips_and_pictures_equals_apply_model_on_each(wan, variant, clean_frames):
    model, samples = wan(variant), samples_of(variant, clean_frames=clean_frames)
    assert family_of(model).name == "wan" and family_of(model).variant(model.model) == variant
    with torch.no_grad():
        ours = our_velocity(model, samples, SIGMAS)
        comfy.model_management.load_models_gpu([model])
        theirs = torch.cat([core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=True)])
    assert ours.shape == theirs.shape and relative(ours, theirs) < 2e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ragged_edge_equals_core_s_modules_on_the_tokens_that_are_kept(wan, variant):
    model = wan(variant)
    samples = samples_of(variant, *RAGGED, clean_frames=1 if variant == "2.2-5b" else 0)
    with torch.no_grad():
        ours = our_velocity(model, samples, SIGMAS)
        comfy.model_management.load_models_gpu([model])
        theirs = [core_on_kept_tokens(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=True)]
    assert relative(ours, torch.cat(theirs)) < 2e-6


def test_a_model_of_first_and_last_picture_equals_core(wan):
    model = wan("2.1-i2v", pictures=2)
    for pictures in (1, 2):
        samples = samples_of("2.1-i2v", GRIDS[:2], KEPT[:2], pictures=pictures)
        with torch.no_grad():
            ours = our_velocity(model, samples, SIGMAS[:2])
            comfy.model_management.load_models_gpu([model])
            theirs = [core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS[:2], strict=True)]
        assert relative(ours, torch.cat(theirs)) < 2e-6


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_sixteen_bit_models_of_two_heads_equal_core_within_their_rounding(wan, variant, dtype):
    model = wan(variant, dtype=dtype, dim=256)
    model.set_model_compute_dtype(dtype)
    model.model.manual_cast_dtype = dtype
    samples = samples_of(variant)
    with torch.no_grad():
        ours = our_velocity(model, samples, SIGMAS)
        comfy.model_management.load_models_gpu([model])
        theirs = [core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=True)]
    assert relative(ours, torch.cat(theirs)) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("variant", ["2.1-i2v", "2.2-5b"])
def test_a_file_kept_in_fp8_equals_core(tmp_path, variant):
    path = tiny.write_wan(tmp_path / "wan.safetensors", variant=variant, dtype=torch.float8_e4m3fn)
    model, samples = tiny.load_wan(path, torch.float8_e4m3fn), samples_of(variant)
    assert model.model.diffusion_model.blocks[0].modulation.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        ours = our_velocity(model, samples, SIGMAS)
        comfy.model_management.load_models_gpu([model])
        theirs = [core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=True)]
    assert relative(ours, torch.cat(theirs)) < 2e-6


def test_core_never_gets_the_samples_own_start_picture_to_write_on(wan, monkeypatch):
    """Core writes the scaled latent over what its resize gave it: a copy only as long as that resize makes one."""
    import comfy.model_base

    monkeypatch.setattr(comfy.model_base.utils, "common_upscale", lambda samples, *size: samples)
    model, (sample,) = wan("2.1-i2v"), samples_of("2.1-i2v", GRIDS[1:2], KEPT[:1])
    read = sample.load().conditioning
    before = {name: read[name].clone() for name in ("concat_latent_image", "concat_mask")}
    with torch.no_grad():
        our_velocity(model, [sample], [0.5])
    assert all(torch.equal(read[name], tensor) for name, tensor in before.items())


def test_captions_take_512_tokens_and_longer_ones_are_cut_with_a_word(wan):
    model = wan("2.1-t2v")
    family = family_of(model)
    assert {family.text_length(model.model, length) for length in (3, 512, 700)} == {512}
    assert family.notes(model.model, captions(512, 40)) == []
    (note,) = family.notes(model.model, captions(512, 513, 700))
    assert "2 captions have more than 512 tokens" in note
    samples = [tiny.wan_sample(f"{length}", (1, 2, 2), text=length, text_length=512) for length in (5, 600)]
    from tessera.models.model_patches import trainable_model

    patcher, _ = trainable_model(model)
    made = family.inputs(patcher, [noisy(s) for s in samples], torch.tensor([0.5, 0.5]), 1.0)
    assert made.text.shape[:2] == (2, 512) and made.text[0, 5:].abs().max() == 0
    assert torch.equal(made.text[1], samples[1].load().text[0, :512])
