"""Folders with real files: what is found, in which order, and what is said where something is missing."""

import os
from pathlib import Path

import pytest
from PIL import Image
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.dataset import Dataset, VideoEntry, folder_fingerprint, scan_images, scan_videos
from tessera.data.folders.options import FolderOptions
from tessera.data.layouts.captions import read_text
from tessera.data.layouts.kinds import VIDEOS
from tessera.data.media.clip_windows import Extraction


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
    dataset = scan_images(path, repeats=3)
    assert captions(dataset) == {"A.PNG": "first", "b.jpg": "second", "sub/c.webp": "third, with a \u00fc"}
    assert [p.name for p in dataset.entries] == ["A.PNG", "b.jpg", "sub/c.webp"]
    assert {p.repeats for p in dataset.entries} == {3}
    assert dataset.entries[2].path == path / "sub" / "c.webp"


def test_folders_that_are_links_are_subfolders_and_no_place_is_read_twice(folder, tmp_path):
    path = folder({"z/a.png": None, "z/a.txt": "a"})
    other = tmp_path / "elsewhere"
    (other / "deep").mkdir(parents=True)
    for name in ("b", "deep/c"):
        (other / f"{name}.png").touch()
        (other / f"{name}.txt").write_text(name)
    (path / "linked").symlink_to(other)
    (path / "again").symlink_to(other / "deep")  # by name before `linked`, so that is where it is read
    (path / "same").symlink_to(path / "z")
    (path / "z" / "loop").symlink_to(path)
    (path / "z" / "above").symlink_to(tmp_path)
    (other / "back").symlink_to(path)
    (path / ".hidden").symlink_to(other)
    assert captions(scan_images(path)) == {"again/c.png": "deep/c", "linked/b.png": "b", "z/a.png": "a"}
    fingerprint = folder_fingerprint(path, ".txt")
    (other / "b.txt").write_text("another")
    assert folder_fingerprint(path, ".txt") != fingerprint


def test_pictures_of_one_name_in_two_subfolders_are_told_apart(folder):
    path = folder({"cats/1.jpg": None, "cats/1.txt": "a", "dogs/1.jpg": None, "dogs/1.txt": "b"})
    assert captions(scan_images(path)) == {"cats/1.jpg": "a", "dogs/1.jpg": "b"}
    (path / "dogs" / "1.txt").unlink()
    with pytest.raises(ValueError, match=r"no .txt caption file: dogs/1.jpg; add one"):
        scan_images(path)


def test_jpegs_of_rare_endings_are_read(folder):
    path = folder({"a.txt": "one", "b.txt": "two"})
    for name in ("a.jfif", "b.jpe"):
        Image.new("RGB", (8, 8)).save(path / name, "JPEG")
    assert captions(scan_images(path)) == {"a.jfif": "one", "b.jpe": "two"}


def test_pictures_of_kinds_that_are_not_read_are_named(folder):
    path = folder({"a.png": None, "a.txt": "x", "sub/b.HEIC": b"1", "c.gif": b"2", ".d.heic": b"3"})
    fingerprint = folder_fingerprint(path, ".txt")
    dataset = scan_images(path)
    assert dataset.notes == (
        "Left out, because these file types can't be read: c.gif, sub/b.HEIC; save them as PNG or JPEG, or "
        "install pillow-heif.",
    )
    assert (dataset + dataset).notes == dataset.notes * 2
    (path / "c.gif").unlink()
    assert folder_fingerprint(path, ".txt") != fingerprint
    (path / "a.png").unlink()
    with pytest.raises(ValueError, match=r"holds no pictures that can be read \(there is sub/b.HEIC\); put pictures"):
        scan_images(path)


def test_two_pictures_of_one_stem_share_the_caption(folder):
    path = folder({"a.jpg": None, "a.png": None, "a.txt": "both"})
    assert captions(scan_images(path)) == {"a.jpg": "both", "a.png": "both"}


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
    assert captions(scan_images(folder({"a.png": None, "a.txt": caption}), trigger_words=words)) == {"a.png": expected}


@pytest.mark.parametrize("extension", [".caption", "caption", " .caption "])
def test_captions_may_end_otherwise(folder, extension):
    path = folder({"a.png": None, "a.caption": "this", "a.txt": "not this"})
    assert captions(scan_images(path, caption_extension=extension)) == {"a.png": "this"}


def test_chained_folders_keep_their_order(folder, tmp_path):
    path = folder({"one/z.png": None, "one/z.txt": "1", "two/a.png": None, "two/a.txt": "2"})
    joined = scan_images(path / "one") + scan_images(path / "two", repeats=5)
    assert isinstance(joined, Dataset)
    assert [(p.caption, p.repeats) for p in joined.entries] == [("1", 1), ("2", 5)]


