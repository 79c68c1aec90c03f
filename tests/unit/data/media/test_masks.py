"""Masks: the mean over each token, which file belongs to which picture, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tessera.data.buckets.grids import Grid, Placement
from tessera.data.folders.dataset import scan_images, scan_videos
from tessera.data.folders.options import FolderOptions
from tessera.data.layouts.pairing import match_masks
from tessera.data.media.clip_windows import Extraction
from tessera.data.media.images import inspect_image, load_image, load_mask
from tessera.data.media.masks import area_mean, find_mask, token_weights


def put(folder, name, size=(8, 8), value=255, mode="L"):
    folder.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(folder / name)


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "sub/b.png"):
        put((tmp_path / "set" / name).parent, Path(name).name, mode="RGB", value=(9, 9, 9))
        (tmp_path / "set" / name).with_suffix(".txt").write_text("x")
    return tmp_path / "set"


def test_the_mean_counts_pixels_by_the_part_of_them_that_lies_in_a_token():
    mask = np.random.default_rng(0).random((7, 9), dtype=np.float32)
    box = (0.5, 1.25, 8.0, 6.5)  # left, top, right, bottom
    means = area_mean(mask, box, 3, 2)
    for row in range(3):
        for column in range(2):
            top, left = box[1] + row * 1.75, box[0] + column * 3.75
            total = 0.0
            for y in range(7):
                for x in range(9):
                    down = max(0.0, min(top + 1.75, y + 1) - max(top, y))
                    across = max(0.0, min(left + 3.75, x + 1) - max(left, x))
                    total += down * across * float(mask[y, x])
            assert float(means[row, column]) == pytest.approx(total / (1.75 * 3.75), rel=1e-6)
    assert torch.equal(area_mean(np.ones((5, 5), np.float32), (0.3, 0.1, 4.9, 4.2), 4, 4), torch.ones(4, 4))


def test_weights_are_of_the_kept_tokens_and_the_same_in_every_frame():
    mask = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.25, 0.0]])
    weights = token_weights(mask, Placement(Grid(2, 3, 2), 10, 0.0), 0.2)
    frame_weights = [0.2, 1.0, 0.6, 1.0, 0.4]
    assert weights.tolist() == pytest.approx(frame_weights * 2)


def test_a_mask_is_read_as_brightness_or_as_alpha(tmp_path):
    image = Image.new("RGBA", (2, 1))
    image.putdata([(10, 200, 30, 0), (10, 200, 30, 51)])
    image.save(tmp_path / "a.png")
    assert inspect_image(tmp_path / "a.png").alpha
    assert load_mask(tmp_path / "a.png", alpha=True).tolist() == [[0.0, pytest.approx(0.2)]]
    box = (0, 0, 2, 1)
    pixels = load_image(tmp_path / "a.png", box, 1, 2, opaque=True)[0, 0] * 255
    assert pixels.round().tolist() == [[10, 200, 30]] * 2
    assert load_image(tmp_path / "a.png", box, 1, 2)[0, 0, 0].tolist() == [1.0, 1.0, 1.0]
    grey = Image.fromarray(np.array([[0, 65535 // 5]], dtype=np.uint16))
    grey.save(tmp_path / "b.png")
    assert not inspect_image(tmp_path / "b.png").alpha
    assert load_mask(tmp_path / "b.png", alpha=False).tolist() == [[0.0, pytest.approx(0.2)]]
    # Where a mask picture is transparent it is black.
    assert load_mask(tmp_path / "a.png", alpha=False)[0, 0] == 0 < load_mask(tmp_path / "a.png", alpha=False)[0, 1]


def test_each_picture_takes_the_mask_of_its_name_and_spare_ones_are_told(folder):
    masks = folder / "masks"
    for name in ("a.jpg", "sub/b.png", "c.png"):
        put((masks / name).parent, Path(name).name)
    dataset = scan_images(folder, mask_folder=masks)
    assert [entry.name for entry in dataset.entries] == ["a.png", "sub/b.png"]
    assert [entry.mask for entry in dataset.entries] == [masks / "a.jpg", masks / "sub" / "b.png"]
    assert dataset.notes == ("These masks belong to no picture or clip and are ignored: c.png.",)
    (folder / "film.mp4").write_bytes(b"")
    (folder / "film.txt").write_text("x")
    put(masks, "film.png")
    (film,) = scan_videos(folder, Extraction(), mask_folder=masks, options=FolderOptions(unmasked_weight=0.5)).entries
    assert film.mask == masks / "film.png" and film.options.unmasked_weight == 0.5


def test_pictures_without_a_mask_are_named(tmp_path):
    put(tmp_path, "b.png")
    with pytest.raises(ValueError, match=r"2 of 3 have no mask in .*: a.png, c/d.jpg; put a picture .* 'a.png' for"):
        match_masks(["a.png", "b.jpg", "c/d.jpg"], tmp_path)
    put(tmp_path, "b.jpg")
    with pytest.raises(ValueError, match="holds 'b.jpg' and 'b.png', which are the same mask by name; remove one"):
        match_masks(["b.png"], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask_folder": "."}, "mask_folder is 'set', the folder of the pictures themselves; put the mask pictures"),
        ({"mask_folder": "masks", "options": {"alpha_mask": True}}, "a picture can have only one mask"),
        ({"options": {"unmasked_weight": 1.5}}, "unmasked_weight is 1.5; set it between 0"),
        ({"options": {"flip": "vertical"}}, "flip is 'vertical'; choose one of off, horizontal"),
        ({"options": {"crops": 0}}, "crops is 0; set it to 1 or more"),
        ({"options": {"crop_zoom": 0.5}}, "crop_zoom is 0.5; set it between 1"),
    ],
)
def test_bad_options_end_in_a_sentence(folder, arguments, message):
    put(folder / "masks", "a.png")
    options = dict(arguments)
    with pytest.raises(ValueError, match=message):
        if "mask_folder" in options:
            options["mask_folder"] = folder / options["mask_folder"]
        scan_images(folder, **{**options, "options": FolderOptions(**options.get("options", {}))})


def test_a_mask_of_another_shape_than_its_picture_is_refused_by_name(tmp_path):
    put(tmp_path, "a.png", size=(100, 60))
    put(tmp_path, "half.png", size=(50, 30))
    put(tmp_path, "square.png", size=(60, 60))
    assert find_mask(tmp_path / "a.png", tmp_path / "half.png", "a.png", (60, 100)).size == (30, 50)
    with pytest.raises(ValueError, match="The mask 'square.png' is 60 x 60 pixels, but 'a.png' is 100 x 60; give"):
        find_mask(tmp_path / "a.png", tmp_path / "square.png", "a.png", (60, 100))
