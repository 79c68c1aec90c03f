"""Caption Folder with a tiny vision-language model of core's own classes: what it writes, and what stays."""

import pytest
import torch
from PIL import Image
from tessera.data.captioning.caption_folder import APPEND, KEEP, REPLACE, CaptionJob, write_captions
from tessera.data.captioning.instruction import CaptionStyle
from tessera.data.captioning.ledger import Ledger
from tessera.data.captioning.vision_language import VisionLanguageModel
from tessera.data.layouts.kinds import IMAGES
from tessera.data.layouts.layout import LayoutRequest
from tiny.data.image_encoders import load_klein_clip, load_qwen3vl_clip, load_seeing_qwen_clip

STYLE = {"max_words": 1}


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def clip():
    return load_qwen3vl_clip()


@pytest.fixture
def folder(tmp_path):
    """Three pictures, the middle one with a caption."""
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for name, colour in (("a", "red"), ("b", "green"), ("c", "blue")):
        Image.new("RGB", (56, 28), colour).save(pictures / f"{name}.png")
    (pictures / "b.txt").write_text("mine")
    return pictures


def job(folder, clip, existing=KEEP, interrupted=lambda: None, seed=0, **style):
    wanted = CaptionStyle(**{**STYLE, **style})
    captioner = VisionLanguageModel(clip, wanted, 0.0, seed, interrupted)
    request = LayoutRequest(folder, IMAGES)
    return CaptionJob(request, captioner, wanted, existing, folder.parent / "user", lambda file: True)


def write(folder, clip, existing=KEEP, interrupted=lambda: None, **options):
    with torch.inference_mode():
        wanted = job(folder, clip, existing, interrupted, **options)
        return write_captions(wanted, lambda *shown: None, interrupted)


@pytest.fixture
def answers(clip, monkeypatch):
    """The answers that the model gave, its own, by a function; `begun` lists the questions too, as None."""
    given = []
    generate, decode = clip.generate, clip.decode
    monkeypatch.setattr(clip, "generate", lambda *args, **kwargs: given.append(None) or generate(*args, **kwargs))
    monkeypatch.setattr(clip, "decode", lambda *args, **kwargs: given.append(decode(*args, **kwargs)) or given[-1])
    said = lambda: [text for text in given if text is not None]  # noqa: E731
    said.begun = given
    return said


def texts(folder):
    return {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.txt")}


def test_a_caption_is_what_core_has_the_model_say_of_the_picture(folder, clip, answers):
    report = write(folder, clip, trigger_words="ohwx")
    assert (report.written, report.kept) == (["a.png", "c.png"], 1)
    style = CaptionStyle(**STYLE, trigger_words="ohwx")
    image = torch.zeros(1, 28, 56, 3)
    image[..., 0] = 1
    chat = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>" + style.prompt() + "<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    with torch.inference_mode():
        tokens = clip.generate(clip.tokenize(chat, images=[image]), do_sample=False, max_length=style.max_tokens())
    said = clip.decode(tokens)
    assert answers()[0] == said == answers()[-1] != answers()[1]  # another picture, another answer
    assert texts(folder)["a"] == style.with_trigger(style.finish(said, len(tokens) < style.max_tokens()))
    assert texts(folder)["b"] == "mine"
    ledger = Ledger(folder.parent / "user")
    assert [ledger.waits(folder / f"{name}.png") for name in "abc"] == [True, False, True]


def test_a_stopped_run_goes_on_where_it_was_and_leaves_changed_captions_alone(folder, clip, answers):
    def stop():
        if len(answers()) == 1 and answers.begun[-1] is None:  # within the second answer
            raise Stopped

    with pytest.raises(Stopped):
        write(folder, clip, REPLACE, stop)
    assert len(answers()) == 1 and sorted(texts(folder)) == ["a", "b"] and texts(folder)["b"] == "mine"
    (folder / "a.txt").write_text("changed by hand")
    report = write(folder, clip, REPLACE)
    assert (report.written, report.done, len(answers())) == (["b.png", "c.png"], 1, 3)
    assert texts(folder)["a"] == "changed by hand" and texts(folder)["b"] != "mine"
    assert write(folder, clip, REPLACE).done == 3 and len(answers()) == 3
    for picture in ("a", "b", "c"):
        (folder / f"{picture}.txt").unlink()
    assert len(write(folder, clip).written) == 3 and len(answers()) == 3  # of answers that are kept
    assert write(folder, clip, REPLACE, instruction="What is this?").written == ["a.png", "b.png", "c.png"]
    assert len(answers()) == 6


def test_captions_are_appended_once(folder, clip):
    write(folder, clip, APPEND, trigger_words="ohwx")
    first = texts(folder)
    assert first["b"].startswith("ohwx, mine, ") and len(first["b"]) > 12
    write(folder, clip, APPEND, trigger_words="ohwx")
    assert texts(folder) == first


def test_a_forbidden_word_is_asked_for_again_and_taken_out(folder, clip, answers):
    for name in ("b.png", "b.txt", "c.png"):
        (folder / name).unlink()
    write(folder, clip)
    word = next(word for word in answers()[0].split() if word.isascii() and word.isalpha())
    before = len(answers())
    clip.decode, decode = lambda tokens: f"A {word}, a fox.", clip.decode  # whatever it draws
    try:
        report = write(folder, clip, REPLACE, never_use=word)
    finally:
        clip.decode = decode
    assert report.written == ["a.png"] and len(answers()) == before
    assert texts(folder) == {"a": "A, a fox."}


def test_files_that_can_not_be_captioned_are_named(folder, clip, tiny_files):
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more than a head")
    (folder / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "of a list"}')
    report = write(folder, clip, REPLACE)
    assert report.written == ["a.png", "b.png"] and report.failed == ["broken.png"]
    notes = " ".join(report.notes())
    assert "can't be read: broken.png" in notes and "c.png: The caption is in 'metadata.jsonl'" in notes
    for blind_or_mute in (load_klein_clip(), load_seeing_qwen_clip(tiny_files["qwen"])):
        with pytest.raises(ValueError, match="clip can't write about pictures: .* load Qwen3-VL"):
            write(folder, blind_or_mute, REPLACE)
