"""Class captions: which words the class stands in place of, and what is refused."""

import pytest
from PIL import Image
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.class_words import read_class_word
from tessera.data.folders.dataset import scan_images
from tessera.data.folders.options import FolderOptions


def folder(tmp_path, *captions):
    for index, caption in enumerate(captions):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{index}.png")
        (tmp_path / f"{index}.txt").write_text(caption)
    return tmp_path


@pytest.mark.parametrize(
    ("class_word", "trigger_words", "text", "expected"),
    [
        ("man", "ohwx", "ohwx, a photo of OHWX in snow", "man, a photo of man in snow"),
        ("man", "ohwx man,", "ohwx man, smiling", "man, smiling"),
        ("a dog", "sks, sks dog", "sks, sks dog, a sks dog, sks", "a dog, a a dog, a dog"),
        ("man", "ohwx", "ohwxy and unohwx", None),
        ("ohwx = man", "", "a photo of ohwx", "a photo of man"),
        ("style", "(sty.le)", "(sty.le), x", "style, x"),
        (r"\1 man", "ohwx", "ohwx", r"\1 man"),
    ],
)
def test_the_class_stands_in_place_of_the_words_wherever_they_are(class_word, trigger_words, text, expected):
    assert read_class_word(class_word, trigger_words).caption(text) == expected


@pytest.mark.parametrize(
    ("class_word", "trigger_words", "message"),
    [
        ("man", " ", "class_word is 'man' and trigger_words is empty, .* as word=class .such as ohwx=man."),
        ("ohwx=", "", "class_word is 'ohwx='; write it as word=class"),
        ("=man", "ohwx", "class_word is '=man'; write it as word=class"),
    ],
)
def test_a_class_word_that_stands_for_nothing_is_refused(class_word, trigger_words, message):
    with pytest.raises(ValueError, match=message):
        read_class_word(class_word, trigger_words)


def test_each_form_of_a_caption_has_its_class_caption(tmp_path):
    pictures = folder(tmp_path, "red\nblue", "green")
    options = CaptionOptions(caption_per_line=True)
    dataset = scan_images(pictures, trigger_words="ohwx", options=FolderOptions(class_word="man"), captions=options)
    forms = [entry.variants for entry in dataset.entries]
    assert forms[0].texts == ("ohwx, red", "ohwx, blue") and forms[0].class_texts == ("man, red", "man, blue")
    assert forms[1].class_texts == ("man, green",)
    assert scan_images(pictures, trigger_words="ohwx").entries[0].variants.class_texts == ()


def test_captions_without_the_word_are_told_and_a_folder_of_them_refused(tmp_path):
    pictures = folder(tmp_path, "a photo of ohwx", "a photo")
    dataset = scan_images(pictures, options=FolderOptions(class_word="ohwx=man"))
    assert [entry.variants.class_texts for entry in dataset.entries] == [("a photo of man",), ()]
    assert dataset.notes == ("These captions don't have the word 'ohwx', so they get no class caption: 1.png.",)
    with pytest.raises(ValueError, match="class_word replaces 'sks', which no caption in the folder .* contains"):
        scan_images(pictures, options=FolderOptions(class_word="sks=dog"))
    with pytest.raises(ValueError, match="class_word is 'man' and regularisation is on"):
        FolderOptions(class_word=" man", regularisation=True)


def test_the_empty_prompt_may_stand_in_place_of_every_caption(tmp_path):
    pictures = folder(tmp_path, "red\nblue", "green")
    options = CaptionOptions(caption_per_line=True)
    blank = FolderOptions(blank_prompt_preservation=True)
    dataset = scan_images(pictures, options=blank, captions=options)
    assert [entry.variants.class_texts for entry in dataset.entries] == [("", ""), ("",)]
    with pytest.raises(ValueError, match="class_word is 'man' and blank_prompt_preservation is on"):
        FolderOptions(blank_prompt_preservation=True, class_word="man")
    with pytest.raises(ValueError, match="blank_prompt_preservation and regularisation are both on"):
        FolderOptions(blank_prompt_preservation=True, regularisation=True)
