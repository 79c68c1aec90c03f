"""Captions of FLUX.2, Qwen-Image and Wan against core's own nodes."""

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tessera.data.encode.text import encode_caption
from tessera.models.catalogue.registry import text_policy
from tessera.models.latents import FLUX2, WAN21, WAN22
from tessera.models.text import FIRST_EDIT, PLUS, check_pair
from tiny.data.image_encoders import load_klein_clip, load_mistral_clip, load_seeing_qwen_clip, replaced

PLAIN = ["", "a red fox in the snow", "Caf\u00e9, 1920s - hand-coloured; \u201cquoted\u201d 100%", "two lines\nof text"]


@pytest.fixture(scope="module")
def clips(tiny_files):
    return {
        "klein": load_klein_clip(),
        "mistral": load_mistral_clip(),
        "wan": tiny.load_wan_clip(tiny_files["umt5"]),
        "qwen": load_seeing_qwen_clip(tiny_files["qwen"]),
    }


every_clip = pytest.mark.parametrize("name", ["klein", "mistral", "wan", "qwen"])


def test_a_tokenizer_that_newer_releases_hand_on_as_it_is_gives_the_same_tokens(clips):
    """As ComfyUI 0.33 has the class: what `load_mistral_tokenizer` gives is the tokenizer itself."""
    import comfy.text_encoders.flux as flux

    class HandedOn:
        @staticmethod
        def from_pretrained(path, tokenizer_object=None, **kwargs):
            return tokenizer_object

    with replaced(flux, "MistralTokenizerClass", HandedOn):
        newer = load_mistral_clip()
    for caption in PLAIN:
        assert newer.tokenize(caption) == clips["mistral"].tokenize(caption)


def core_node(clip, text):
    """Conditioning that core's CLIP Text Encode gives."""
    import nodes

    with torch.inference_mode():
        (((cond, extra),),) = nodes.CLIPTextEncode().encode(clip, text)
    return cond, {name: value for name, value in extra.items() if value is not None}


def ids(caption):
    (((pairs,)),) = caption.tokens.values()
    return [token for token, _ in pairs]


def part(clip):
    return getattr(clip.tokenizer, clip.tokenizer.clip)


@every_clip
@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
def test_a_plain_caption_is_encoded_bit_for_bit_as_core_encodes_it(clips, name, text):
    clip, policy = clips[name], text_policy(clips[name])
    caption = policy.tokenize(clip, text)
    assert caption.tokens == clip.tokenize(text) and caption.dropped == 0
    encoded = encode_caption(clip, caption, policy)
    cond, extra = core_node(clip, text)
    assert torch.equal(encoded.pop("cond"), cond)
    assert encoded.keys() == extra.keys() == policy.outputs(caption.length).keys() - {"cond"}
    assert all(torch.equal(encoded[key], extra[key]) for key in extra)
    assert caption.length in (None, cond.shape[1])


@every_clip
@pytest.mark.parametrize("text", ["a (red:1.4) fox", "((fox)) (", r"fox \(animal\)", "<|im_start|>user\nfox"])
def test_brackets_and_templates_are_text_and_weigh_nothing(clips, name, text):
    clip = clips[name]
    caption = text_policy(clip).tokenize(clip, text)
    (((pairs,)),) = caption.tokens.values()
    assert {weight for _, weight in pairs} == {1.0}
    template = "{}" if name == "wan" else clip.tokenizer.llama_template
    tokenizer = part(clip)
    # The tokenizer inside, which knows of no weights.
    literal = tokenizer.tokenizer(template.format(text))["input_ids"]
    tokens = ids(caption)
    start = tokens.index(literal[0])
    assert tokens[start : start + len(literal)] == literal


@every_clip
def test_embeddings_named_in_a_caption_read_no_file(clips, name, tmp_path):
    clip = clips[name]
    save_file({"x": torch.randn(2, part(clip).embedding_size)}, tmp_path / "bad.safetensors")
    part(clip).embedding_directory = str(tmp_path)
    text = "a hand embedding:bad on a table"
    if name == "qwen":
        with pytest.raises(RuntimeError, match="Tensor with more than one value"):  # core reads it, and fails
            clip.tokenize(text)
    else:
        assert any(torch.is_tensor(token) for token, _ in next(iter(clip.tokenize(text).values()))[0])
    caption = text_policy(clip).tokenize(clip, text)
    assert all(isinstance(token, int) for token in ids(caption))
    assert part(clip).embedding_directory == str(tmp_path) and part(clip).embedding_identifier == "embedding:"
    part(clip).embedding_directory = None


def test_wan_captions_have_512_tokens_at_least_zero_past_the_text_and_are_cut_at_a_max_length(clips):
    clip, policy = clips["wan"], text_policy(clips["wan"])
    for text in ("", "a fox", "x" * 511, "x" * 900):
        bare = len([token for token in next(iter(clip.tokenize(text).values()))[0] if token[0] != 0])
        for max_length, length in ((512, 512), (None, max(512, bare))):
            caption = policy.tokenize(clip, text, max_length)
            encoded = encode_caption(clip, caption, policy)["cond"]
            assert encoded.shape[1] == caption.length == length
            assert caption.dropped == max(0, bare - length)
            assert torch.equal(encoded[0].abs().sum(dim=-1) > 0, torch.arange(length) < bare)
    full = [token for token, _ in next(iter(clip.tokenize("x" * 900).values()))[0]]
    assert ids(policy.tokenize(clip, "x" * 900, 512)) == [*full[:511], full[-1]] and full[-1] == 1
    assert policy.model_length(512) == 512


