"""The instruction for a model that captions, and what becomes of its answer."""

import pytest
from tessera.data.captioning.instruction import CaptionStyle
from tessera.data.captioning.ledger import Ledger, LedgerEntry


def test_the_instruction_names_the_words_the_subject_and_what_is_forbidden():
    style = CaptionStyle("tags", 12, " ohwx fox, ", "photo of, image")
    assert "at most 12 short tags" in style.prompt()
    assert "called ohwx fox;" in style.prompt() and "Never use these words: photo of, image." in style.prompt()
    prompt = CaptionStyle(instruction="Say {what} you see.").prompt()
    assert prompt.startswith("Say {what} you see. Answer with the caption alone")
    for wrong in ({"style": "poem"}, {"max_words": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CaptionStyle(**wrong)


@pytest.mark.parametrize(
    ("answer", "whole", "caption"),
    [
        ('<think>A fox?</think>\n "A red fox\n in snow."', True, "A red fox in snow."),
        ("A fox. It runs through", False, "A fox."),
        ("A fox that runs through", False, "A fox that runs through"),
        ("An Image, photo of a fox, imagery.", True, "An, a fox, imagery."),
        ("", True, ""),
    ],
)
def test_an_answer_becomes_one_line_without_thoughts_halves_and_forbidden_words(answer, whole, caption):
    assert CaptionStyle(never_use="image, photo of").finish(answer, whole) == caption


def test_tags_are_given_once_up_to_their_number_and_without_forbidden_ones():
    style = CaptionStyle("tags", 3, never_use="red")
    assert style.finish("fox, red fur, snow,fox, tree., reddish, half", whole=False) == "fox, snow, tree"


def test_words_of_a_language_without_spaces_are_found():
    assert CaptionStyle(never_use="狐狸").breaks("一只红狐狸在雪地里")


def test_trigger_words_come_first_once():
    style = CaptionStyle(trigger_words="ohwx fox")
    assert style.with_trigger("in the snow") == "ohwx fox, in the snow"
    assert style.with_trigger("An OHWX fox in the snow") == "An OHWX fox in the snow"
    assert style.with_trigger("") == ""


def test_a_ledger_keeps_what_others_wrote_and_reads_no_damaged_file(tmp_path):
    pictures = [tmp_path / "pictures" / name for name in ("a.png", "b.png")]
    first, second = Ledger(tmp_path / "ledger"), Ledger(tmp_path / "ledger")
    assert not first.waits(pictures[0])
    for ledger, picture in zip((first, second), pictures, strict=True):
        ledger.put(picture, LedgerEntry("key", True))
    first.save()
    second.save()
    later = Ledger(tmp_path / "ledger")
    assert [later.waits(picture) for picture in pictures] == [True, True]
    later.settle(pictures[:1])
    later.save()
    reread = Ledger(tmp_path / "ledger")
    assert [reread.waits(picture) for picture in pictures] == [False, True]
    assert reread.find(pictures[0]).key == "key"
    (file,) = (tmp_path / "ledger").iterdir()
    file.write_text('{"captions": {"a.png": {"key": 7}, "b.png": []}}')
    assert Ledger(tmp_path / "ledger").find(pictures[0]) is None