def test_missing_captions_are_named_up_to_five(folder):
    files = {f"{i}.png": None for i in range(8)} | {"0.txt": "a"}
    with pytest.raises(ValueError) as error:
        scan_images(folder(files))
    assert str(error.value) == (
        "7 of 8 pictures in 'photos' have no .txt caption file: 1.png, 2.png, 3.png, 4.png, 5.png and 2 more; add "
        "one next to each, such as '1.txt' for '1.png' (an empty file means an empty caption), or take the picture "
        "out of the folder."
    )


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_captions_are_read_by_their_byte_order_mark(tmp_path, encoding):
    mark = "\ufeff" if encoding.endswith("be") else ""
    (tmp_path / "a.txt").write_bytes(f"{mark}ein Fuchs, 狐\r\nim Schnee\rbei Nacht".encode(encoding))
    assert read_text(tmp_path / "a.txt") == "ein Fuchs, 狐\nim Schnee\nbei Nacht"


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            {"readme.md": "x"},
            {},
            r"The folder 'photos' holds no pictures; put pictures \(.apng, .avif, .bmp, .j2k",
        ),
        ({"a.png": None}, {}, r"The folder 'photos' holds pictures \(1\) but no .txt caption files; put a text file"),
        (
            {"a.png": None, "a.txt": b"\xff\xfe\x00"},  # half a letter of UTF-16
            {},
            r"The caption file 'a.txt' is not UTF-8 text; save it as UTF-8",
        ),
        (
            {"a.png": None, "a.txt": "fox " * 2_500_000},
            {},
            r"The caption file 'a.txt' has 10.0 MB, too much for a caption; shorten it to at most 1 MB",
        ),
        (
            {"a.png": None, "a.txt": "fox " * 4999},
            {"trigger_words": "ohwx fox"},
            r"The caption of 'a.png' has 20005 characters with its trigger_words, .* shorten it to at most 20000",
        ),
        ({"a.png": None, "a.txt": "x"}, {"repeats": 0}, r"repeats is 0; set it to 1 or more"),
        ({"a.png": None}, {"caption_extension": "/../x"}, r"caption_extension is '/../x'; set it to"),
        ({"a.png": None}, {"caption_extension": ".png"}, r"caption_extension is '.png'; set it to"),
        ({"a.png": None}, {"caption_extension": "mp4"}, r"caption_extension is 'mp4'; set it to"),
        ({"a.png": None}, {"caption_extension": ""}, r"caption_extension is ''; set it to"),
    ],
)
def test_bad_folders_and_values_are_told_in_a_sentence(folder, files, options, message):
    with pytest.raises(ValueError, match=message):
        scan_images(folder(files), **options)


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


def films(dataset):
    return {film.name: (film.caption, film.extraction) for film in dataset.entries}


def test_films_come_with_their_captions_as_pictures_do(folder):
    names = ("b.mp4", "A.WEBM", "sub/c.mkv", "d.mov", "e.gif")
    files = {name: b"not looked at" for name in names} | {f"{name[:-4]}.txt": name for name in names if "A" not in name}
    path = folder(files | {"A.txt": "first", "old.ogv": b"1", "still.png": None})
    extraction = Extraction((25, 49), method="slide")
    dataset = scan_videos(path, extraction, repeats=2, trigger_words="ohwx")
    assert list(films(dataset)) == ["A.WEBM", "b.mp4", "d.mov", "e.gif", "sub/c.mkv"]
    assert films(dataset)["A.WEBM"] == ("ohwx, first", extraction)
    assert {type(film) for film in dataset.entries} == {VideoEntry} and {film.repeats for film in dataset.entries} == {
        2
    }
    assert dataset.notes == (
        "Not read here: still.png; Training Images reads them.",
        "Left out, because these file types can't be read: old.ogv; save them as MP4 (H.264).",
    )
    (path / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"1 of 5 clips in 'photos' has no .txt caption file: b.mp4; add one next to"):
        scan_videos(path, extraction)
    with pytest.raises(ValueError, match=r"The folder 'sub2' holds no clips; put clips \(.3gp, .apng, .asf, .avi"):
        (path / "sub2").mkdir()
        scan_videos(path / "sub2", extraction)


def test_the_fingerprint_of_films_follows_films_and_not_pictures(folder):
    path = folder({"a.mp4": b"1", "a.txt": "x", "b.png": None, "b.txt": "y"})
    fingerprint = folder_fingerprint(path, ".txt", VIDEOS)
    (path / "b.txt").write_text("another")
    assert folder_fingerprint(path, ".txt", VIDEOS) == fingerprint
    (path / "a.mp4").write_bytes(b"12")
    assert folder_fingerprint(path, ".txt", VIDEOS) != fingerprint


def controls(dataset, root):
    return {p.name: [c.relative_to(root).as_posix() for c in p.controls] for p in dataset.entries}


