"""Data that a Wan model does not train on ends in one sentence; models that are more than Wan are other families."""

import pytest
import tiny
import torch
from tessera.models.catalogue.registry import family_of
from tessera.models.family import SampleFacts
from tessera.models.model_patches import trainable_model
from tiny.train.runs import Watcher, train, training_data
from torch import nn

START = frozenset({"concat_latent_image", "concat_mask"})
SEEN = START | {"clip_vision_output"}


@pytest.fixture
def wan(tmp_path):
    def load(variant):
        return tiny.load_wan(tiny.write_wan(tmp_path / f"{variant}.safetensors", variant=variant, layers=1))

    return load


def facts(conditioning=frozenset(), frames=2, clean_frames=0, references=()):
    return SampleFacts("fox.mp4", frames, references, clean_frames, conditioning | {"pooled_output"})


@pytest.mark.parametrize(
    ("variant", "sample"),
    [
        ("2.1-t2v", facts()),
        ("2.1-t2v", facts(frames=1)),
        ("2.1-t2v", facts(frozenset({"clip_vision_output"}))),
        ("2.1-i2v", facts(SEEN)),
        ("2.2-i2v-14b", facts(START)),
        ("2.2-i2v-14b", facts(SEEN)),
        ("2.2-5b", facts()),
        ("2.2-5b", facts(clean_frames=1)),
    ],
)
def test_inputs_that_a_model_is_made_for_pass(wan, variant, sample):
    model = wan(variant)
    family_of(model).check(model.model, sample)


@pytest.mark.parametrize(
    ("variant", "sample", "sentence"),
    [
        ("2.1-t2v", facts(START), "fox.mp4 has a start picture, which Wan T2V has no input for; prepare the data with"),
        ("2.2-5b", facts(START), "fox.mp4 has a start picture, which Wan 2.2 5B has no input for"),
        ("2.1-t2v", facts(clean_frames=1), "fox.mp4 gives its first frame without noise, which only Wan 2.2 5B"),
        ("2.1-i2v", facts(SEEN, clean_frames=1), "fox.mp4 gives its first frame without noise"),
        ("2.1-i2v", facts(), "fox.mp4 has no start picture .*; switch image_to_video on in Prepare Dataset"),
        ("2.2-i2v-14b", facts(), "fox.mp4 has no start picture .*; switch image_to_video on in Prepare Dataset"),
        ("2.1-i2v", facts(START), "fox.mp4 has no CLIP vision output.*; connect clip_vision to Prepare Dataset"),
        ("2.1-t2v", facts(references=(4,)), "fox.mp4 has reference pictures, which Wan T2V does not take"),
        ("2.2-5b", facts(frozenset({"reference_latents"})), "fox.mp4 has reference pictures"),
    ],
)
def test_inputs_that_a_model_is_not_made_for_are_one_sentence(wan, variant, sample, sentence):
    model = wan(variant)
    with pytest.raises(ValueError, match=f"^{sentence}") as refused:
        family_of(model).check(model.model, sample)
    assert "\n" not in str(refused.value)


def test_the_refusal_comes_before_anything_is_loaded(wan, tmp_path):
    watcher = Watcher()
    data = training_data(tiny.wan_sample("fox", (2, 2, 2), "2.1-t2v"))
    with pytest.raises(ValueError, match="fox has no start picture"):
        train(wan("2.2-i2v-14b"), data, tmp_path / "runs", watcher)
    assert "Loading the model" not in watcher.phases and not (tmp_path / "runs").exists()


def test_clip_vision_that_a_model_does_not_see_is_noted(wan):
    def notes(variant, *samples):
        model = wan(variant)
        return family_of(model).notes(model.model, samples)

    (note,) = notes("2.2-i2v-14b", facts(START), facts(SEEN))
    assert note.startswith("Wan 2.2 I2V 14B takes no CLIP vision output, and what the samples have is left out;")
    assert notes("2.2-i2v-14b", facts(START)) == notes("2.1-i2v", facts(SEEN)) == []


def test_output_of_another_clip_vision_model_is_said_before_anything_is_loaded(wan, tmp_path):
    watcher, sample = Watcher(), tiny.wan_sample("fox", (2, 2, 2), "2.1-i2v")
    sample.load().conditioning["clip_vision_output"].penultimate_hidden_states = torch.zeros(1, 257, 1024)
    with pytest.raises(ValueError, match="CLIP vision output of width 1024 but the model takes 1280; prepare the data"):
        train(wan("2.1-i2v"), training_data(sample), tmp_path / "runs", watcher)
    assert "Loading the model" not in watcher.phases and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("change", ["ref_conv", "channels", "no qk_norm", "another class"])
def test_models_that_take_more_are_no_wan(wan, change):
    model = wan("2.1-t2v")
    core = model.model.diffusion_model
    if change == "ref_conv":
        core.ref_conv = nn.Conv2d(16, core.dim, 2)
    elif change == "channels":
        core.in_dim = 48  # Fun-Control
    elif change == "no qk_norm":
        core.qk_norm = False
    else:
        model.model.__class__ = type("WAN21_Vace", (type(model.model),), {})
    assert family_of(model).name.startswith("native-wan21")


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"time_dim_concat": torch.zeros(1, 16, 1, 4, 4)}, "carries time_dim_concat, which Wan training does not take"),
        ({"context_latents": [torch.zeros(1, 16, 1, 4, 4)]}, "carries context_latents, which LoRA training of this"),
    ],
)
def test_conditioning_that_this_forward_does_not_run_is_named(wan, extra, sentence):
    patcher, _ = trainable_model(wan("2.1-t2v"))
    sample = tiny.wan_sample("fox", (1, 2, 2))
    with pytest.raises(ValueError, match=sentence):
        inputs(patcher, sample, extra)


def test_a_start_picture_of_another_length_is_one_sentence(wan):
    patcher, _ = trainable_model(wan("2.2-i2v-14b"))
    sample, longer = (tiny.wan_sample("fox", (n, 2, 2), "2.2-i2v-14b") for n in (2, 3))
    extra = {name: longer.load().conditioning[name] for name in START}
    with pytest.raises(ValueError, match="concat_latent_image has 3 latent frames and its clip 2; give the node"):
        inputs(patcher, sample, extra)


def inputs(patcher, sample, extra):
    from tessera.models.family import NoisySample

    read = sample.load()
    noisy = NoisySample(read.latent, read.text, {**read.conditioning, **extra}, sample.tokens, sample.text_length)
    return family_of(patcher).forward.inputs(patcher, [noisy], torch.tensor([0.5]), 1.0)
