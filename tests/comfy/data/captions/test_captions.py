"""Captions against core's own tokenizer and encoder."""

import pytest
import torch
from safetensors.torch import save_file
from tessera.data.encode.text import encode_caption
from tessera.models.catalogue.registry import text_policy

PLAIN = [
    "",
    "a red fox in the snow",
    "Caf\u00e9, 1920s - hand-coloured; \u201cquoted\u201d 100%",
    "two lines\nof text",
    "fox " * 90,  # CLIP-L takes a second chunk
    "supercalifragilisticexpialidocious " * 12,
]


def core(clip, text, length=256):
    return clip.tokenize(text, tokenizer_options={"t5xxl_min_length": length})


def t5_ids(caption):
    return [token for token, _ in caption.tokens["t5xxl"][0]]


@pytest.mark.parametrize("text", PLAIN, ids=range(len(PLAIN)))
def test_a_plain_caption_is_encoded_bit_for_bit_as_core_encodes_it(tiny_clip, text):
    caption = text_policy(tiny_clip).tokenize(tiny_clip, text)
    assert caption.tokens == tiny_clip.tokenize(text)
    encoded = encode_caption(tiny_clip, caption, text_policy(tiny_clip))
    ((cond, extra),) = tiny_clip.encode_from_tokens_scheduled(tiny_clip.tokenize(text))
    assert torch.equal(encoded["cond"], cond) and encoded["cond"].shape[1] == caption.length
    assert torch.equal(encoded["pooled_output"], extra["pooled_output"])


def test_lengths_are_256_and_512_and_only_t5_is_padded_to_them(tiny_clip):
    policy = text_policy(tiny_clip)
    assert policy.lengths == (256, 512)
    lengths = {}
    for words in (1, 100, 250, 254, 255, 256, 300, 510, 511, 512, 900):
        text = "tree " * words
        bare = len(core(tiny_clip, text, 0)["t5xxl"][0])
        assert bare == words + 1  # one token for each word and the end token
        caption = policy.tokenize(tiny_clip, text.strip(), 512)
        assert policy.tokenize(tiny_clip, text.strip()).length == max(256, bare)
        assert len(caption.tokens["t5xxl"]) == 1 and len(t5_ids(caption)) == caption.length
        assert all(len(chunk) == 77 for chunk in caption.tokens["l"])
        lengths[words] = (caption.length, caption.dropped)
    assert lengths == {
        1: (256, 0), 100: (256, 0), 250: (256, 0), 254: (256, 0), 255: (256, 0), 256: (512, 0), 300: (512, 0),
        510: (512, 0), 511: (512, 0), 512: (512, 1), 900: (512, 389),
    }  # fmt: skip


def test_at_512_a_caption_equals_core_with_that_length_set(tiny_clip):
    text = " ".join(["a house by the lake"] * 60)
    caption = text_policy(tiny_clip).tokenize(tiny_clip, text, 512)
    assert caption.length == 512 and caption.tokens == core(tiny_clip, text, 512)
    ((cond, _),) = tiny_clip.encode_from_tokens_scheduled(core(tiny_clip, text, 512))
    assert torch.equal(encode_caption(tiny_clip, caption, text_policy(tiny_clip))["cond"], cond)


def test_a_caption_beyond_the_longest_length_keeps_its_start_and_its_end_token(tiny_clip):
    text = " ".join(f"number {i}" for i in range(300))
    full = [token for token, _ in core(tiny_clip, text, 0)["t5xxl"][0]]
    for longest in (256, 512):
        caption = text_policy(tiny_clip).tokenize(tiny_clip, text, longest)
        assert t5_ids(caption) == [*full[: longest - 1], full[-1]] and full[-1] == 1
        assert (caption.length, caption.dropped) == (longest, len(full) - longest)
        assert encode_caption(tiny_clip, caption, text_policy(tiny_clip))["cond"].shape[1] == longest


@pytest.mark.parametrize(
    "text", ["a (red) fox", "a (red:1.4) fox", "((fox)) (", ")fox(", r"fox \(animal\)", "a (red (very:2) bright) fox"]
)
def test_brackets_are_text_and_weigh_nothing(tiny_clip, text):
    caption = text_policy(tiny_clip).tokenize(tiny_clip, text)
    for part, tokenizer in (("l", tiny_clip.tokenizer.clip_l), ("t5xxl", tiny_clip.tokenizer.t5xxl)):
        pairs = [pair for chunk in caption.tokens[part] for pair in chunk]
        assert {weight for _, weight in pairs} == {1.0}
        literal = tokenizer.tokenizer(text)["input_ids"]  # Hugging Face's tokenizer knows of no weights
        assert [token for token, _ in pairs][: len(literal)] == literal


def test_embeddings_named_in_a_caption_read_no_file(tiny_clip, tmp_path):
    save_file({"clip_l": torch.randn(2, 32)}, tmp_path / "badhands.safetensors")
    for tokenizer in (tiny_clip.tokenizer.clip_l, tiny_clip.tokenizer.t5xxl):
        tokenizer.embedding_directory = str(tmp_path)
    text = "a hand embedding:badhands on a table"
    assert any(torch.is_tensor(token) for token, _ in tiny_clip.tokenize(text)["l"][0])  # core reads it
    caption = text_policy(tiny_clip).tokenize(tiny_clip, text)
    for part, tokenizer in (("l", tiny_clip.tokenizer.clip_l), ("t5xxl", tiny_clip.tokenizer.t5xxl)):
        literal = tokenizer.tokenizer(text)["input_ids"]
        assert [token for token, _ in caption.tokens[part][0]][: len(literal)] == literal
    # Core would move the words from the identifier on to CLIP-L's next chunk of 77, as one embedding.
    long = "fox " * 72 + "embedding:badhands"
    literal = tiny_clip.tokenizer.clip_l.tokenizer(long)["input_ids"]
    first = text_policy(tiny_clip).tokenize(tiny_clip, long).tokens["l"][0]
    assert [token for token, _ in first][:76] == literal[:76]
    assert tiny_clip.tokenizer.clip_l.embedding_directory == str(tmp_path)  # the user's CLIP is as it was
    assert tiny_clip.tokenizer.clip_l.embedding_identifier == "embedding:"


def test_options_that_a_node_set_on_the_clip_count_as_in_comfyui_unless_there_is_a_max_length(tiny_clip):
    changed = tiny_clip.clone()
    changed.set_tokenizer_option("t5xxl_min_length", 300)
    changed.set_tokenizer_option("t5xxl_min_padding", 7)
    policy = text_policy(changed)
    assert policy.tokenize(changed, "a fox", 512).tokens == policy.tokenize(tiny_clip, "a fox", 512).tokens
    assert policy.tokenize(changed, "a fox").tokens == changed.tokenize("a fox")
