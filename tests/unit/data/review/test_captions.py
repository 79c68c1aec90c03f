"""Faults of captions: empty, equal, too long, without the trigger words, or not readable."""

import pytest
from PIL import Image
from tessera.data.layouts.kinds import IMAGES
from tessera.data.layouts.layout import LayoutRequest, read_layout
from tessera.data.review.captions import caption_faults, read_texts
from tessera.data.review.findings import EMPTY, EQUAL, LONG, NO_CAPTION, NO_TRIGGER


def faults(texts, trigger_words="", limit=None):
    length = None if limit is None else lambda text: (len(text.split()), limit)
    names = {f"{number}.png": text for number, text in enumerate(texts)}
    return [(fault.name, fault.fault, fault.detail) for fault in caption_faults(names, trigger_words, length)]


def test_a_caption_of_just_the_length_is_not_too_long():
    assert faults(["one two three", "one two three four"], limit=3) == [("1.png", LONG, "4 tokens, 3 are read")]


@pytest.mark.parametrize(
    ("text", "has_words"),
    [
        ("a photo of SKS Man", True),
        ("sks man.", True),
        ("sks manly", False),
        ("asks man", False),
        ("a man", False),
        ("", None),
    ],
)
def test_trigger_words_count_as_whole_words_in_any_case(text, has_words):
    missing = [("0.png", NO_TRIGGER, "")] if has_words is False else [("0.png", EMPTY, "")] if has_words is None else []
    assert faults([text, "sks man asleep"], " sks man ") == missing


def test_equal_captions_name_the_first_and_one_for_all_is_said_once():
    assert faults(["a", "b", "a"]) == [("2.png", EQUAL, "as 0.png")]
    assert faults(["a fox", "a fox", "a fox"]) == [("0.png", EQUAL, "all have 'a fox'")]
    assert faults(["a fox"]) == []


def test_captions_that_can_not_be_read_say_why(tmp_path):
    for name, caption in {"a": b"\xe9\xe9\xff", "b": b"a fox", "c": None}.items():
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        if caption is not None:
            (tmp_path / f"{name}.txt").write_bytes(caption)
    texts, findings = read_texts(read_layout(LayoutRequest(tmp_path, IMAGES)).subsets)
    assert texts == {"b.png": "a fox"}
    reason = "The caption file 'a.txt' is not UTF-8 text; save it as UTF-8."
    assert [(f.name, f.fault, f.detail) for f in findings] == [("a.png", NO_CAPTION, reason), ("c.png", NO_CAPTION, "")]


def test_the_longest_of_several_captions_is_looked_at(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a fox\na.png,a red fox asleep\n")
    texts, findings = read_texts(read_layout(LayoutRequest(tmp_path, IMAGES)).subsets)
    assert texts == {"a.png": "a red fox asleep"} and findings == []
