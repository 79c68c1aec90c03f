"""Slider, Slider from Pictures and Erase Concept: what they make trains, and what they refuse before encoding."""

import json
from dataclasses import replace

import folder_paths
import numpy as np
import pytest
import tiny
import torch
from comfy_server import ServerFailure
from PIL import Image
from safetensors import safe_open
from tessera.data.folders.dataset import scan_images
from tessera.data.samples import SampleVariant
from tessera.nodes.data import concepts
from tiny.data.other_encoders import load_z_image_clip
from tiny.data.preparing import prepare
from tiny.nodes.prompt import ksampler, node
from tiny.train.concepts import erasure_data
from tiny.train.runs import sample, train, training_data

SLIDER = {"positive": "an old person", "negative": "a young person", "neutral": "a person"}
ERASED = {"erase": "a red car", "target": "a car", "keep": "a bus", "guidance_scale": 1.0}
OPTIONS = {"megapixels": 0.006, "max_graphs": 1, "fit": "ragged edge"}
TRAINED = {"steps": 2, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "gradient_accumulation": 1, "seed": 0}
TRAINED |= {"compile": "off", "save_every": 0, "resume": "latest"}


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("user", "temp"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(folder_paths, f"{name}_directory", str(tmp_path / name))
    return tmp_path


def run(kind, **inputs):
    """Execute a node as the executor does."""
    with torch.inference_mode():
        return kind.PREPARE_CLASS_CLONE(None).execute(**inputs)


def slider(data, clip, **changes):
    texts = {"keep": "", "attributes": "", "guidance_scale": 3.0, **SLIDER, **changes}
    return run(concepts.TesseraSlider, data=data, clip=clip, **texts)


def prepared(folder, vae, clip, brightness=0):
    """Two pictures of different shapes, prepared."""
    folder.mkdir()
    for index, (height, width) in enumerate(((64, 96), (96, 64))):
        pixels = np.random.default_rng(index).integers(0, 200, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels + np.uint8(brightness)).save(folder / f"{index}.png")
        (folder / f"{index}.txt").write_text(f"picture {index}")
    with torch.inference_mode():
        return prepare(scan_images(folder), vae, clip, folder.parent / "cache", **OPTIONS).data


def test_a_slider_puts_its_prompts_in_the_place_of_captions_and_trains(home, tiny_flux, tiny_vae, tiny_clip):
    pictures = prepared(home / "set", tiny_vae, tiny_clip)
    output = slider(pictures, tiny_clip, keep="a dog")
    data = output.args[0]
    assert output.ui["tessera"] == [{"notes": ["Pairs of prompts: 1; prompts that stay: 1."]}]
    read = data.samples[0].load(SampleVariant(caption=0))
    for prompt, text in zip(
        (read, *(target.prompt for target in read.targets)), ("neutral", "neutral", "positive", "negative"), strict=True
    ):
        with torch.inference_mode():
            expected = tiny_clip.encode_from_tokens_scheduled(tiny_clip.tokenize(SLIDER[text]))[0]
        assert torch.equal(prompt.text, expected[0])
        assert torch.equal(prompt.conditioning["pooled_output"], expected[1]["pooled_output"])
    assert torch.equal(read.latent, pictures.samples[0].load().latent)
    assert data.fingerprint != pictures.fingerprint and data.family == "FLUX.1"
    result = train(tiny_flux, data, home / "runs", steps=2)
    with safe_open(result.path, "pt") as file:
        assert SLIDER["positive"] in json.dumps(file.metadata())


def test_a_slider_from_pictures_pairs_two_folders_by_name(home, tiny_flux, tiny_vae, tiny_clip):
    positive = prepared(home / "bright", tiny_vae, tiny_clip, brightness=50)
    negative = prepared(home / "dark", tiny_vae, tiny_clip)
    output = run(concepts.TesseraPictureSlider, positive=positive, negative=negative)
    data = output.args[0]
    assert output.ui["tessera"] == [{"notes": ["2 pairs of pictures."]}]
    for item, up, down in zip(data.samples, positive.samples, negative.samples, strict=True):
        read = item.load()
        assert torch.equal(read.latent, up.load().latent) and torch.equal(read.opposite, down.load().latent)
    assert len(train(tiny_flux, data, home / "runs", steps=2).loss) == 2


def test_an_erasure_trains_on_what_was_prepared(home, tiny_flux, tiny_vae, tiny_clip):
    data = run(concepts.TesseraEraseConcept, data=prepared(home / "set", tiny_vae, tiny_clip), clip=tiny_clip, **ERASED)
    assert len(train(tiny_flux, data.args[0], home / "runs", steps=2).loss) == 2


def test_text_encoders_of_another_model_are_refused_before_they_encode(home, tiny_clip):
    def fail(*_, **__):
        raise AssertionError("the clip encodes")

    tiny_clip.encode_from_tokens = fail
    pictures = training_data(sample("a", 4, 4))
    with pytest.raises(
        ValueError, match="clip is for FLUX.1, but data was prepared for Wan; connect the text encoders"
    ):
        slider(replace(pictures, family="Wan"), tiny_clip)
    with pytest.raises(ValueError, match="data is for an erasure already; connect the data of Prepare Dataset"):
        slider(erasure_data(), tiny_clip)
    regularisation = training_data(replace(sample("a", 4, 4), regularisation=True))
    with pytest.raises(ValueError, match="All pictures are regularisation pictures"):
        slider(regularisation, tiny_clip)
    with pytest.raises(ValueError, match="negative is empty; a slider needs a pair of prompts"):
        slider(pictures, tiny_clip, negative="")


def test_text_of_another_width_is_refused_after_the_prompts(home):
    with pytest.raises(
        ValueError, match="clip gives text of width 32, but data has text of width 64; connect the text"
    ):
        slider(training_data(sample("a", 4, 4)), load_z_image_clip(32))


def test_control_pictures_are_refused_if_the_text_encoder_reads_them(home, tiny_files):
    clip = tiny.load_qwen_clip(tiny_files["qwen"])
    edit = training_data(replace(sample("a", 4, 4), references=(16,)))
    with pytest.raises(
        ValueError, match="data has control pictures .a., which Qwen-Image's text encoders read together"
    ):
        slider(edit, clip)


def test_a_slider_without_pictures_samples_its_own_and_a_wrong_pair_is_refused_at_once(server, tiny_loaders):
    """Core's KSampler makes the latents, as in the workflow Age slider."""
    prompt = tiny_loaders | {
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="a person"),
        "latent": node("EmptySD3LatentImage", width=64, height=64, batch_size=2),
        "sampled": ksampler("model"),
        "data": node("TesseraLatentsToDataset", latents=["sampled", 0], positive=["positive", 0]),
        "slider": node(
            "TesseraSlider",
            data=["data", 0],
            clip=["clip", 0],
            **SLIDER,
            keep="",
            attributes="",
            guidance_scale=3.0,
        ),
        "train": node("TesseraTrainLora", model=["model", 0], data=["slider", 0], output_name="age", **TRAINED),
    }
    entry = server.run(prompt)
    (summary,) = entry["outputs"]["train"]["tessera"]
    assert summary["steps_done"] == 2
    prompt["slider"]["inputs"] |= {"negative": ""}
    with pytest.raises(ServerFailure, match="negative is empty; a slider needs a pair of prompts"):
        server.queue(prompt)
