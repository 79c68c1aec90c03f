"""Qwen-Image's forward equals ComfyUI's own on the same weights, each sample of a batch as core gives it alone."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tessera.memory.weights.frozen import unload
from tessera.models.family import NoisySample
from tessera.models.qwen_image.family import QwenImage
from tiny.qwen_data import qwen_sample
from torch import Tensor

FAMILY = QwenImage()
SIGMAS = torch.tensor([0.2, 0.55, 0.9])
METHODS = (None, "index", "index_timestep_zero", "negative_index", "offset", "uxo")


@pytest.fixture(scope="module")
def files(tiny_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qwen")
    return {
        "qwen-image": tiny_files["qwen_image"],
        "qwen-image-edit-2511": tiny.write_qwen_image(folder / "2511.safetensors", timestep_zero=True),
        "layered": tiny.write_qwen_image(folder / "layered.safetensors", layered=True),
    }


def noisy(sample: Any) -> NoisySample:
    read = sample.load()
    return NoisySample(read.latent, read.text, read.conditioning, sample.tokens, sample.text_length)


def core_velocity(model: Any, sample: Any, sigma: Tensor) -> Tensor:
    """From core's `apply_model` on this sample alone, unpadded, as tokens."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    read = sample.load()
    x = read.latent[None].to(model.load_device)
    conds = model.model.extra_conds(cross_attn=read.text, noise=x, device=x.device, **read.conditioning)
    args = {name: cond.process_cond(1, area=None, device=x.device).cond for name, cond in conds.items()}
    with torch.no_grad():
        denoised = model.model.apply_model(x, sigma[None].to(x.device), **args)
    return FAMILY.cut(((x - denoised) / sigma)[0].cpu(), sample.tokens).tokens


@torch.no_grad()
def our_velocity(model: Any, samples: list[NoisySample], sigmas: Tensor = SIGMAS) -> Tensor:
    unload()
    device, dtype = model.load_device, model.model.get_dtype_inference()
    transformer = FAMILY.build(model, device, dtype, "auto")
    inputs = FAMILY.inputs(model, samples, sigmas[: len(samples)].to(device), 1.0)
    return transformer.forward(lambda block, *rest: block(*rest, {}), inputs).cpu()


def check(file: Path, *samples: Any) -> None:
    model = tiny.load_qwen_image(file)
    expected = [core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=False)]
    found = our_velocity(model, [noisy(s) for s in samples])
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=2e-5), (one - other).abs().max()


@pytest.mark.parametrize("variant", ["qwen-image", "qwen-image-edit-2511"])
def test_pictures_of_several_shapes_and_captions_of_several_lengths_share_a_batch(files, variant):
    check(
        files[variant],
        qwen_sample("wide", 4, 6, text_length=7),
        qwen_sample("tall", 8, 3, text_length=31),
        qwen_sample("long", 2, 12, text_length=128),
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["qwen-image", "qwen-image-edit-2511"])
def test_references_stand_where_core_puts_them(files, variant, method):
    check(
        files[variant],
        qwen_sample("one shape", 4, 6, 9, references=[(8, 4), (4, 6), (6, 8)], method=method),
        qwen_sample("another", 6, 4, 40, references=[(4, 8), (6, 4), (12, 4)], method=method),
    )


def test_a_batch_may_mix_the_methods_of_its_samples(files):
    check(
        files["qwen-image"],
        qwen_sample("a", 4, 6, 9, references=[(6, 4)], method="index_timestep_zero"),
        qwen_sample("b", 4, 6, 9, references=[(6, 4)]),
        qwen_sample("c", 4, 6, 9, references=[(6, 4)], method="offset"),
    )


def test_references_of_an_odd_number_of_cells_are_filled_up_as_core_does(files):
    check(files["qwen-image"], qwen_sample("odd", 5, 3, 9, references=[(7, 5), (3, 8)]))


def test_references_without_a_frame_axis_are_taken_as_pictures(files):
    sample = qwen_sample("flat", 4, 4, 9, references=[(4, 6)])
    model = tiny.load_qwen_image(files["qwen-image"])
    expected = our_velocity(model, [noisy(sample)])
    read = sample.load()
    read.conditioning["reference_latents"] = [x[:, :, 0] for x in read.conditioning["reference_latents"]]
    assert torch.equal(our_velocity(model, [noisy(sample)]), expected)


def test_variants_are_told_apart(files):
    for variant in ("qwen-image", "qwen-image-edit-2511"):
        model = tiny.load_qwen_image(files[variant]).model
        assert FAMILY.matches(model) and FAMILY.variant(model) == variant


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("width", ["tiny", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_it_says_the_same_at_full_width_and_in_bf16(tmp_path, width, dtype, bound):
    """One layer of the real sizes, with references and timestep zero, in the dtypes that core runs it in."""
    sizes = {"heads": 24, "head_size": 128, "text_dim": 3584} if width == "full" else {}
    file = tiny.write_qwen_image(tmp_path / "qwen.safetensors", layers=1, timestep_zero=True, dtype=dtype, **sizes)
    model = tiny.load_qwen_image(file, dtype)
    if dtype != torch.float32:
        model.set_model_compute_dtype(dtype)
        model.model.manual_cast_dtype = dtype
    text = sizes.get("text_dim", tiny.QWEN_TEXT_WIDTH)
    samples = [
        qwen_sample("wide", 8, 12, 20, references=[(10, 8), (12, 14)], text_width=text),
        qwen_sample("tall", 16, 6, 50, references=[(8, 10), (14, 12)], text_width=text),
    ]
    expected = torch.stack([core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=False)])
    found = our_velocity(model, [noisy(s) for s in samples])
    assert found.dtype == dtype and model.model.get_dtype_inference() == dtype
    assert relative(found.float(), expected.float()) < bound
