"""Lists of captions: their names and columns, whose a line is, and what is said of lines without a picture."""

import json

import pytest
from PIL import Image
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.dataset import Places, folder_fingerprint, scan_images
from tessera.data.layouts.caption_lists import read_list


def photos(folder, *names):
    for name in names or ("a.png", "b.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
    return folder


def captions(folder, **options):
    return {entry.name: entry.caption for entry in scan_images(folder, **options).entries}


@pytest.mark.parametrize("stem", ["metadata", "caption", "captions", "prompt", "Prompts"])
@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("jsonl", '{"file_name": "a.png", "text": "one"}\n\n{"file_name": "b.png", "text": "two"}'),
        ("json", '[{"file_name": "a.png", "text": "one"}, {"file_name": "b.png", "text": "two"}, 3]'),
        ("json", '{"a.png": "one", "b": {"caption": "two"}, "c": 3}'),
        ("csv", "file_name,text\na.png,one\nb.png,two\n"),
        ("tsv", "file_name\ttext\na.png\tone\nb.png\ttwo\n"),
        ("txt", "a.png: one\nb.png: two"),
        ("txt", "a.png\tone\nb.png\ttwo"),
        ("txt", "a.png|one\nb.png|two\nc.png|"),
    ],
)
def test_a_list_is_known_by_its_name_in_every_form(tmp_path, stem, ending, text):
    photos(tmp_path)
    (tmp_path / f"{stem}.{ending}").write_text(text)
    assert captions(tmp_path) == {"a.png": "one", "b.png": "two"}
    assert len(read_list(tmp_path / f"{stem}.{ending}").rows) == 2


@pytest.mark.parametrize(
    "field",
    ["file_name", "filename", "image_path", "image", "file", "path", "name", "image_file", "video_path", "video"],
)
@pytest.mark.parametrize("text", ["text", "caption", "prompt", "description", "tags", "tag_string"])
def test_columns_go_by_the_names_of_other_tools(tmp_path, field, text):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text(json.dumps({field: "a.png", text: "a fox", "rating": 3}))
    assert captions(tmp_path) == {"a.png": "a fox"}
    assert scan_images(tmp_path).notes == ("1 caption comes from metadata.jsonl; these fields aren't used: rating.",)


def test_the_first_of_the_known_names_is_the_caption(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"image": "a.png", "prompt": "3", "caption": "2", "text": "1"}')
    assert captions(tmp_path) == {"a.png": "1"}


def test_a_line_is_found_by_its_path_then_by_a_name_that_one_file_has(tmp_path):
    photos(tmp_path, "x/a.png", "y/a.png", "y/c.png")
    rows = ["x\\a.png,by path", "elsewhere/c.png,by name", "a.png,of two"]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,text", *rows]))
    with pytest.raises(ValueError, match=r"1 of 3 pictures .* has no .txt caption file: y/a.png"):
        scan_images(tmp_path)
    (tmp_path / "y" / "a.txt").write_text("beside")
    assert captions(tmp_path) == {"x/a.png": "by path", "y/a.png": "beside", "y/c.png": "by name"}
    assert [entry.variants.texts for entry in scan_images(tmp_path).entries][0] == ("by path",)


def test_a_text_for_all_is_for_the_files_beside_and_below(tmp_path):
    photos(tmp_path, "x/a.png", "x/in/b.png", "c.png")
    (tmp_path / "x" / "captions.txt").write_text("a fox")
    (tmp_path / "c.txt").write_text("an owl")
    assert captions(tmp_path) == {"c.png": "an owl", "x/a.png": "a fox", "x/in/b.png": "a fox"}
    variants = [entry.variants.texts for entry in scan_images(tmp_path).entries]
    assert variants == [("an owl",), ("a fox",), ("a fox",)]
    (tmp_path / "c.txt").unlink()
    with pytest.raises(ValueError, match="1 of 3 pictures .* has no .txt caption file: c.png;"):
        scan_images(tmp_path)


