"""Masks and control images beside pictures: every name that is known, whose they are, and in which order."""

import pytest
from PIL import Image
from tessera.data.folders.dataset import scan_images


def photos(folder, pictures, companions):
    """Write pictures with captions, and images without one."""
    for name in (*pictures, *companions):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name, "PNG")
    for name in pictures:
        (folder / name).with_suffix(".txt").write_text("a fox")
    return folder


def companions(folder):
    """The mask and the control images of each picture, as paths below the folder."""
    return {
        entry.name: (
            entry.mask and entry.mask.relative_to(folder).as_posix(),
            [control.relative_to(folder).as_posix() for control in entry.controls],
        )
        for entry in scan_images(folder).entries
    }


@pytest.mark.parametrize(
    "name",
    [
        "a-masklabel.png",
        "a_mask.png",
        "a-mask.webp",
        "a.mask.png",
        "a.mask",
        "masks/a.png",
        "mask/a.jpg",
        "Masks/a.png",
    ],
)
def test_a_mask_is_found_by_its_name(tmp_path, name):
    folder = photos(tmp_path, ["a.png", "b.png"], [name])
    assert companions(folder) == {"a.png": (name, []), "b.png": (None, [])}


@pytest.mark.parametrize(
    "name",
    ["a-condlabel.png", "a_0.png", "conditioning/a.png", "control/a.png", "controls/a.webp", "Control/a.png"],
)
def test_a_control_image_is_found_by_its_name(tmp_path, name):
    folder = photos(tmp_path, ["a.png", "b.png"], [name])
    assert companions(folder) == {"a.png": (None, [name]), "b.png": (None, [])}


def test_companions_of_a_subfolder_lie_in_it_or_in_a_folder_above(tmp_path):
    names = ["sub/masks/a.png", "control/sub/a.png"]
    folder = photos(tmp_path, ["a.png", "sub/a.png"], names)
    assert companions(folder) == {"a.png": (None, []), "sub/a.png": (names[0], [names[1]])}


def test_control_images_are_ordered_by_their_numbers(tmp_path):
    beside = ["a_10.png", "a_2.png", "a_0.png"]
    apart = ["control/b_11.png", "control/b_3.png"]
    folder = photos(tmp_path, ["a.png", "b.png"], [*beside, *apart])
    assert companions(folder) == {"a.png": (None, beside[::-1]), "b.png": (None, apart[::-1])}


def test_a_control_image_with_the_whole_name_of_a_picture_belongs_to_it(tmp_path):
    folder = photos(tmp_path, ["a.png", "a_1.png"], ["control/a_1.png"])
    assert companions(folder) == {"a.png": (None, []), "a_1.png": (None, ["control/a_1.png"])}


def test_the_first_of_two_masks_is_taken_and_the_other_is_listed(tmp_path):
    folder = photos(tmp_path, ["a.png"], ["a-masklabel.png", "a_mask.png"])
    assert companions(folder) == {"a.png": ("a-masklabel.png", [])}
    assert "Not used, as nothing here reads them: a_mask.png." in scan_images(folder).notes


def test_pictures_without_captions_are_nobody_s_companions(tmp_path):
    folder = photos(tmp_path, ["c.png"], ["a.png", "a_0.png", "a_mask.png"])
    with pytest.raises(ValueError, match=r"3 of 4 pictures .* have no .txt caption file: a.png, a_0.png, a_mask.png;"):
        scan_images(folder)
