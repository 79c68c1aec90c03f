"""Fields of dataset files one by one: what each means here, and the one sentence on each that means nothing."""

import json

import pytest
from PIL import Image
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.dataset import Places, scan_images, scan_videos
from tessera.data.folders.options import FolderOptions
from tessera.data.media.clip_windows import Extraction
from tiny.data.films import write_film


def picture(path, caption=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)
    return path


def kohya(folder, fields, captions=("one, two", "three, four")):
    """A folder of two pictures with kohya's TOML, whose subset has these fields."""
    for name, caption in zip("ab", captions, strict=True):
        picture(folder / "in" / f"{name}.png", caption)
    (folder / "d.toml").write_text(f"[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'in'\n{fields}\n")
    return folder


def ai_toolkit(folder, fields, captions=("one, two", "three, four")):
    """The same with a dataset block of ai-toolkit."""
    for name, caption in zip("ab", captions, strict=True):
        picture(folder / "in" / f"{name}.png", caption)
    (folder / "d.yaml").write_text(f"datasets:\n  - folder_path: /there/in\n    {fields}\n")
    return folder


# kohya-ss/sd-scripts docs/config_README-en.md: options of subsets
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ("is_reg = true", FolderOptions(regularisation=True)),
        ("flip_aug = true", FolderOptions(flip="horizontal")),
        ("flip_aug = false", FolderOptions()),
        ("loss_multiplier = 0.5", FolderOptions(loss_weight=0.5)),
    ],
)
def test_a_field_of_kohya_s_scripts_is_an_option_of_the_folder(tmp_path, fields, options):
    assert {entry.options for entry in scan_images(kohya(tmp_path, fields)).entries} == {options}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        # ostris/ai-toolkit toolkit/config_modules.py, DatasetConfig
        ("flip_x: true", FolderOptions(flip="horizontal")),
        ("mask_min_value: 0.1", FolderOptions(unmasked_weight=0.1)),
        ("loss_multiplier: 2", FolderOptions(loss_weight=2.0)),
        ("is_reg: true", FolderOptions(regularisation=True)),
    ],
)
def test_a_field_of_ai_toolkit_is_an_option_of_the_folder(tmp_path, fields, options):
    assert {entry.options for entry in scan_images(ai_toolkit(tmp_path, fields)).entries} == {options}


def test_alpha_mask_makes_masks_of_transparent_parts(tmp_path):
    entries = scan_images(kohya(tmp_path, "alpha_mask = true")).entries
    assert {entry.options for entry in entries} == {FolderOptions(alpha_mask=True)}


def variants(folder):
    return [entry.variants for entry in scan_images(folder).entries]


def variants_by_hand(folder, options, captions=("one, two", "three, four")):
    for name, caption in zip("ab", captions, strict=True):
        picture(folder / f"{name}.png", caption)
    return [entry.variants for entry in scan_images(folder, captions=options).entries]


TAGS = ("a, b, c, d", "e ||| f, g, h")


@pytest.mark.parametrize(
    ("write", "fields", "options"),
    [
        (kohya, "shuffle_caption = true\nkeep_tokens = 1", CaptionOptions(shuffle_tags=True, keep_tokens=1)),
        (kohya, "caption_dropout_rate = 0.25", CaptionOptions(caption_dropout=0.25)),
        (kohya, "caption_tag_dropout_rate = 0.5", CaptionOptions(tag_dropout=0.5)),
        (
            kohya,
            "shuffle_caption = true\nkeep_tokens_separator = '+++'",
            CaptionOptions(shuffle_tags=True, keep_tokens_separator="+++"),
        ),
        (ai_toolkit, "shuffle_tokens: true", CaptionOptions(shuffle_tags=True)),
        (ai_toolkit, "token_dropout_rate: 0.5", CaptionOptions(tag_dropout=0.5)),
    ],
)
def test_a_field_is_an_option_of_captions(tmp_path, write, fields, options):
    forms = variants(write(tmp_path / "photos", fields, TAGS))
    assert forms == variants_by_hand(tmp_path / "hand", options, TAGS)
    assert forms != variants_by_hand(tmp_path / "plain", CaptionOptions(), TAGS)


def test_wildcards_of_kohya_s_scripts_come_with_a_caption_on_each_line(tmp_path):
    # docs/config_README-en.md: with enable_wildcard, of a caption file with several lines one is picked.
    captions = ("{red|blue} fox\nan owl", "a hare")
    forms = variants(kohya(tmp_path / "photos", "enable_wildcard = true", captions))
    assert sorted(forms[0].texts) == ["an owl", "blue fox", "red fox"]
    assert forms == variants_by_hand(tmp_path / "hand", CaptionOptions(wildcards=True, caption_per_line=True), captions)


def captions(folder, **options):
    return {entry.path.stem: entry.caption for entry in scan_images(folder, **options).entries}


