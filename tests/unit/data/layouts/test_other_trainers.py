"""Folders as other trainers have them, written as their own documentation writes them, equal folders made by hand."""

import json
import tarfile
import zipfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tessera.data.captions.options import CaptionOptions
from tessera.data.folders.dataset import ImageEntry, Places, VideoEntry, folder_fingerprint, scan_images, scan_videos
from tessera.data.folders.options import FolderOptions
from tessera.data.layouts.archives import unpack
from tessera.data.media.clip_windows import Extraction


@dataclass(frozen=True)
class Part:
    """A folder made by hand: captions by name, with masks and control pictures beside, and the options of its node."""

    captions: dict[str, str]
    repeats: int = 1
    trigger_words: str = ""
    options: FolderOptions = FolderOptions()
    forms: CaptionOptions = CaptionOptions()
    masks: dict[str, str] = field(default_factory=dict)
    controls: dict[str, list[str]] = field(default_factory=dict)
    extraction: Extraction | None = None


@dataclass(frozen=True)
class Case:
    """A folder of another trainer.

    source: where its documentation writes it.
    files: its texts, and None for a picture.
    parts: the same made by hand.
    said: what notes say.
    """

    source: str
    files: dict[str, str | None]
    parts: tuple[Part, ...]
    said: tuple[str, ...] = ()
    layout: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


