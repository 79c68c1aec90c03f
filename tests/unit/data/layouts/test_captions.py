"""Captions under other names, in other letters, and all of them that can't be read."""

import unicodedata

import pytest
from PIL import Image
from tessera.data.folders.dataset import scan_images
from tessera.data.layouts.captions import caption_in

NFC = unicodedata.normalize("NFC", "café")
NFD = unicodedata.normalize("NFD", "café")


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path, "PNG")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.TXT", "x"), ("a.caption", "x"), ("a.png.txt", "x"), ("a.png.caption", "x"), ("a.json", '{"caption": "x"}')],
)
def test_a_caption_under_another_name_is_read_and_said(tmp_path, name, text):
    picture(tmp_path / "a.png")
    (tmp_path / name).write_text(text)
    dataset = scan_images(tmp_path)
    assert dataset.entries[0].caption == "x"
    assert dataset.notes == (f"Captions are read from other files than .txt: {name}.",)
    (tmp_path / "a.txt").write_text("first")
    assert scan_images(tmp_path).entries[0].caption == "first"


@pytest.mark.parametrize("name", ["a.caption", "a.png.tags", "a.json", "a.png.txt"])
def test_a_chosen_extension_is_the_only_one(tmp_path, name):
    picture(tmp_path / "a.png")
    (tmp_path / name).write_text('"x"')
    with pytest.raises(ValueError, match="holds pictures .1. but no .tags caption files"):
        scan_images(tmp_path, caption_extension=".tags")


def test_files_without_a_caption_are_offered_and_not_read(tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "a.json").write_text('{"rating": 3}')
    with pytest.raises(ValueError, match=r"no .txt caption files; .* beside it is 'a.json', see caption_extension"):
        scan_images(tmp_path)


@pytest.mark.parametrize(("file_name", "other"), [(NFC, NFD), (NFD, NFC)])
def test_composed_and_decomposed_names_pair(tmp_path, file_name, other):
    picture(tmp_path / "photos" / f"{file_name}.png")
    (tmp_path / "photos" / f"{other}.txt").write_text("x")
    for folder in ("masks", "before"):
        picture(tmp_path / folder / f"{other}.png")
    entry = scan_images(
        tmp_path / "photos", mask_folder=tmp_path / "masks", control_folder=tmp_path / "before"
    ).entries[0]
    assert (entry.caption, entry.mask.name, [c.name for c in entry.controls]) == ("x", f"{other}.png", [f"{other}.png"])


def test_all_captions_that_cannot_be_read_are_named(tmp_path):
    for name in "abc":
        picture(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_bytes(b"x" if name == "b" else b"\xe9\xe9\xff")
    with pytest.raises(ValueError, match=r"2 captions can't be read. The caption file 'a.txt' .* 'c.txt' is not UTF-8"):
        scan_images(tmp_path)


@pytest.mark.parametrize(
    ("value", "caption"),
    [
        ("x", "x"),
        (["a", "b"], "a, b"),
        ({"caption": "x", "tags": "a, b"}, "x, a, b"),
        ({"tag_string": "a b"}, "a b"),
        ({"rating": 3}, None),
        ([1], None),
        (None, None),
    ],
)
def test_a_caption_is_found_in_json(value, caption):
    assert caption_in(value) == caption