def test_a_picture_with_several_lines_has_several_captions(tmp_path):
    """Flickr8k's captions.txt has five for each picture, and so have COCO's in a table."""
    photos(tmp_path, "a.png", "b.png")
    lines = ["image,caption", "a.png,A fox .", 'a.png,"A red fox, asleep ."', "b.png,An owl .", "a.png,A fox ."]
    (tmp_path / "captions.txt").write_text("\n".join(lines))
    dataset = scan_images(tmp_path, trigger_words="ohwx")
    first, second = (entry.variants for entry in dataset.entries)
    # A text is read to the line's end; a table of that name would have quotes.
    assert first.texts == ("ohwx, A fox .", 'ohwx, "A red fox, asleep ."') and first.weights == (0.5, 0.5)
    assert second.texts == ("ohwx, An owl .",) and second.weights == (1.0,)
    assert dataset.notes == ("2 captions come from captions.txt; 1 of them in several versions, one for each showing.",)


def test_several_captions_of_a_table_keep_their_commas_and_lose_their_line_ends(tmp_path):
    photos(tmp_path, "a.png", "b.png")
    (tmp_path / "b.txt").write_text("two\nlines")
    (tmp_path / "metadata.csv").write_text('file_name,text\na.png,"one,\n1"\na.png,two\n')
    first, second = (entry.variants.texts for entry in scan_images(tmp_path).entries)
    assert first == ("one, 1", "two") and second == ("two\nlines",)
    dropped = scan_images(tmp_path, captions=CaptionOptions(caption_dropout=1.0)).entries
    assert [entry.variants.texts for entry in dropped] == [("",), ("",)]


def test_the_first_of_two_lists_by_name_has_the_caption(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,second\n")
    (tmp_path / "captions.csv").write_text("file_name,text\na.png,first\n")
    assert captions(tmp_path) == {"a.png": "first"}


def test_a_chosen_list_goes_before_captions_beside_and_folder_names(tmp_path):
    photos(tmp_path, "10_fox/a.png", "10_fox/b.png")
    (tmp_path / "10_fox" / "a.txt").write_text("beside")
    (tmp_path / "metadata.csv").write_text("file_name,text\n10_fox/a.png,listed\n10_fox/b.png,listed too\n")
    assert captions(tmp_path) == {"10_fox/a.png": "beside", "10_fox/b.png": "listed too"}
    entries = scan_images(tmp_path, places=Places("captions file")).entries
    assert [(entry.caption, entry.repeats) for entry in entries] == [("listed", 1), ("listed too", 1)]


def test_control_images_of_a_line_are_ordered_by_number(tmp_path):
    photos(tmp_path, "a.png", "c.png", "d.png", "e.png")
    record = {"image_path": "a.png", "caption": "x", "control_path_10": "e.png", "control_path": "c.png"}
    (tmp_path / "l.jsonl").write_text(json.dumps(record | {"control_path_2": "d.png", "blur": 1}))
    (tmp_path / "d.toml").write_text("[[datasets]]\nimage_jsonl_file = 'l.jsonl'\n")
    (entry,) = scan_images(tmp_path).entries
    assert [control.name for control in entry.controls] == ["c.png", "d.png", "e.png"]
    assert read_list(tmp_path / "l.jsonl").unused == ("blur",)


def test_lines_without_a_picture_are_named_if_the_list_is_used(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,x\ngone.png,y\n")
    assert scan_images(tmp_path).notes[1] == "These files of the list are not in the folder: gone.png."
    (tmp_path / "a.txt").write_text("beside")
    assert not [note for note in scan_images(tmp_path).notes if "gone" in note]


def test_a_line_without_a_caption_is_no_caption(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": null}')
    with pytest.raises(ValueError, match="holds pictures .1. but no .txt caption files"):
        scan_images(tmp_path)


def test_a_line_that_is_no_json_is_named_with_its_number(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n\n{"file_name": ')
    with pytest.raises(ValueError, match=r"^Line 3 of 'metadata.jsonl' is not JSON"):
        scan_images(tmp_path)


def test_captions_of_a_list_are_known_by_the_file_of_the_list(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,{x\n")
    with pytest.raises(ValueError, match="The caption file 'metadata.csv' has in line 1"):
        scan_images(tmp_path, captions=CaptionOptions(wildcards=True))


def test_the_fingerprint_follows_a_list_and_the_names_of_files_that_are_not_read(tmp_path):
    photos(tmp_path, "a.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a fox\n")
    fingerprints = [folder_fingerprint(tmp_path, ".txt")]
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,a hare\n")
    fingerprints.append(folder_fingerprint(tmp_path, ".txt"))
    for name in ("latents.npz", "alone.txt", "film.mp4"):
        (tmp_path / name).write_text("x")
        fingerprints.append(folder_fingerprint(tmp_path, ".txt"))
    assert len(set(fingerprints)) == 5