def lines(*records: dict[str, str]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


FROGS = {f"train/20_sls frog/{n}.png": None for n in (1, 2)} | {"train/reg/1_frog/r.png": None}
HOGE = """
[general]
shuffle_caption = true
caption_extension = '.txt'
keep_tokens = 1

# This is a DreamBooth-style dataset
[[datasets]]
resolution = 512
batch_size = 4
keep_tokens = 2

  [[datasets.subsets]]
  image_dir = 'C:\\hoge'
  class_tokens = 'hoge girl'
  # This subset uses keep_tokens = 2 (the value of the parent datasets)

  [[datasets.subsets]]
  image_dir = 'C:\\fuga'
  class_tokens = 'fuga boy'
  keep_tokens = 3

  [[datasets.subsets]]
  is_reg = true
  image_dir = 'C:\\reg'
  class_tokens = 'human'
  keep_tokens = 1

# This is a fine-tuning dataset
[[datasets]]
resolution = [768, 768]
batch_size = 2

  [[datasets.subsets]]
  image_dir = 'C:\\piyo'
  metadata_file = 'C:\\piyo\\piyo_md.json'
  # This subset uses keep_tokens = 1 (the value of [general])
"""
MUSUBI = """
[general]
resolution = [960, 544]
caption_extension = ".txt"
batch_size = 1
enable_bucket = true
bucket_no_upscale = false

[[datasets]]
image_directory = "/path/to/image_dir"
cache_directory = "/path/to/cache_directory"
num_repeats = 2
control_directory = "/path/to/control_dir"
"""
MUSUBI_LIST = """
[general]
resolution = [960, 544]

[[datasets]]
image_jsonl_file = "/path/to/metadata.jsonl"
cache_directory = "/path/to/cache_directory" # required for metadata jsonl file
num_repeats = 1
"""
AI_TOOLKIT = """---
job: extension
config:
  name: "my_first_qwen_image_edit_lora_v1"
  process:
    - type: 'sd_trainer'
      training_folder: "output"
      trigger_word: "p3r5on"
      datasets:
        - folder_path: "/path/to/images/folder"
          control_path: "/path/to/control/images"
          caption_ext: "txt"
          caption_dropout_rate: 0.05  # will drop out the caption 5% of time
          shuffle_tokens: false  # shuffle caption order, split by commas
          cache_latents_to_disk: true  # leave this true unless you know what you're doing
          resolution: [ 512, 768, 1024 ]  # flux enjoys multiple resolutions
      train:
        batch_size: 1
"""
STRUCTURED = {
    "fixed": {"quality": "newest, safe", "series": "project name", "artist": "@artist name"},
    "character": {"name": "character name", "variant": ""},
    "from_path": {"appearance": ["blonde hair", "casual clothes"]},
    "ai_output": {"count": "1girl", "appearance": ["long hair"], "tags": ["smile"], "environment": [], "nl": ""},
}
REGULARISATION = FolderOptions(regularisation=True)

CASES = {
    "kohya's folder names": Case(
        "kohya-ss/sd-scripts docs/train_README-en.md, DreamBooth, class+identifier method",
        {name.removeprefix("train/"): text for name, text in FROGS.items()},
        (
            Part({"1": "ohwx, sls frog", "2": "ohwx, sls frog"}, 60),
            Part({"r": "frog"}, 3, options=REGULARISATION),
        ),
        ("20_sls frog (20 x)", "1_frog (1 x, regularisation without trigger_words)"),
        options={"repeats": 3, "trigger_words": "ohwx"},
    ),
    "kohya's folder names with captions, and 1_reg": Case(
        "kohya-ss/sd-scripts docs/train_README-en.md: captions in files come before the class",
        {"10_cat/a.png": None, "10_cat/a.txt": "tabby", "1_reg/b.png": None, "1_reg/b.txt": "cat", "c.png": None}
        | {"c.txt": "beside"},
        (Part({"c": "beside"}), Part({"a": "tabby"}, 10), Part({"b": "cat"}, options=REGULARISATION)),
    ),
    "AnimaLoraStudio's folders": Case(
        "WalkingMeatAxolotl/AnimaLoraStudio runtime/training/dataset.py, _parse_folder_meta and _scan",
        {"1024px_2_data/a.png": None, "1024px_2_data/a.txt": "1girl", "768px_x/b.png": None, "768px_x/b.json": "{}"}
        | {"768px_x/b.json": json.dumps(STRUCTURED), "768px_x/b.mask": None, "masks/1024px_2_data/a.png": None},
        (
            Part({"a": "1girl"}, 2, masks={"a": "a.png"}),
            Part(
                {
                    "b": "newest, safe, 1girl, character name, project name, @artist name, blonde hair, casual "
                    "clothes, long hair, smile"
                },
                masks={"b": "b.mask"},
            ),
        ),
        ("sizes such as 1024px aren't used", "Captions are read from other files than .txt: 768px_x/b.json."),
    ),
    "kohya's TOML": Case(
        "kohya-ss/sd-scripts docs/config_README-en.md, Overview",
        {"dataset.toml": HOGE, "hoge/a.png": None, "hoge/b.png": None, "hoge/b.txt": "1, 2, 3, 4", "fuga/c.png": None}
        | {"reg/d.png": None, "piyo/e.png": None, "piyo/piyo_md.json": '{"e": {"caption": "a bird", "tags": "x, y"}}'},
        (
            Part({"a": "hoge girl", "b": "1, 2, 3, 4"}, forms=CaptionOptions(shuffle_tags=True, keep_tokens=2)),
            Part({"c": "fuga boy"}, forms=CaptionOptions(shuffle_tags=True, keep_tokens=3)),
            Part({"d": "human"}, options=REGULARISATION, forms=CaptionOptions(shuffle_tags=True, keep_tokens=1)),
            Part({"e": "a bird, x, y"}, forms=CaptionOptions(shuffle_tags=True, keep_tokens=1)),
        ),
        ("dataset.toml' of kohya's scripts says (4 folders)", "Not used", "resolution, batch_size"),
    ),
    "musubi-tuner's TOML with control pictures": Case(
        "kohya-ss/musubi-tuner docs/dataset_config.md, Image Dataset with Caption Text Files, with Control Images",
        {"musubi.toml": MUSUBI, "image_dir/image1.png": None, "image_dir/image1.txt": "one"}
        | {"image_dir/image2.png": None, "image_dir/image2.txt": "two", "control_dir/image1.png": None}
        | {"control_dir/image2_0.png": None, "control_dir/image2_1.png": None},
        (
            Part(
                {"image1": "one", "image2": "two"},
                2,
                controls={"image1": ["image1.png"], "image2": ["image2_0.png", "image2_1.png"]},
            ),
        ),
        ("control_directory as control_folder", "cache_directory"),
    ),
    "musubi-tuner's TOML with a list": Case(
        "kohya-ss/musubi-tuner docs/dataset_config.md, Image Dataset with Metadata JSONL File",
        {
            "musubi.toml": MUSUBI_LIST,
            "metadata.jsonl": lines(
                {"image_path": "/path/to/image1.png", "control_path": "/path/to/control1.png", "caption": "one"},
                {"image_path": "/path/to/image2.png", "control_path": "/path/to/control1.png", "caption": "two"},
            ),
            **dict.fromkeys(("image1.png", "image2.png", "control1.png")),
        },
        (Part({"image1": "one", "image2": "two"}, controls={"image1": ["control1.png"], "image2": ["control1.png"]}),),
    ),
    "ai-toolkit's dataset block": Case(
        "ostris/ai-toolkit config/examples/train_lora_qwen_image_edit_32gb.yaml and train_lora_flux_24gb.yaml",
        {"config.yaml": AI_TOOLKIT, "folder/a.png": None, "folder/a.txt": "a photo of [trigger]", "folder/b.png": None}
        | {"folder/b.txt": "outside", "images/a.png": None, "images/b.png": None},
        (
            Part(
                {"a": "a photo of p3r5on", "b": "p3r5on, outside"},
                forms=CaptionOptions(caption_dropout=0.05),
                controls={"a": ["a.png"], "b": ["b.png"]},
            ),
        ),
        ("config.yaml' of ai-toolkit says", "trigger_word as trigger word", "cache_latents_to_disk"),
    ),
    "metadata.jsonl": Case(
        "Hugging Face Datasets, ImageFolder with metadata.jsonl (as quoted in diffusers' text_to_image training)",
        {"train/0001.png": None, "train/0002.png": None, "train/sub/0003.png": None}
        | {
            "train/metadata.jsonl": lines(
                {"file_name": "0001.png", "text": "This is a golden retriever playing with a ball"},
                {"file_name": "0002.png", "text": "A german shepherd"},
                {"file_name": "sub/0003.png", "text": "One chihuahua", "split": "train"},
            )
        },
        (
            Part(
                {
                    "0001": "This is a golden retriever playing with a ball",
                    "0002": "A german shepherd",
                    "0003": "One chihuahua",
                }
            ),
        ),
        ("3 captions come from metadata.jsonl; these fields aren't used: split.",),
    ),
    "metadata.csv": Case(
        "Hugging Face Datasets, ImageFolder with metadata.csv (file_name,text)",
        {"color.png": None, "b.png": None, "metadata.csv": 'file_name,text\ncolor.png,"a dog, red"\nb.png,a cat\n'},
        (Part({"color": "a dog, red", "b": "a cat"}),),
    ),
    "one captions file by name": Case(
        "Flickr8k's captions.txt: a head, then image,caption",
        {"a.png": None, "b.png": None, "captions.txt": "image,caption\na.png,A child in a pink dress .\nb.png, x, y\n"},
        (Part({"a": "A child in a pink dress .", "b": "x, y"}),),
    ),
    "one text for all": Case(
        "OneTrainer wiki, Concepts, Prompt Source: From single text file",
        {"a.png": None, "b.png": None, "prompts.txt": "a photo of a fox\na fox\n"},
        (Part(dict.fromkeys("ab", "a photo of a fox\na fox"), forms=CaptionOptions(caption_per_line=True)),),
        ("2 captions come from prompts.txt",),
    ),
    "OneTrainer's companions": Case(
        "Nerogar/OneTrainer docs: -masklabel.png and -condlabel.png beside 0001.png",
        {"0001.png": None, "0001.txt": "x", "0001-masklabel.png": None, "0001-condlabel.png": None, "2.png": None}
        | {"2.txt": "y"},
        (
            Part(
                {"0001": "x", "2": "y"}, masks={"0001": "0001-masklabel.png"}, controls={"0001": ["0001-condlabel.png"]}
            ),
        ),
        ("1 of 2 has masks beside it", "1 of 2 has control pictures beside it"),
    ),
    "masks and control pictures by folder and end": Case(
        "kohya-ss/musubi-tuner docs/dataset_config.md: numbered control images; masks/ of AnimaLoraStudio",
        {"a.png": None, "a.txt": "x", "a_1.png": None, "a_0.png": None, "masks/a.png": None, "b.png": None}
        | {"b.txt": "y", "b_mask.png": None, "conditioning/b.png": None, "masks/nobody.png": None},
        (
            Part(
                {"a": "x", "b": "y"},
                masks={"a": "a.png", "b": "b_mask.png"},
                controls={"a": ["a_0.png", "a_1.png"], "b": ["b.png"]},
            ),
        ),
        ("belong to no picture and are ignored: masks/nobody.png.",),
    ),
}


@pytest.fixture
def make(tmp_path):
    def write(files: dict[str, str | None], name: str = "photos") -> Path:
        for file, text in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                Image.new("RGB", (8, 8)).save(path, "PNG")
            else:
                path.write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def facts(entry: ImageEntry | VideoEntry) -> Any:
    """Return the parts of an entry that training takes, without the folder that it comes from."""
    variants = entry.variants and replace(entry.variants, class_texts=())
    beside = (entry.mask and entry.mask.name, [c.name for c in getattr(entry, "controls", ())])
    return (
        entry.path.stem,
        entry.caption,
        entry.repeats,
        entry.options,
        variants,
        beside,
        getattr(entry, "extraction", 0),
    )


def by_hand(make, part: Part, name: str) -> list[Any]:
    """The facts of a folder made by hand; masks and control pictures are compared by name."""
    clips = part.extraction is not None
    ending = ".mp4" if clips else ".png"
    files = {f"{stem}{ending}": "film" if clips else None for stem in part.captions}
    folder = make(files | {f"{stem}.txt": text for stem, text in part.captions.items()}, name)
    scan = partial(scan_videos, folder, part.extraction) if part.extraction else partial(scan_images, folder)
    entries = scan(
        repeats=part.repeats, trigger_words=part.trigger_words, options=part.options, captions=part.forms
    ).entries
    return [
        (*facts(entry)[:5], (part.masks.get(entry.path.stem), part.controls.get(entry.path.stem, [])), facts(entry)[6])
        for entry in entries
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_another_trainer_equals_one_made_by_hand(make, name):
    case = CASES[name]
    dataset = scan_images(make(case.files), places=Places(case.layout), **case.options)
    expected = [entry for n, part in enumerate(case.parts) for entry in by_hand(make, part, f"hand{n}")]
    key = lambda entry: (entry[0], entry[2])  # noqa: E731
    assert sorted(map(facts, dataset.entries), key=key) == sorted(expected, key=key)
    notes = "\n".join(dataset.notes)
    assert not [text for text in case.said if text not in notes], notes


CLIPS = """
[general]
resolution = [960, 544]
caption_extension = ".txt"

[[datasets]]
video_directory = "/path/to/video_dir"
cache_directory = "/path/to/cache_directory" # recommended to set cache directory
target_frames = [1, 25, 45]
frame_extraction = "head"
source_fps = 30.0 # optional, source fps for videos in the directory, decimal number

[[datasets]]
video_directory = "/path/to/video_dir2"
cache_directory = "/path/to/cache_directory2"
frame_extraction = "full"
max_frames = 45

[[datasets]]
image_directory = "/path/to/image_dir"
"""


def test_clips_of_musubi_tuner_equal_a_folder_made_by_hand(make):
    """kohya-ss/musubi-tuner docs/dataset_config.md, Sample for Video Dataset with Caption Text Files."""
    folder = make(
        {"x.toml": CLIPS, "video_dir/a.mp4": "film", "video_dir/a.txt": "x", "video_dir2/b.mp4": "film"}
        | {"video_dir2/b.txt": "y", "image_dir/c.png": None, "image_dir/c.txt": "z"}
    )
    dataset = scan_videos(folder, Extraction(fps=16))
    parts = (
        Part({"a": "x"}, extraction=Extraction((1, 25, 45), 16)),
        Part({"b": "y"}, extraction=Extraction((25,), 16, "full", max_frames=45)),
    )
    assert [*map(facts, dataset.entries)] == [e for n, part in enumerate(parts) for e in by_hand(make, part, f"h{n}")]
    assert any("1 folder of 'x.toml' holds no clips and is left out; chain Training Images" in n for n in dataset.notes)
    assert [e.path.name for e in scan_images(folder).entries] == ["c.png"]


def pack(folder: Path, archive: Path, members: list[str]) -> None:
    """Write files of a folder into an archive, in WebDataset's order: those of one sample follow one another."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as packed:
            for name in members:
                packed.write(folder / name, name)
        return
    with tarfile.open(archive, "w:gz" if archive.name.endswith("gz") else "w") as tar:
        for name in members:
            tar.add(folder / name, name)


@pytest.mark.parametrize("ending", [".zip", ".tar", ".tar.gz"])
def test_archives_equal_a_folder_made_by_hand(make, tmp_path, ending):
    """WebDataset: files of one basename make up a sample, captions in .txt or .json (Hugging Face Hub, WebDataset)."""
    captions = {"000.txt": "one", "001.json": '{"caption": "two", "width": 8}', "001.cls": "3"}
    source = make({"000.png": None, "001.png": None} | captions, "source")
    archive = tmp_path / "photos" / f"00000{ending}"
    pack(source, archive, sorted(("000.png", "001.png", *captions)))
    places = Places(open_archive=lambda path: unpack(path, tmp_path / "cache", lambda: None))
    dataset = scan_images(tmp_path / "photos", places=places)
    assert [*map(facts, dataset.entries)] == by_hand(make, Part({"000": "one", "001": "two"}), "hand")
    assert [entry.name for entry in dataset.entries] == [f"00000{ending}/000.png", f"00000{ending}/001.png"]
    assert any("was unpacked into the cache, 2 files. Left out of it: 001.cls." in note for note in dataset.notes)
    assert scan_images(tmp_path / "photos", places=places).entries == dataset.entries
    fingerprint = folder_fingerprint(tmp_path / "photos", ".txt")
    pack(make({"000.txt": "another"}, "source"), archive, ["000.png", "000.txt"])
    assert [e.caption for e in scan_images(tmp_path / "photos", places=places).entries] == ["another"]
    assert folder_fingerprint(tmp_path / "photos", ".txt") != fingerprint


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("kohya folders", "layout is 'kohya folders', but the folder 'photos' holds no folder with a name such as"),
        ("dataset file", "holds no dataset file"),
        ("captions file", "holds no list such as metadata.jsonl"),
        ("archives", "holds no archive"),
        ("other", "layout is 'other'; choose one of auto, plain,"),
    ],
)
def test_a_layout_that_is_not_there_is_told(make, layout, message):
    folder = make({"a.png": None, "a.txt": "x"})
    with pytest.raises(ValueError, match=message):
        scan_images(folder, places=Places(layout))


def test_plain_takes_every_picture_with_the_caption_beside_it(make):
    files = {f"10_fox/{n}.png": None for n in ("a", "a_0")} | {"10_fox/a.txt": "x", "10_fox/a_0.txt": "y"}
    folder = make(files | {"k.toml": HOGE})
    dataset = scan_images(folder, places=Places("plain"))
    assert [(e.path.name, e.caption, e.repeats) for e in dataset.entries] == [("a.png", "x", 1), ("a_0.png", "y", 1)]
    # In auto a numbered picture with a caption of its own is no control picture.
    assert [e.repeats for e in scan_images(folder).entries] == [10, 10]


@pytest.mark.parametrize("name", ["01_front", "2024_holiday", "12", "fox_10"])
def test_other_numbers_in_names_of_folders_say_no_repeats(make, name):
    dataset = scan_images(make({f"{name}/a.png": None, f"{name}/a.txt": "x"}))
    assert [e.repeats for e in dataset.entries] == [1] and not dataset.notes


def test_the_layout_says_itself_once_and_the_fingerprint_follows_it(make):
    case = CASES["metadata.jsonl"]
    folder = make(case.files)
    fingerprint = folder_fingerprint(folder, ".txt")
    (folder / "train" / "metadata.jsonl").write_text(lines({"file_name": "0001.png", "text": "another"}))
    assert folder_fingerprint(folder, ".txt") != fingerprint