def edit_set(folder, befores, afters=("a.png", "sub/b.jpg")):
    files = {f"before/{name}": None for name in befores} | {f"after/{name}": None for name in afters}
    texts = {f"after/{os.path.splitext(name)[0]}.txt": "edit" for name in afters}
    root = folder(files | texts)
    return root / "after", root / "before"


def test_control_pictures_are_found_by_name_whatever_their_ending(folder):
    after, before = edit_set(folder, ["a.webp", "sub/b.png", "b.png"])
    dataset = scan_images(after, control_folder=before)
    assert controls(dataset, before) == {"a.png": ["a.webp"], "sub/b.jpg": ["sub/b.png"]}
    assert dataset.notes == ("These control pictures belong to no picture and are ignored: b.png.",)
    assert scan_images(after).entries[0].controls == ()


def test_several_control_pictures_come_in_the_order_of_their_numbers(folder):
    after, before = edit_set(folder, ["a_10.png", "a_2.png", "a_0000.png", "sub/b.png", "sub/b_1.png"])
    dataset = scan_images(after, control_folder=before)
    assert controls(dataset, before) == {
        "a.png": ["a_0000.png", "a_2.png", "a_10.png"],
        "sub/b.jpg": ["sub/b.png", "sub/b_1.png"],
    }
    assert dataset.notes == ()


def test_a_control_picture_with_the_whole_name_of_a_picture_is_that_ones(folder):
    after, before = edit_set(folder, ["a_0.png", "a_0_0.png", "a_1.png"], ["a.png", "a_0.png"])
    dataset = scan_images(after, control_folder=before)
    assert controls(dataset, before) == {"a.png": ["a_1.png"], "a_0.png": ["a_0.png", "a_0_0.png"]}


def test_a_control_folder_inside_the_folder_is_no_part_of_it(folder):
    root = folder({"a.png": None, "a.txt": "x", "control/a.png": None})
    dataset = scan_images(root, control_folder=root / "control")
    assert controls(dataset, root) == {"a.png": ["control/a.png"]}
    fingerprint = folder_fingerprint(root, ".txt", control_folder=root / "control")
    os.utime(root / "control" / "a.png", (1, 1))
    assert folder_fingerprint(root, ".txt", control_folder=root / "control") != fingerprint


def test_missing_and_doubled_control_pictures_are_told(folder):
    after, before = edit_set(folder, ["a.png"], ["a.png", *(f"{i}.png" for i in range(6))])
    with pytest.raises(ValueError) as error:
        scan_images(after, control_folder=before)
    assert str(error.value) == (
        "6 of 7 pictures have no control picture in 'before': 0.png, 1.png, 2.png, 3.png, 4.png and 1 more; put one of "
        "the same name there, such as '0.png' or '0_0.png' for '0.png', or take the picture out of its folder."
    )
    Image.new("RGB", (8, 8)).save(before / "a.webp")
    with pytest.raises(ValueError, match=r"holds 'a.png' and 'a.webp', which are the same control picture by name"):
        scan_images(after, control_folder=before)
    (after.parent / "link").symlink_to(after)
    for folder_itself in (after, after.parent / "link"):
        with pytest.raises(ValueError, match=r"control_folder is 'after', the folder of the pictures themselves"):
            scan_images(after, control_folder=folder_itself)


def test_a_data_set_remembers_what_was_set_for_each_folder(folder):
    path = folder({"a.png": None, "a.txt": "a fox", "b.png": None, "b.txt": "an owl"})
    options = {"captions": CaptionOptions(caption_dropout=0.1), "options": FolderOptions(flip="horizontal")}
    combined = scan_images(path, repeats=2, trigger_words="zwx", **options) + scan_images(path)
    first, second = combined.folders
    assert (first["files"], first["repeats"], first["trigger_words"]) == (2, 2, "zwx")
    assert first["captions"]["caption_dropout"] == 0.1 and first["treatment"]["flip"] == "horizontal"
    assert second["captions"]["caption_dropout"] == 0.0 and str(path.name) not in str(combined.folders)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"options": FolderOptions(regularisation=True), "trigger_words": "ohwx"},
            "trigger_words are also added",
        ),
        ({"options": FolderOptions(regularisation=True)}, None),
        (
            {"options": FolderOptions(alpha_mask=True, unmasked_weight=1.0)},
            "The masks of 'photos' have no effect, because",
        ),
        ({"options": FolderOptions(alpha_mask=True, unmasked_weight=0.9)}, None),
    ],
)
def test_options_without_effect_on_a_folder_are_told(folder, options, expected):
    notes = scan_images(folder({"a.png": None, "a.txt": "a"}), **options).notes
    assert len(notes) == (expected is not None) and all(note.startswith(expected) for note in notes)
