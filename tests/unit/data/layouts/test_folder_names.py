"""Names of folders as kohya's scripts have them: repeats, classes and regularisation, and what is said of them."""

import pytest
from PIL import Image
from tessera.data.folders.dataset import scan_images


def photos(folder, names, caption=None):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(folder / name)
        if caption is not None:
            (folder / name).with_suffix(".txt").write_text(caption)
    return folder


def facts(folder, **options):
    """Caption, repeats and regularisation by name."""
    entries = scan_images(folder, **options).entries
    return {entry.name: (entry.caption, entry.repeats, entry.options.regularisation) for entry in entries}


def test_the_class_is_the_caption_of_pictures_without_one(tmp_path):
    folder = photos(tmp_path, ["10_ohwx man/a.png", "2_dog/b.png"])
    photos(tmp_path, ["2_dog/c.png"], "a black dog")
    assert facts(folder) == {
        "10_ohwx man/a.png": ("ohwx man", 10, False),
        "2_dog/b.png": ("dog", 2, False),
        "2_dog/c.png": ("a black dog", 2, False),
    }
    (note,) = scan_images(folder).notes
    assert "10_ohwx man (10 x), 2_dog (2 x); pictures without a caption get the name after the number. Set" in note
    (tmp_path / "10_ohwx man" / "a.txt").write_text("x")
    (tmp_path / "2_dog" / "b.txt").write_text("x")
    (note,) = scan_images(folder).notes
    assert "without a caption" not in note


@pytest.mark.parametrize("name", ["1_reg", "5_REG", "3_regularization_images", "1024px_2_data", "768px_dog"])
def test_a_name_that_is_no_class_is_no_caption(tmp_path, name):
    folder = photos(tmp_path, [f"{name}/a.png"])
    with pytest.raises(ValueError, match="holds pictures .1. but no .txt caption files"):
        scan_images(folder)


@pytest.mark.parametrize("name", ["1_reg", "1_REG", "2_Regularization"])
def test_a_folder_of_regularisation_takes_no_trigger_words(tmp_path, name):
    folder = photos(tmp_path, [f"{name}/a.png", "3_fox/b.png"], "x")
    assert facts(folder, trigger_words="ohwx") == {
        f"{name}/a.png": ("x", int(name[0]), True),
        "3_fox/b.png": ("ohwx, x", 3, False),
    }


def test_all_in_a_folder_of_regularisation_is_regularisation(tmp_path):
    folder = photos(tmp_path / "reg", ["a.png", "4_fox/b.png", "sub/3_dog/c.png"], "x")
    assert facts(folder) == {"a.png": ("x", 1, True), "4_fox/b.png": ("x", 4, True), "sub/3_dog/c.png": ("x", 3, True)}


def test_the_chosen_folder_may_have_the_name_itself(tmp_path):
    folder = photos(tmp_path / "7_fox", ["a.png", "sub/b.png"])
    assert facts(folder, repeats=2) == {"a.png": ("fox", 14, False), "sub/b.png": ("fox", 14, False)}


def test_eight_folders_are_named_and_the_others_counted(tmp_path):
    folder = photos(tmp_path, [f"{n}_fox/a.png" for n in range(1, 11)], "x")
    (note,) = scan_images(folder).notes
    assert "10_fox (10 x), 1_fox (1 x), 2_fox" in note and "7_fox (7 x) and 2 more. Set layout to plain" in note


def test_sizes_in_names_are_said_to_be_unused(tmp_path):
    folder = photos(tmp_path, ["768px_4_fox/a.png"], "x")
    assert facts(folder) == {"768px_4_fox/a.png": ("x", 4, False)}
    assert "sizes such as 1024px aren't used, set megapixels" in scan_images(folder).notes[0]
