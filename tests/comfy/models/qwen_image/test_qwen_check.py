"""What Qwen-Image does not train on ends in one sentence, and what a caption's mask leaves out is left out."""

import pytest
import tiny
import torch
from tessera.memory.weights.frozen import unload
from tessera.models.catalogue.registry import family_of
from tessera.models.family import NoisySample, SampleFacts
from tessera.models.qwen_image.family import QwenImage
from tessera.train.train_lora import RunRequest, train_lora
from tiny.models.qwen_image import qwen_sample
from tiny.train.runs import Watcher, run_settings, training_data

FAMILY = QwenImage()


@pytest.fixture
def model(tiny_files):
    return tiny.load_qwen_image(tiny_files["qwen_image"])


def facts(frames: int = 1, references: tuple[int, ...] = ()) -> SampleFacts:
    return SampleFacts("fox.mp4", frames, references, 0, frozenset())


def test_qwen_image_is_found_by_its_class_and_mage_flow_is_not_taken_for_it(model, tiny_files):
    import comfy.model_base

    assert family_of(model).name == "qwen-image"
    assert not FAMILY.matches(object.__new__(comfy.model_base.MageFlow))
    assert not FAMILY.matches(tiny.load_wan(tiny_files["wan"]).model)


def test_a_clip_is_refused(model):
    with pytest.raises(ValueError, match="fox.mp4 is a clip of 3 frames; Qwen-Image trains on pictures."):
        FAMILY.check(model.model, facts(frames=3))
    FAMILY.check(model.model, facts(references=(24, 12)))


def test_the_layered_model_is_refused(tmp_path):
    layered = tiny.load_qwen_image(tiny.write_qwen_image(tmp_path / "layered.safetensors", layered=True))
    settings = run_settings(steps=1)
    with pytest.raises(ValueError, match="model is Qwen-Image-Layered, which Train LoRA cannot train"):
        train_lora(RunRequest(layered, training_data(qwen_sample("one", 2, 2)), settings, tmp_path, Watcher(), None))


def test_an_edit_2511_without_reference_pictures_is_noted(model, tmp_path):
    edit = tiny.load_qwen_image(tiny.write_qwen_image(tmp_path / "2511.safetensors", timestep_zero=True)).model
    with_one = facts(references=(24,))
    (note,) = FAMILY.notes(edit, [facts(), with_one])
    assert note.startswith("1 of 2 samples has no reference picture")
    assert FAMILY.notes(edit, [with_one]) == FAMILY.notes(model.model, [facts()]) == []


def inputs(model, mask, length=6):
    read = qwen_sample("masked", 4, 6, length).load()
    conditioning = {} if mask is None else {"attention_mask": mask}
    noisy = NoisySample(read.latent, read.text, conditioning, 24, 128)
    return FAMILY.forward.inputs(model, [noisy], torch.tensor([0.5]), 1.0)


LOWEST = torch.finfo(torch.float32).min
TAILS = {
    "ones and zeros": torch.tensor([[1, 1, 1, 1, 0, 0]]),
    "true and false": torch.tensor([[True, True, True, True, False, False]]),
    "added to scores": torch.tensor([[0.0, 0.0, 0.0, 0.0, LOWEST, -torch.inf]]),
}
OTHERS = {
    "start": torch.tensor([[0, 1, 1, 1, 1, 1]]),
    "middle": torch.tensor([[1, 1, 0, 1, 1, 1]]),
    "nothing left": torch.zeros(1, 6, dtype=torch.int64),
    "of another length": torch.ones(1, 5, dtype=torch.int64),
    "weights": torch.tensor([[0.0, 0.0, 0.0, 0.0, -1.0, -1.0]]),
}


@pytest.mark.parametrize("mask", TAILS.values(), ids=TAILS)
def test_a_mask_of_the_end_is_the_length_of_the_caption(model, mask):
    masked, whole = inputs(model, mask), inputs(model, None)
    assert masked.lengths.tolist() == [24 + 4] and whole.lengths.tolist() == [24 + 6]
    assert torch.equal(masked.text[:, :4], whole.text[:, :4]) and not masked.text[:, 4:].any()
    assert torch.equal(masked.positions, whole.positions)


def test_a_mask_of_ones_changes_nothing(model):
    assert inputs(model, torch.ones(1, 6, dtype=torch.int64)).lengths.tolist() == [24 + 6]


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_any_other_mask_is_refused(model, mask):
    with pytest.raises(ValueError, match="positive carries an attention mask that does more than leave out the end"):
        inputs(model, mask)


def test_a_masked_caption_gives_what_core_gives_with_the_mask(model):
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    read, mask = qwen_sample("masked", 4, 6, 6).load(), TAILS["ones and zeros"]
    x, sigma = read.latent[None], torch.tensor([0.5])
    with torch.no_grad():
        denoised = model.model.apply_model(x, sigma, c_crossattn=read.text, attention_mask=mask)
    expected = FAMILY.forward.patchify(((x - denoised) / sigma)[0], 24).tokens
    unload()
    transformer = FAMILY.forward.build(model, model.load_device, torch.float32, "auto")
    with torch.no_grad():
        actual = transformer.forward(lambda block, *rest: block(*rest, {}), inputs(model, mask))[0]
        unmasked = transformer.forward(lambda block, *rest: block(*rest, {}), inputs(model, None))[0]
    assert torch.allclose(actual, expected, rtol=1e-4, atol=2e-5)
    assert not torch.allclose(unmasked, expected, rtol=1e-2, atol=1e-2)


def test_metadata_of_files_are_those_that_musubi_tuner_writes(model, tmp_path):
    origin = FAMILY.origin(model.model)
    assert (origin.architecture, origin.kohya_version) == ("Qwen-Image", "qwen_image")
    assert origin.kohya_module == "networks.lora_qwen_image"
    edit = tiny.load_qwen_image(tiny.write_qwen_image(tmp_path / "2511.safetensors", timestep_zero=True)).model
    assert FAMILY.origin(edit).architecture == "Qwen-Image-Edit-2511"
    assert FAMILY.origin(edit).kohya_version == "qwen_image_edit"
    assert FAMILY.sampling.shift(model.model, 4096) == 2.2