def test_prefix_and_suffix_go_around_each_caption(tmp_path):
    folder = kohya(tmp_path, "caption_prefix = 'ohwx, '\ncaption_suffix = ', by night'")
    assert captions(folder) == {"a": "ohwx, one, two, by night", "b": "ohwx, three, four, by night"}


def test_class_tokens_and_default_caption_stand_for_a_missing_caption(tmp_path):
    folder = kohya(tmp_path / "kohya", "class_tokens = 'a fox'")
    picture(folder / "in" / "c.png")
    assert captions(folder) == {"a": "one, two", "b": "three, four", "c": "a fox"}
    folder = ai_toolkit(tmp_path / "toolkit", "default_caption: an owl")
    picture(folder / "in" / "c.png")
    assert captions(folder) == {"a": "one, two", "b": "three, four", "c": "an owl"}


@pytest.mark.parametrize(
    ("write", "field"),
    [(kohya, "caption_extension = '.tags'"), (ai_toolkit, "caption_ext: tags"), (ai_toolkit, "caption_ext: .tags")],
)
def test_a_block_may_have_captions_of_another_extension(tmp_path, write, field):
    folder = write(tmp_path, field)
    for name in "ab":
        (folder / "in" / f"{name}.tags").write_text(f"tags of {name}")
    assert captions(folder) == {"a": "tags of a", "b": "tags of b"}


@pytest.mark.parametrize(("repeats", "expected"), [("5", 5), ("1", 1), ("3.0", 3)])
def test_num_repeats_multiplies_repeats(tmp_path, repeats, expected):
    entries = scan_images(kohya(tmp_path, f"num_repeats = {repeats}"), repeats=2).entries
    assert {entry.repeats for entry in entries} == {2 * expected}


def test_a_block_without_repeats_is_left_out_and_said(tmp_path):
    # sd-scripts library/train_util.py, DreamBoothDataset: a subset whose num_repeats is less than 1 is ignored.
    folder = kohya(tmp_path, "num_repeats = 0\n[[datasets.subsets]]\nimage_dir = 'out'")
    picture(folder / "out" / "c.png", "c")
    dataset = scan_images(folder)
    assert [entry.path.stem for entry in dataset.entries] == ["c"]
    assert "Left out, because num_repeats is 0 in 'd.toml': in." in dataset.notes


@pytest.mark.parametrize("field", ["mask_path", "conditioning_data_dir"])
def test_masks_of_a_block_are_found_by_name(tmp_path, field):
    folder = kohya(tmp_path, f"{field} = '/elsewhere/masks of it'")
    mask = picture(tmp_path / "masks of it" / "b.png")
    assert [entry.mask for entry in scan_images(folder).entries] == [None, mask]


def test_several_folders_of_masks_and_control_images_are_taken_in_their_order(tmp_path):
    folder = kohya(tmp_path, "mask_path = ['m1', 'm2']\ncontrol_path = ['c2', 'c1']")
    for name in ("m1/a.png", "m2/a.png", "m2/b.png", "c1/a.png", "c2/a.png"):
        picture(tmp_path / name)
    first, second = scan_images(folder).entries
    assert (first.mask, second.mask) == (tmp_path / "m1" / "a.png", tmp_path / "m2" / "b.png")
    assert first.controls == (tmp_path / "c2" / "a.png", tmp_path / "c1" / "a.png") and second.controls == ()


def test_inverted_masks_are_refused(tmp_path):
    with pytest.raises(ValueError, match="^'d.toml' has invert_mask on, and masks are never inverted here; invert the"):
        scan_images(kohya(tmp_path, "invert_mask = true"))
    scan_images(kohya(tmp_path, "invert_mask = false"))


def test_subfolders_belong_to_blocks_of_ai_toolkit_only(tmp_path):
    folder = kohya(tmp_path / "kohya", "")
    picture(folder / "in" / "sub" / "c.png", "c")
    assert captions(folder).keys() == {"a", "b"}
    folder = ai_toolkit(tmp_path / "toolkit", "num_repeats: 1")
    picture(folder / "in" / "sub" / "c.png", "c")
    assert captions(folder).keys() == {"a", "b", "c"}


def test_captions_of_a_metadata_file_come_before_those_beside(tmp_path):
    folder = kohya(tmp_path, "metadata_file = 'md.json'")
    (folder / "md.json").write_text(json.dumps({"a": {"tags": "of the list"}}))
    assert captions(folder) == {"a": "of the list", "b": "three, four"}


def test_a_metadata_file_alone_names_its_pictures(tmp_path):
    picture(tmp_path / "in" / "a.png")
    (tmp_path / "md.json").write_text(json.dumps({"in/a.png": {"caption": "a fox"}}))
    (tmp_path / "d.toml").write_text("[[datasets]]\n[[datasets.subsets]]\nmetadata_file = 'md.json'\n")
    assert captions(tmp_path) == {"a": "a fox"}


