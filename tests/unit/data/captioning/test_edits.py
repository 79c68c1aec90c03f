"""Search and replace over the captions of a folder, and taking it back, also if the disk refuses."""

import pytest
from PIL import Image
from tessera.data.captioning.edits import Change, UndoList, apply_changes, editable_captions, find_replacements
from tessera.data.layouts.kinds import IMAGES
from tessera.data.layouts.layout import LayoutRequest, read_layout


@pytest.fixture
def photos(tmp_path):
    for number in range(30):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number:02}.png")
        (tmp_path / f"{number:02}.txt").write_text(f"a fox, a fox, {number}")
    Image.new("RGB", (8, 8)).save(tmp_path / "00.jpg")  # shares the caption of 00.png
    return tmp_path


def replacement(folder):
    layout = read_layout(LayoutRequest(folder, IMAGES))
    return find_replacements(editable_captions(layout, ".txt", lambda path: True), "FOX", "hare", match_case=False)


def texts(folder):
    return [file.read_text() for file in sorted(folder.glob("*.txt"))]


BEFORE = [f"a fox, a fox, {number}" for number in range(30)]
AFTER = [f"a hare, a hare, {number}" for number in range(30)]


def test_each_caption_is_counted_and_written_once_and_taken_back(photos):
    matches = replacement(photos)
    assert (matches.matches, len(matches.changes), matches.locked) == (60, 30, 0) and texts(photos) == BEFORE
    changes = apply_changes(matches.changes)
    assert changes == matches.changes and texts(photos) == AFTER
    undo = UndoList()
    assert undo.undo(undo.put(changes)) == (30, []) and texts(photos) == BEFORE


def test_captions_that_changed_meanwhile_are_left_alone(photos):
    matches = replacement(photos)
    (photos / "07.txt").write_text("mine")
    changes = apply_changes(matches.changes)
    assert len(changes) == 29 and (photos / "07.txt").read_text() == "mine"
    (photos / "08.txt").write_text("mine too")
    undo = UndoList()
    assert undo.undo(undo.put(changes)) == (28, ["08.txt"])
    assert [text for text in texts(photos) if "hare" in text] == []


def test_a_disk_that_refuses_one_caption_gets_none(photos):
    unwritable = Change(photos / "00.txt" / "a.txt", None, "x")  # a file is no folder
    with pytest.raises(OSError, match="a.txt could not be saved"):
        apply_changes([*replacement(photos).changes, unwritable])
    assert texts(photos) == BEFORE and len(list(photos.iterdir())) == 61
