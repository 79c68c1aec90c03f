"""Check Folder on real encoders, and what Training Images leaves out of its list."""

import folder_paths
import pytest
import torch
from PIL import Image
from tessera.nodes.data.folders import TesseraImageFolder
from tessera.nodes.review.check_folder import TesseraCheckFolder
from tiny.data.encoders import load_sd1_clip
from tiny.data.image_encoders import load_clip_vision
from tiny.data.photographs import HEIGHT, WIDTH, make_photograph, write_photographs

MEGAPIXELS = WIDTH * HEIGHT / 1024**2


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Four photographs in ComfyUI's input folder: one is small and has no caption, one is a cropped double."""
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path / "input"))
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    folder = tmp_path / "input" / "photos"
    write_photographs(folder, 3)
    make_photograph(1, WIDTH // 2, HEIGHT // 2).save(folder / "sub.png")
    (folder / "002.txt").write_text("word " * 600)
    return folder


def run(node, **inputs):
    with torch.inference_mode():
        return node.PREPARE_CLASS_CLONE(None).execute(**inputs)  # as the executor calls it


def test_a_checked_folder_trains_without_what_is_listed(photos, tiny_clip):
    output = run(TesseraCheckFolder, folder="input/photos", megapixels=MEGAPIXELS, clip=tiny_clip)
    sheet, report, leave_out = output.result
    assert sheet.shape[0] == 1 and sheet.shape[3] == 3
    assert leave_out == "sub.png"
    assert "Without a caption, or with one that can't be read (1): sub.png" in report
    assert "002.jpg (600 tokens, 512 are read)" in report
    (payload,) = output.ui["tessera"]
    assert payload == {"report": report, "leave_out": leave_out, "folder": "input/photos"}
    with pytest.raises(ValueError, match="1 of 4 pictures in 'photos' has no .txt caption"):
        run(TesseraImageFolder, folder="input/photos")
    dataset = run(TesseraImageFolder, folder="input/photos", leave_out=f"{leave_out}\n gone.png ").result[0]
    assert [entry.name for entry in dataset.entries] == ["000.jpg", "001.jpg", "002.jpg"]
    assert dataset.notes[:2] == (
        "1 picture of 4 is left out by leave_out.",
        "leave_out names files that the folder 'photos' doesn't hold: gone.png.",
    )
    with pytest.raises(ValueError, match="leave_out names every picture of the folder 'photos'"):
        run(TesseraImageFolder, folder="input/photos", leave_out="000.jpg\n001.jpg\n002.jpg\nsub.png")


def test_captions_beyond_what_clip_reads_at_once_are_named(photos, tiny_files):
    for number, words in enumerate((75, 76, 160)):
        (photos / f"00{number}.txt").write_text("fox " * words)
    clip = load_sd1_clip(tiny_files["clip_l"])
    report = run(TesseraCheckFolder, folder="input/photos", megapixels=MEGAPIXELS, clip=clip).result[1]
    assert "takes (2): 001.jpg (76 tokens, 75 are read), 002.jpg (160 tokens, 75 are read)" in report


def test_a_vision_model_compares_pictures(photos):
    Image.open(photos / "000.jpg").crop((2, 2, WIDTH - 2, HEIGHT - 2)).save(photos / "003.jpg", quality=90)
    output = run(TesseraCheckFolder, folder="input/photos", megapixels=MEGAPIXELS, clip_vision=load_clip_vision())
    assert "003.jpg" in output.result[2].splitlines()


def test_another_folder_is_not_checked(photos):
    assert "isn't inside ComfyUI's input or datasets folder" in TesseraCheckFolder.validate_inputs(
        str(photos.parents[1])
    )
    (photos.parent / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no pictures"):
        run(TesseraCheckFolder, folder="input/empty")