def musubi(folder, *records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "l.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "d.toml").write_text("[[datasets]]\nimage_jsonl_file = 'l.jsonl'\n")
    return folder


@pytest.mark.parametrize("path", ["gone.png", "sub", "../outside.png", "{outside}"])
def test_a_line_whose_picture_may_not_be_read_is_named(tmp_path, path):
    outside = picture(tmp_path / "outside.png")
    (tmp_path / "photos" / "sub").mkdir(parents=True)
    path = path.format(outside=outside)
    folder = musubi(tmp_path / "photos", {"image_path": path, "caption": "x"})
    with pytest.raises(ValueError, match="'d.toml' has .* as a file of 'l.jsonl', which is not below its own folder"):
        scan_images(folder, places=Places("dataset file"))


@pytest.mark.parametrize("path", ["gone.png", "sub", "../outside.png", "{outside}"])
def test_a_line_whose_control_image_may_not_be_read_is_named(tmp_path, path):
    outside = picture(tmp_path / "outside.png")
    picture(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / "sub").mkdir()
    path = path.format(outside=outside)
    record = {"image_path": "a.png", "caption": "x", "control_path": path}
    folder = musubi(tmp_path / "photos", record)
    with pytest.raises(ValueError, match="'d.toml' has .* as control_path, which is not below its own folder"):
        scan_images(folder)
    if path == str(outside):
        dataset = scan_images(folder, places=Places(may_read=lambda path: True))
        assert dataset.entries[0].controls == (outside,)


def test_fields_are_told_by_what_they_are_here(tmp_path):
    folder = kohya(tmp_path, "num_repeats = 2\nis_reg = false\ncolor_aug = true")
    (note,) = scan_images(folder).notes
    assert note == (
        "Read as 'd.toml' of kohya's scripts says (1 folder): num_repeats as repeats, image_dir as folder, is_reg as "
        "regularisation. Not used, as inputs of Tessera's nodes decide: color_aug. Set layout to plain to "
        "read the folder without it."
    )


@pytest.mark.parametrize(
    ("general", "dataset", "subset", "expected"),
    [("1", None, None, 1), ("1", "2", None, 2), ("1", "2", "3", 3), (None, "2", None, 2), ("1", None, "3", 3)],
)
def test_the_inner_value_of_a_field_wins(tmp_path, general, dataset, subset, expected):
    lines = ["[general]", general, "[[datasets]]", dataset, "[[datasets.subsets]]", subset, "image_dir = 'in'"]
    text = [line if line and not line.isdigit() else f"num_repeats = {line}" for line in lines if line is not None]
    folder = kohya(tmp_path, "")
    (folder / "d.toml").write_text("\n".join(text))
    assert {entry.repeats for entry in scan_images(folder).entries} == {expected}


def test_a_block_of_ai_toolkit_without_pictures_here_is_left_to_the_other_node(tmp_path):
    folder = ai_toolkit(tmp_path, "num_repeats: 1")
    (folder / "d.yaml").write_text("datasets:\n  - folder_path: /there/in\n  - dataset_path: /there/films\n")
    write_film(picture(folder / "films" / "x.png").with_name("c.mp4"), 25, caption="c")
    (folder / "films" / "x.png").unlink()
    dataset = scan_images(folder)
    assert [entry.path.stem for entry in dataset.entries] == ["a", "b"]
    assert "1 folder of 'd.yaml' holds no pictures and is left out; chain Training Clips for it." in dataset.notes
    films = scan_videos(folder, Extraction())
    assert [entry.path.stem for entry in films.entries] == ["c"]
    assert "1 folder of 'd.yaml' holds no clips and is left out; chain Training Images for it." in films.notes


def test_the_extraction_of_clips_is_that_of_the_block(tmp_path):
    write_film((tmp_path / "films" / "c.mp4").parent.mkdir() or tmp_path / "films" / "c.mp4", 25, caption="c")
    fields = "target_frames = [9, 17]\nframe_extraction = 'slide'\nframe_stride = 4\nframe_sample = 3\nmax_frames = 33"
    (tmp_path / "d.toml").write_text(f"[[datasets]]\nvideo_directory = 'films'\n{fields}\n")
    (entry,) = scan_videos(tmp_path, Extraction(fps=8)).entries
    assert entry.extraction == Extraction((9, 17), 8, "slide", frame_stride=4, frame_sample=3, max_frames=33)


def test_a_dataset_file_may_lie_in_the_folder_that_it_names(tmp_path):
    picture(tmp_path / "photos" / "a.png", "a fox")
    text = "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'C:\\work\\photos'\nnum_repeats = 4\n"
    (tmp_path / "photos" / "d.toml").write_text(text)
    assert [entry.repeats for entry in scan_images(tmp_path / "photos").entries] == [4]


def test_a_dataset_file_of_a_subfolder_says_nothing_of_the_chosen_folder(tmp_path):
    folder = kohya(tmp_path / "photos" / "sub", "num_repeats = 4").parent
    dataset = scan_images(folder)
    assert {entry.repeats for entry in dataset.entries} == {1}
    assert "Not used, as nothing here reads them: sub/d.toml." in dataset.notes
