"""Long captions are encoded as ComfyUI's CLIP Text Encode does, unless max_text_length cuts them."""

import pytest
import tiny
import torch
from PIL import Image
from tessera.data.folders.dataset import scan_images
from tessera.data.preparation.checks import text_limit
from tessera.data.preparation.prepare import PrepareOptions, prepare
from tessera.models.flux.text import Flux1Text, Flux2Text
from tessera.models.text import inner_tokenizer
from tessera.models.wan.text import WanText
from tiny.data.image_encoders import load_flux2_vae, load_klein_clip

OPTIONS = {"megapixels": 0.01, "max_graphs": 1, "fit": "ragged edge"}


def encoders(family, files):
    if family == "FLUX.1":
        return tiny.load_clip(files["clip_l"], files["t5"]), tiny.load_vae(files["vae"])
    if family == "FLUX.2":
        return load_klein_clip(), load_flux2_vae()
    return tiny.load_wan_clip(files["umt5"]), tiny.load_vae(files["wan_vae"])


def prepared_data(folder, captions, clip, vae, **options):
    """Prepare one picture for each caption."""
    for name, caption in captions.items():
        Image.new("RGB", (64, 64)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(caption)
    return prepare(scan_images(folder), vae, clip, PrepareOptions(**OPTIONS, **options), folder.parent / "cache")


# The lengths of captions in the model.
LADDER = {
    "FLUX.1": (256, 384, 504, 768, 1024, 1536, 2048, 3072),
    "FLUX.2": (512, 768, 1024, 1536, 2048, 3072),
    "Wan": (512, 768, 1024, 1536, 2048, 3072),
}


@pytest.mark.parametrize("family", LADDER)
def test_captions_of_any_length_are_what_comfyui_makes_of_them(family, tiny_files, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    clip, vae = encoders(family, tiny_files)
    captions = {"a": "a fox", "b": "a fox" + " a fox" * 80, "c": "a fox" + " a fox" * 400}
    prepared = prepared_data(folder, captions, clip, vae)
    lengths = []
    for sample, caption in zip(prepared.data.samples, captions.values(), strict=True):
        tensors = sample.load()
        ((cond, extra),) = clip.encode_from_tokens_scheduled(clip.tokenize(caption))
        assert torch.equal(tensors.text, cond), (sample.name, tensors.text.shape, cond.shape)
        if family == "FLUX.1":
            assert torch.equal(tensors.conditioning["pooled_output"], extra["pooled_output"])
        lengths.append(cond.shape[1])
        assert sample.text_length == next(step for step in LADDER[family] if step >= lengths[-1])
    assert lengths[-1] > 512 and sorted(lengths) == lengths
    assert not any("cut" in note for note in prepared.notes)


def test_options_of_the_tokenizer_count_as_they_do_for_sampling(tiny_files, tmp_path):
    """ComfyUI's T5TokenizerOptions sets the least length of T5."""
    folder = tmp_path / "photos"
    folder.mkdir()
    clip, vae = encoders("FLUX.1", tiny_files)
    clip = clip.clone()
    clip.set_tokenizer_option("t5xxl_min_length", 320)
    (sample,) = prepared_data(folder, {"a": "a fox"}, clip, vae).data.samples
    ((cond, _),) = clip.encode_from_tokens_scheduled(clip.tokenize("a fox"))
    assert cond.shape[1] == 320 and torch.equal(sample.load().text, cond) and sample.text_length == 384


@pytest.mark.parametrize("family", LADDER)
def test_max_text_length_cuts_captions_and_names_them(family, tiny_files, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    clip, vae = encoders(family, tiny_files)
    prepared = prepared_data(folder, {"a": "a fox" + " a fox" * 400}, clip, vae, max_text_length=512)
    (sample,) = prepared.data.samples
    assert sample.load().text.shape[1] == sample.text_length == 512
    (note,) = [note for note in prepared.notes if "cut off" in note]
    assert note.startswith("These captions are longer than 512 tokens, so their end is cut off: a.png (")


def test_variants_of_flux1_share_a_length_that_has_a_mask():
    text = Flux1Text()
    variants = {(256,): 256, (256, 256): 256, (256, 300): 384, (256, 512): 768, (512,): 512, (600,): 768}
    assert {lengths: text.shared_length(lengths) for lengths in variants} == variants
    assert [length for length in (7, 256, 384, 504, 512, 768) if text.masks(length)] == [384, 504, 768]
    assert all(text.model_length(text.model_length(length)) == text.model_length(length) for length in range(1, 1100))


def test_lengths_of_flux2_and_wan_are_at_least_those_of_their_training():
    for text in (Flux2Text(), WanText()):
        assert [text.model_length(length) for length in (7, 512, 513, 800, 4097)] == [512, 512, 768, 1024, 5120]
        assert text_limit(text, 256) == text_limit(text, 512) == 512 and text_limit(text, None) is None
    assert (text_limit(Flux1Text(), 256), text_limit(Flux1Text(), 512)) == (256, 512)


def test_a_caption_of_flux2_is_cut_before_the_end_of_its_template():
    clip, caption = load_klein_clip(), "a fox" + " a fox" * 400
    text = Flux2Text()
    whole, cut = (
        [pair[0] for pair in text.tokenize(clip, caption, length).tokens["qwen3_4b"][0]] for length in (None, 512)
    )
    end = len(inner_tokenizer(clip.tokenizer).tokenizer(clip.tokenizer.llama_template.split("{}")[1])["input_ids"])
    assert end > 1 and len(cut) == 512 < len(whole)
    assert cut[-end:] == whole[-end:] and cut[:-end] == whole[: 512 - end]
