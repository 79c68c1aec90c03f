"""Clips of LTX-Video are trained at the frames per second that they have, as `LTXVConditioning` tells them to the
model when it samples."""

import nodes
import pytest
import torch
from comfy_extras.nodes_lt import LTXVConditioning
from PIL import Image
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.media.clip_windows import Extraction
from tessera.models.family import NoisySample
from tessera.models.native.facts.lookup import NAMED
from tessera.models.native.facts.model_facts import Sound
from tessera.models.native.forward.inputs import native_inputs
from tiny.data.films import write_film
from tiny.data.preparing import prepare
from tiny.native import ROWS, build, sample_of
from tiny.native.loaded import load_native

OPTIONS = {"megapixels": 0.01, "max_graphs": 2, "fit": "ragged edge", "max_text_length": 512}


@pytest.fixture(scope="module")
def ltx(tmp_path_factory):
    with torch.inference_mode():
        return load_native("ltx-video", tmp_path_factory.mktemp("ltx"))


@pytest.fixture
def films(tmp_path):
    (folder := tmp_path / "films").mkdir()
    write_film(folder / "a.mp4", 18, fps=24, size=(64, 96), caption="a film")
    return folder


def prepared(dataset, ltx, tmp_path):
    with torch.inference_mode():  # as ComfyUI runs nodes
        return prepare(dataset, ltx[2], ltx[1], cache_dir=tmp_path / "cache", **OPTIONS).data


def inputs_of(model, sample, x):
    tensors = sample.load()
    noisy = NoisySample(x, tensors.text, tensors.conditioning, sample.tokens, sample.text_length)
    return native_inputs(model, [noisy], torch.tensor([0.5]), None).groups[0]


@pytest.mark.parametrize(("fps", "rate"), [(12, 12.0), (0, 24.0)])
def test_a_training_step_is_told_what_core_tells_the_model_at_the_rate_of_the_clip(ltx, films, tmp_path, fps, rate):
    model, clip, _ = ltx
    (sample,) = prepared(scan_videos(films, Extraction((9,), fps=fps)), ltx, tmp_path).samples
    assert sample.conditioning == {"attention_mask", "frame_rate"} and sample.grid[0] == 2
    x = torch.randn(sample.load().latent.shape, generator=torch.Generator().manual_seed(1))
    group = inputs_of(model, sample, x)
    with torch.inference_mode():
        (encoded,) = nodes.CLIPTextEncode().encode(clip, "a film")
        ((text, conditioning),) = LTXVConditioning.execute(encoded, encoded, rate).result[0]
        conds = model.model.extra_conds(cross_attn=text, noise=x[None], device=x.device, **conditioning)
        expected = model.model.apply_model(x[None], group.sigma, **{name: cond.cond for name, cond in conds.items()})
    assert conds["frame_rate"].cond == rate and group.conds["frame_rate"] == pytest.approx(rate)
    with torch.no_grad():
        actual = model.model.apply_model(x[None], group.sigma, **group.conds)
        otherwise = model.model.apply_model(x[None], group.sigma, **{**group.conds, "frame_rate": 25})
    assert torch.allclose(actual, expected, atol=1e-6)
    assert (actual - otherwise).abs().max() > 1e-3


def test_another_rate_makes_other_data_and_pictures_have_none(ltx, films, tmp_path):
    datasets = [prepared(scan_videos(films, Extraction((9,), fps=fps)), ltx, tmp_path) for fps in (12, 24, 12)]
    assert datasets[0].fingerprint == datasets[2].fingerprint != datasets[1].fingerprint
    (pictures := tmp_path / "pictures").mkdir()
    Image.new("RGB", (96, 64), "teal").save(pictures / "b.png")
    (pictures / "b.txt").write_text("a picture")
    dataset = scan_videos(films, Extraction((1,), fps=12)) + scan_images(pictures)
    assert {sample.conditioning for sample in prepared(dataset, ltx, tmp_path).samples} == {
        frozenset({"attention_mask"})
    }


def test_another_rate_at_which_the_same_frames_are_shown_makes_other_data(ltx, films, tmp_path):
    first, other = (prepared(scan_videos(films, Extraction((9,), fps=fps)), ltx, tmp_path) for fps in (24, 23.5))
    first_sample, another = (data.samples[0].load() for data in (first, other))
    assert torch.equal(first_sample.latent, another.latent)
    assert (first_sample.conditioning["frame_rate"], another.conditioning["frame_rate"]) == (24, 23.5)
    assert first.fingerprint != other.fingerprint


def test_the_silence_beside_a_video_of_ltx_2_lasts_as_long_as_it():
    (row,) = (row for row in ROWS if row.name == "ltx-2")
    sample, model = sample_of(row), build(row)
    tensors = sample.load()
    x = torch.randn(tensors.latent.shape)
    for rate, latents in ((None, 17), (12.5, 34)):
        rate_options = {} if rate is None else {"frame_rate": rate}
        noisy = NoisySample(
            x, tensors.text, {**tensors.conditioning, **rate_options}, sample.tokens, sample.text_length
        )
        (group,) = native_inputs(model, [noisy], torch.tensor([0.5]), None, _ltx_2_sound()).groups
        assert [tuple(shape) for shape in group.conds["latent_shapes"]] == [(1, *x.shape), (1, 8, latents, 16)]


def test_the_silence_beside_a_video_is_as_noisy_as_the_models_own_schedule_of_sound_has_it():
    (row,) = (row for row in ROWS if row.name == "minimax-h3")
    sample, model = sample_of(row), build(row)
    tensors, sound = sample.load(), next(facts.sound for facts in NAMED if facts.name == row.name)
    noisy = NoisySample(tensors.latent, tensors.text, tensors.conditioning, sample.tokens, sample.text_length)
    sounds = [
        native_inputs(model, [noisy], torch.tensor([0.5]), None, variant)
        .groups[0]
        .x.flatten()[tensors.latent.numel() :]
        for variant in (sound, Sound(sound.shape, lambda sigma: 1.0))
    ]
    assert sounds[1].numel() > 0 and torch.allclose(sounds[0], sound.sigma(0.5) * sounds[1])


def _ltx_2_sound():
    return next(facts.sound for facts in NAMED if facts.name == "ltx-2")
