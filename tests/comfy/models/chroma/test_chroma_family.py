"""What Chroma does not take is refused in a sentence, its guidance is 0 unless given, its captions are ComfyUI's."""

import comfy.model_base
import nodes
import pytest
import tiny
import torch
from comfy_extras.nodes_cond import T5TokenizerOptions
from tessera.data.encode.text import encode_caption
from tessera.models.catalogue.registry import family_of, text_policy
from tessera.models.chroma.family import Chroma
from tessera.models.family import NoisySample, SampleFacts
from tessera.models.latents import FLUX, WAN21
from tessera.models.text import check_pair
from tiny.data.encoders import load_chroma_clip
from tiny.models.chroma import chroma_sample, load_chroma, write_chroma

FAMILY = Chroma()
PLAIN = ["", "a red fox in the snow", "Caf\u00e9, 1920s - hand-coloured; \u201cquoted\u201d 100%", "two lines\nof text"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chroma")


@pytest.fixture(scope="module")
def model(folder):
    return load_chroma(write_chroma(folder / "chroma.safetensors"))


@pytest.fixture(scope="module")
def clip(tiny_files):
    return load_chroma_clip(tiny_files["t5"])


def facts(frames: int = 1, references: tuple[int, ...] = (), text_length: int = 0) -> SampleFacts:
    return SampleFacts("fox.png", frames, references, 0, frozenset(), text_length)


def test_chroma_is_found_by_its_class(model, tiny_flux):
    assert family_of(model).name == "chroma" and type(model.model) is comfy.model_base.Chroma
    assert family_of(tiny_flux).name == "flux" and not FAMILY.matches(tiny_flux.model)


def test_radiance_trains_on_comfyui_s_forward(folder):
    radiance = load_chroma(write_chroma(folder / "radiance.safetensors", radiance=True))
    assert isinstance(radiance.model, comfy.model_base.ChromaRadiance)
    assert family_of(radiance).name == "chroma-radiance" and not FAMILY.matches(radiance.model)


def test_clips_and_reference_pictures_are_refused(model):
    with pytest.raises(ValueError, match="fox.png is a clip of 3 frames; Chroma trains on pictures."):
        FAMILY.check(model.model, facts(frames=3))
    with pytest.raises(ValueError, match="fox.png has reference pictures, which Chroma can't use; prepare"):
        FAMILY.check(model.model, facts(references=(24,)))
    FAMILY.check(model.model, facts())


def test_captions_of_more_than_512_tokens_are_told(model):
    assert FAMILY.notes(model.model, [facts(text_length=512)]) == []
    (note,) = FAMILY.notes(model.model, [facts(text_length=512), facts(text_length=513)])
    assert note.startswith("1 caption has more than 512 tokens")


def inputs(model, *conditionings):
    read = chroma_sample("one", 4, 6, 9).load()
    samples = [NoisySample(read.latent, read.text, c, 24, 128) for c in conditionings]
    return FAMILY.forward.inputs(model, samples, torch.full((len(samples),), 0.5), 1.0)


def test_guidance_is_0_unless_the_conditioning_gives_it(model):
    assert not FAMILY.conditioning.takes_guidance(model.model)
    batch = inputs(model, {}, {"guidance": None}, {"guidance": 3.5}, {"guidance": torch.tensor([1.0])})
    assert batch.guidance.tolist() == [0.0, 0.0, 3.5, 1.0]


def test_pooled_text_is_left_out_and_a_mask_is_refused(model):
    pooled = inputs(model, {"pooled_output": torch.randn(1, 32)})
    assert torch.equal(pooled.text, inputs(model, {"pooled_output": None}).text) and not hasattr(pooled, "pooled")
    mask = {"attention_mask": torch.ones(1, 9 + 24), "attention_mask_img_shape": (4, 6)}
    with pytest.raises(ValueError, match="positive carries an attention mask, which Chroma training does not take"):
        inputs(model, mask)
    with pytest.raises(ValueError, match="positive carries ref_latents"):
        inputs(model, {"reference_latents": [torch.randn(1, 16, 4, 4)]})


def test_a_caption_takes_the_ladders_length_and_its_pads_are_counted_out(model):
    lengths = [1, 9, 128]
    reads = [chroma_sample(f"{n}", 4, 6, n).load() for n in lengths]
    samples = [NoisySample(r.latent, r.text, r.conditioning, 24, 128) for r in reads]
    batch = FAMILY.forward.inputs(model, samples, torch.full((3,), 0.5), 1.0)
    assert batch.text.shape[:2] == (3, 128) and batch.lengths.tolist() == [24 + n for n in lengths]
    assert [FAMILY.conditioning.text_length(model.model, n) for n in (1, 128, 129, 513)] == [128, 128, 256, 768]


def core_node(clip, text):
    """Conditioning that core's CLIP Text Encode gives."""
    with torch.inference_mode():
        (((cond, extra),),) = nodes.CLIPTextEncode().encode(clip, text)
    return cond, {name: value for name, value in extra.items() if value is not None}


@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
@pytest.mark.parametrize("padding", [(0, 0), (1, 0), (0, 40)], ids=str)
def test_a_plain_caption_is_encoded_bit_for_bit_as_core_encodes_it(clip, text, padding):
    """With the pads that T5TokenizerOptions asks for, and unpadded without."""
    clip = T5TokenizerOptions.execute(clip, *padding).args[0] if any(padding) else clip
    policy = text_policy(clip)
    caption = policy.tokenize(clip, text)
    assert policy.family == "Chroma" and caption.tokens == clip.tokenize(text) and caption.dropped == 0
    encoded = encode_caption(clip, caption, policy)
    cond, extra = core_node(clip, text)
    assert extra == {} and encoded.keys() == {"cond"} and torch.equal(encoded["cond"], cond)
    assert caption.length == cond.shape[1] >= padding[1]
    assert policy.model_length(caption.length) == 128


@pytest.mark.parametrize("text", ["a (red:1.4) fox", "((fox)) (", r"fox \(animal\)", "a hand embedding:bad"])
def test_brackets_are_text_and_weigh_nothing(clip, text):
    caption = text_policy(clip).tokenize(clip, text)
    ((pairs,),) = caption.tokens.values()
    assert {weight for _, weight in pairs} == {1.0}
    part = getattr(clip.tokenizer, clip.tokenizer.clip)
    assert [token for token, _ in pairs] == part.tokenizer(text)["input_ids"]


def test_chroma_goes_with_flux1s_vae_alone(clip):
    check_pair(text_policy(clip), FLUX)
    with pytest.raises(ValueError, match="The text encoders are for Chroma, but the VAE is for Wan"):
        check_pair(text_policy(clip), WAN21)


def test_another_t5_is_not_taken_for_its_own(tiny_files):
    assert text_policy(tiny.load_clip(tiny_files["clip_l"], tiny_files["t5"])).family == "FLUX.1"
