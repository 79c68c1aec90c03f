"""Folders with real files: what is found, in which order, and what is said where something is missing."""

import os
from pathlib import Path

import pytest
from PIL import Image
from tessera.train.dataset import Dataset, folder_fingerprint, scan_folder


@pytest.fixture
def folder(tmp_path):
    def make(files):
        for name, text in files.items():
            path = tmp_path / "photos" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                Image.new("RGB", (8, 8)).save(path)
            else:
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / "photos"

    return make


def captions(dataset):
    return {p.name: p.caption for p in dataset.entries}


def test_pictures_come_by_name_with_their_captions_subfolders_included(folder):
    path = folder(
        {
            "b.jpg": None,
            "b.txt": "  second\n",
            "A.PNG": None,
            "A.txt": "first",
            "sub/c.webp": None,
            "sub/c.txt": b"\xef\xbb\xbfthird, with a \xc3\xbc\r\n",
            "notes.txt": "no picture of this name",
            ".hidden.png": None,
            ".cache/d.png": None,
        }
    )
    dataset = scan_folder(path, repeats=3)
    assert captions(dataset) == {"A.PNG": "first", "b.jpg": "second", "sub/c.webp": "third, with a \u00fc"}
    assert [p.name for p in dataset.entries] == ["A.PNG", "b.jpg", "sub/c.webp"]
    assert {p.repeats for p in dataset.entries} == {3}
    assert dataset.entries[2].path == path / "sub" / "c.webp"


def test_pictures_of_one_name_in_two_subfolders_are_told_apart(folder):
    path = folder({"cats/1.jpg": None, "cats/1.txt": "a", "dogs/1.jpg": None, "dogs/1.txt": "b"})
    assert captions(scan_folder(path)) == {"cats/1.jpg": "a", "dogs/1.jpg": "b"}
    (path / "dogs" / "1.txt").unlink()
    with pytest.raises(ValueError, match=r"no .txt caption file: dogs/1.jpg; add one"):
        scan_folder(path)


def test_jpegs_of_rare_endings_are_read(folder):
    path = folder({"a.txt": "one", "b.txt": "two"})
    for name in ("a.jfif", "b.jpe"):
        Image.new("RGB", (8, 8)).save(path / name, "JPEG")
    assert captions(scan_folder(path)) == {"a.jfif": "one", "b.jpe": "two"}


def test_pictures_of_kinds_that_are_not_read_are_named(folder):
    path = folder({"a.png": None, "a.txt": "x", "sub/b.HEIC": b"1", "c.gif": b"2", ".d.heic": b"3"})
    before = folder_fingerprint(path, ".txt")
    dataset = scan_folder(path)
    assert dataset.notes == (
        "Left out, being of kinds that are not read: c.gif, sub/b.HEIC; save them as PNG or JPEG.",
    )
    assert (dataset + dataset).notes == dataset.notes * 2
    (path / "c.gif").unlink()
    assert folder_fingerprint(path, ".txt") != before
    (path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"holds no pictures that can be read \(there is sub/b.HEIC\); put pictures"):
        scan_folder(path)


def test_two_pictures_of_one_stem_share_the_caption(folder):
    path = folder({"a.jpg": None, "a.png": None, "a.txt": "both"})
    assert captions(scan_folder(path)) == {"a.jpg": "both", "a.png": "both"}


@pytest.mark.parametrize(
    ("words", "caption", "expected"),
    [
        ("ohwx", "a dog", "ohwx, a dog"),
        (" ohwx style, ", "a dog", "ohwx style, a dog"),
        ("ohwx", "", "ohwx"),
        ("", "", ""),
    ],
)
def test_trigger_words_come_before_the_caption(folder, words, caption, expected):
    assert captions(scan_folder(folder({"a.png": None, "a.txt": caption}), trigger_words=words)) == {"a.png": expected}


@pytest.mark.parametrize("extension", [".caption", "caption", " .caption "])
def test_captions_may_end_otherwise(folder, extension):
    path = folder({"a.png": None, "a.caption": "this", "a.txt": "not this"})
    assert captions(scan_folder(path, caption_extension=extension)) == {"a.png": "this"}


def test_chained_folders_keep_their_order(folder, tmp_path):
    path = folder({"one/z.png": None, "one/z.txt": "1", "two/a.png": None, "two/a.txt": "2"})
    joined = scan_folder(path / "one") + scan_folder(path / "two", repeats=5)
    assert isinstance(joined, Dataset)
    assert [(p.caption, p.repeats) for p in joined.entries] == [("1", 1), ("2", 5)]


def test_missing_captions_are_named_up_to_five(folder):
    files = {f"{i}.png": None for i in range(8)} | {"0.txt": "a"}
    with pytest.raises(ValueError) as error:
        scan_folder(folder(files))
    assert str(error.value) == (
        "7 of 8 pictures in 'photos' have no .txt caption file: 1.png, 2.png, 3.png, 4.png, 5.png and 2 more; add one "
        "beside each, such as '1.txt' for '1.png' (an empty file is an empty caption), or take the picture out of the "
        "folder."
    )


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            {"readme.md": "x"},
            {},
            r"The folder 'photos' holds no pictures; put pictures \(.avif, .bmp, .jfif, .jpe, .jpeg",
        ),
        ({"a.png": None}, {}, r"The folder 'photos' holds pictures \(1\) but no .txt caption files; put a text file"),
        (
            {"a.png": None, "a.txt": b"\xff\xfe\x00"},
            {},
            r"The caption file 'a.txt' is not UTF-8 text; save it as UTF-8",
        ),
        ({"a.png": None, "a.txt": "x"}, {"repeats": 0}, r"repeats is 0; set it to 1 or more"),
        ({"a.png": None}, {"caption_extension": "/../x"}, r"caption_extension is '/../x'; set it to"),
        ({"a.png": None}, {"caption_extension": ".png"}, r"caption_extension is '.png'; set it to"),
        ({"a.png": None}, {"caption_extension": ""}, r"caption_extension is ''; set it to"),
    ],
)
def test_bad_folders_and_values_are_told_in_a_sentence(folder, files, options, message):
    with pytest.raises(ValueError, match=message):
        scan_folder(folder(files), **options)


def test_the_fingerprint_follows_pictures_and_captions_and_nothing_else(folder):
    path = folder({"a.png": None, "a.txt": "x", "sub/b.png": None, "sub/b.txt": "y"})
    names = [folder_fingerprint(path, ".txt")]
    (path / "other.md").write_text("no part of it")
    assert folder_fingerprint(path, "txt") == names[0]

    (path / "a.txt").write_text("another caption")
    names.append(folder_fingerprint(path, ".txt"))
    os.utime(path / "sub" / "b.png", (1, 1))
    names.append(folder_fingerprint(path, ".txt"))
    Path(path / "sub" / "b.txt").unlink()
    names.append(folder_fingerprint(path, ".txt"))
    (path / "a.png").rename(path / "c.png")
    names.append(folder_fingerprint(path, ".txt"))
    assert len(set(names)) == len(names)