@pytest.mark.parametrize("name", ["klein", "mistral"])
def test_flux2_captions_above_a_max_length_keep_their_start_and_the_end_of_the_template(clips, name):
    clip, policy = clips[name], text_policy(clips[name])
    text = "number " * 600
    full = [token for token, _ in next(iter(clip.tokenize(text).values()))[0]]
    whole = policy.tokenize(clip, text)
    assert ids(whole) == full and whole.length == len(full) and whole.dropped == 0
    caption = policy.tokenize(clip, text, 512)
    end = part(clip).tokenizer(clip.tokenizer.llama_template.split("{}")[1])["input_ids"]
    assert len(ids(caption)) == caption.length == 512 and caption.dropped == len(full) - 512
    assert ids(caption) == full[: 512 - len(end)] + end and full[-len(end) :] == end
    assert policy.model_length(182) == 512 and policy.latents == (FLUX2,)
    exact = policy.tokenize(clip, "a fox")
    assert exact.length == (512 if name == "klein" else len(ids(exact)))


def test_qwen_captions_are_as_long_as_they_are_and_take_a_few_lengths_in_the_model(clips):
    clip, policy = clips["qwen"], text_policy(clips["qwen"])
    lengths = set()
    for words in (1, 20, 150, 400):
        cond = encode_caption(clip, policy.tokenize(clip, "fox " * words), policy)["cond"]
        assert policy.model_length(cond.shape[1]) >= cond.shape[1]
        lengths.add(policy.model_length(cond.shape[1]))
    assert lengths == {128, 256, 512}


def picture(height, width, seed):
    return torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_edit_caption_is_encoded_as_core_text_encode_qwen_image_edit_plus_does(clips, count):
    from comfy_extras.nodes_qwen import TextEncodeQwenImageEditPlus

    clip, policy = clips["qwen"], text_policy(clips["qwen"])
    pictures = [picture(64, 96, 1), picture(120, 80, 2), picture(64, 64, 3)][:count]
    with torch.inference_mode():
        images = {f"image{index + 1}": control for index, control in enumerate(pictures)}
        (((cond, extra),),) = TextEncodeQwenImageEditPlus.execute(clip, "make it red", **images).result
        resized = [policy.resize_control(control, PLUS) for control in pictures]
    caption = policy.tokenize_edit(clip, "make it red", count, PLUS, resized)
    assert torch.equal(encode_caption(clip, caption, policy)["cond"], cond)
    assert extra == {"pooled_output": None}
    bare = policy.tokenize_edit(clip, "make it red", count, PLUS)
    assert sum(token == 151655 for token in ids(bare)) == count and all(isinstance(token, int) for token in ids(bare))


def test_the_first_edit_models_caption_is_encoded_as_core_text_encode_qwen_image_edit_does(clips, monkeypatch):
    from comfy_extras import nodes_qwen
    from tessera.models.qwen_image import text

    clip, policy = clips["qwen"], text_policy(clips["qwen"])
    # A megapixel takes a minute to look at on a CPU: both sides take the area from 1024 * 1024 divided by 64.
    monkeypatch.setattr(nodes_qwen, "int", lambda value: int(value) // 64, raising=False)
    monkeypatch.setitem(text.SEEN_AREA, text.FIRST_EDIT, 1024 * 1024 // 64)
    control = picture(64, 96, 1)
    with torch.inference_mode():
        (((cond, _),),) = nodes_qwen.TextEncodeQwenImageEdit.execute(clip, "make (it) red", image=control).result
        caption = policy.tokenize_edit(
            clip, "make (it) red", 1, FIRST_EDIT, [policy.resize_control(control, FIRST_EDIT)]
        )
    assert torch.equal(encode_caption(clip, caption, policy)["cond"], cond)


def test_a_caption_that_holds_the_pad_token_is_told_by_its_text(clips):
    clip, policy = clips["qwen"], text_policy(clips["qwen"])
    assert policy.stop_text(clip, "a fox <|endoftext|> in the snow") == "<|endoftext|>"
    assert policy.stop_text(clip, "a fox in the snow") is None


def test_text_encoders_and_vae_have_to_be_of_one_family(clips):
    check_pair(text_policy(clips["wan"]), WAN22)
    check_pair(text_policy(clips["qwen"]), WAN21)
    with pytest.raises(
        ValueError,
        match=r"The text encoders are for Wan, but the VAE is for FLUX.2; load the VAE of Wan 2.1 and "
        r"Qwen-Image or Wan 2.2 5B, or the text encoders that go with this VAE",
    ):
        check_pair(text_policy(clips["wan"]), FLUX2)


def test_encoders_of_other_models_that_are_built_on_these_are_not_taken_for_them(clips):
    from comfy.text_encoders import hunyuan_image, z_image

    for kind in (hunyuan_image.HunyuanImageTEModel, z_image.ZImageTEModel):
        other = kind.__new__(kind)
        with pytest.raises(
            ValueError, match=r"text encoders without a ComfyUI tokenizer; load your model's text encoders"
        ):
            text_policy(type("Clip", (), {"cond_stage_model": other}))
