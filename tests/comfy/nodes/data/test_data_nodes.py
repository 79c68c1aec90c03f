"""The data nodes and the folders that they may read."""

import json
import os
from pathlib import Path

import folder_paths
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from tessera.data.folders.dataset import Dataset, ImageEntry
from tessera.data.folders.options import FolderOptions
from tessera.data.media.clip_windows import Extraction
from tessera.data.samples import TrainingData
from tessera.nodes.common import folder_access
from tessera.nodes.data import prepare
from tiny.data.films import write_film


@pytest.fixture
def home(tmp_path, monkeypatch):
    """ComfyUI's folders, empty."""
    for name in ("input", "user", "datasets", "elsewhere", "temp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path / "input"))
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "datasets", ([str(tmp_path / "datasets")], set()))
    return tmp_path


def put_pictures(folder, sizes=((64, 96), (96, 64)), captions=True):
    folder.mkdir(parents=True, exist_ok=True)
    for index, (width, height) in enumerate(sizes):
        pixels = np.random.default_rng(index).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
        if captions:
            (folder / f"{index}.txt").write_text(f"picture {index}")
    return folder


def allow(home, *folders):
    (home / "user" / "tessera.json").write_text(json.dumps({"allowed_folders": [str(f) for f in folders]}))


def run(node, **inputs):
    with torch.inference_mode():
        return node.execute(**inputs)


def test_folders_with_pictures_under_input_and_datasets_are_offered_and_open(home):
    put_pictures(home / "input" / "set" / "inner")
    put_pictures(home / "datasets" / "other")
    (home / "input" / "empty").mkdir()
    put_pictures(home / "input" / ".hidden")
    offered = folder_access.list_image_folders()
    assert offered == ["datasets/other", "input/set", "input/set/inner"]
    options = prepare.TesseraImageFolder.INPUT_TYPES()["required"]["folder"][1]["options"]
    assert options == [*offered, folder_access.TRY_IT]
    for choice in offered:
        assert folder_access.resolve_folder(choice).samefile(home / choice)
        assert prepare.TesseraImageFolder.validate_inputs(folder=choice) is True


def test_the_list_of_folders_is_kept_for_ten_seconds_and_follows_the_settings(home, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(folder_access.time, "monotonic", lambda: clock[0])
    put_pictures(home / "input" / "a")
    assert folder_access.list_image_folders() == ["input/a"]
    put_pictures(home / "input" / "b")
    assert folder_access.list_image_folders() == ["input/a"]
    assert prepare.TesseraImageFolder.validate_inputs(folder="input/b") is True  # needs no list
    clock[0] += folder_access.LIST_SECONDS + 1
    assert folder_access.list_image_folders() == ["input/a", "input/b"]
    put_pictures(home / "elsewhere")
    allow(home, home / "elsewhere")
    assert (home / "elsewhere").as_posix() in folder_access.list_image_folders()


def test_a_walk_that_takes_longer_than_its_list_is_kept_is_not_made_again_at_once(home, monkeypatch):
    clock = [1000.0]
    walks = []
    walk = folder_access._list_folders

    def slow(*roots):
        walks.append(roots)
        clock[0] += 6 * folder_access.LIST_SECONDS
        return walk(*roots)

    monkeypatch.setattr(folder_access.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(folder_access, "_list_folders", slow)
    put_pictures(home / "input" / "a")
    assert folder_access.list_image_folders() == folder_access.list_image_folders() == ["input/a"] and len(walks) == 1


def test_the_pictures_of_the_pack_are_read_and_nothing_beside_them(home):
    folder = folder_access.resolve_folder(folder_access.TRY_IT)
    assert folder == folder_access.EXAMPLES / "try_it" and len(list(folder.glob("*.png"))) == 3
    assert folder_access.is_allowed_file(folder / "boat.png")
    for outside in ("examples", "examples/..", "examples/../models", "examples/try_it/../../tests"):
        with pytest.raises(ValueError, match="can't be used"):
            folder_access.resolve_folder(outside)


def test_nodes_without_a_folder_name_the_one_to_make(home):
    for node, place, extra in (
        (prepare.TesseraImageFolder, "input/my_pictures", [folder_access.TRY_IT]),
        (prepare.TesseraVideoFolder, "input/my_clips", []),
    ):
        assert node.INPUT_TYPES()["required"]["folder"][1]["options"] == [place, *extra]
        assert f"{place!r} does not exist; put your pictures and captions there" in node.validate_inputs(place)


def test_the_list_of_folders_has_an_end(home, monkeypatch):
    deep = home / "input" / "1" / "2" / "3" / "4" / "5" / "6"
    put_pictures(deep / "7")
    assert folder_access.list_image_folders() == []
    assert folder_access.resolve_folder("input/1/2/3/4/5/6/7").is_dir()
    folder_access._listed.clear()
    put_pictures(deep)
    assert folder_access.list_image_folders()[-1] == "input/1/2/3/4/5/6"
    folder_access._listed.clear()
    monkeypatch.setattr(folder_access, "MOST_WALKED", 6)
    assert folder_access.list_image_folders() == []


@pytest.mark.parametrize("subpath", ["/server/share", "//server/share", "\\\\server\\share", "C:x", "C:/x", "/etc"])
def test_a_name_that_leaves_its_root_is_refused_before_any_file_is_looked_at(home, subpath, monkeypatch):
    def touched(*args):
        raise AssertionError("the file system was asked")

    monkeypatch.setattr(folder_access, "_is_within", touched)
    with pytest.raises(ValueError, match="can't be used"):
        folder_access.resolve_folder(f"input/{subpath}")


def test_linked_inputs_whose_values_are_not_known_yet_pass_the_door(home):
    from tessera.nodes.model import load

    assert prepare.TesseraImageFolder.validate_inputs(folder=None) is True
    assert load.TesseraLoadDiffusionModel.validate_inputs(unet_name=None) is True
    for inputs in ({"folder": None, "caption_extension": ".txt"}, {"folder": "input/a", "caption_extension": None}):
        changed = prepare.TesseraImageFolder.fingerprint_inputs(**inputs)
        assert changed != changed  # NaN: taken as changed each time


def test_folders_that_the_settings_allow_are_offered_and_open(home):
    put_pictures(home / "elsewhere" / "mine")
    choice = (home / "elsewhere" / "mine").as_posix()
    with pytest.raises(ValueError, match="can't be used"):
        folder_access.resolve_folder(choice)
    allow(home, home / "elsewhere")
    assert folder_access.list_image_folders() == [(home / "elsewhere").as_posix(), choice]
    assert folder_access.resolve_folder(choice) == Path(choice)
    with pytest.raises(ValueError, match="can't be used"):
        folder_access.resolve_folder((home / "elsewhere" / ".." / "user").as_posix())


def test_an_absolute_path_inside_input_is_taken(home):
    put_pictures(home / "input" / "set")
    place = home / "input" / "set"
    assert folder_access.resolve_folder(place.as_posix()) == place
    with pytest.raises(ValueError, match="can't be used"):
        folder_access.resolve_folder((home / "input").as_posix())


def test_any_other_folder_is_refused_whether_it_is_there_or_not(home):
    put_pictures(home / "elsewhere")
    put_pictures(home / "input" / "set")
    os.symlink(home / "elsewhere", home / "input" / "link")
    absolute = (home / "elsewhere").as_posix()
    refused = [absolute, "/no/such/folder", "C:\\x", "..", "", "user/x", "input", "input/", "input/link", "input/a\0b"]
    refused += ["input/../elsewhere", "input/set/../../elsewhere", "..\\elsewhere", "input\\..\\elsewhere"]
    for choice in refused:
        with pytest.raises(
            ValueError, match=r"can't be used, because it isn't inside ComfyUI's input or datasets folder; mov"
        ):
            folder_access.resolve_folder(choice)
        with pytest.raises(ValueError, match="can't be used"):  # also where the check at the door is passed by
            run(prepare.TesseraImageFolder, folder=choice)
        assert "can't be used" in prepare.TesseraImageFolder.validate_inputs(folder=choice)
    for choice in (["a", "b", "c"], float("nan"), 7, {}, "x" * 10**6):  # as a hand-written workflow gives them
        message = prepare.TesseraImageFolder.validate_inputs(folder=choice, control_folder=choice, mask_folder=choice)
        assert message.startswith(("folder: The folder is ", "folder: The folder 'xxx")) and len(message) < 400
        assert prepare.TesseraVideoFolder.validate_inputs(folder=choice) == message
    assert "input/link" not in folder_access.list_image_folders()
    with pytest.raises(ValueError, match=r"The folder 'input/gone' does not exist; put your pictures"):
        folder_access.resolve_folder("input/gone")


def test_folders_with_video_files_are_offered_to_training_clips_and_others_refused(home):
    put_pictures(home / "input" / "pictures")
    for name in ("films/inner", "both"):
        (home / "input" / name).mkdir(parents=True)
        (home / "input" / name / "a.mp4").write_bytes(b"1")
    put_pictures(home / "input" / "both")
    assert folder_access.list_video_folders() == ["input/both", "input/films", "input/films/inner"]
    assert folder_access.list_image_folders() == ["input/both", "input/pictures"]
    inputs = prepare.TesseraVideoFolder.INPUT_TYPES()
    assert inputs["required"]["folder"][1]["options"] == folder_access.list_video_folders()
    for choice in ("/etc", "input/../elsewhere"):
        assert "can't be used" in prepare.TesseraVideoFolder.validate_inputs(folder=choice)
        with pytest.raises(ValueError, match="can't be used"):
            run(prepare.TesseraVideoFolder, folder=choice)
        assert "can't be used" in prepare.TesseraImageFolder.validate_inputs(folder="input/both", control_folder=choice)
        with pytest.raises(ValueError, match="can't be used"):
            run(prepare.TesseraImageFolder, folder="input/both", control_folder=choice)
    for none in ("none", "", None):
        assert prepare.TesseraImageFolder.validate_inputs(folder="input/both", control_folder=none) is True
        (dataset,) = run(prepare.TesseraImageFolder, folder="input/both", control_folder=none).result
        assert dataset.entries[0].controls == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"the file tessera.json in ComfyUI's user folder can't be read as JSON \(.*; fix it or delete it"),
        ("[]", r"no list of absolute folders"),
        ('{"allowed_folders": "/x"}', r"no list of absolute folders"),
        ('{"allowed_folders": ["relative"]}', r"no list of absolute folders"),
    ],
)
def test_a_broken_settings_file_is_told_and_takes_nothing_else_away(home, text, message):
    put_pictures(home / "input" / "set")
    (home / "user" / "tessera.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        folder_access.read_settings()
    assert folder_access.list_image_folders() == ["input/set"]
    assert folder_access.resolve_folder("input/set").is_dir()


def test_training_images_chains_and_notices_changes(home):
    put_pictures(home / "input" / "a")
    put_pictures(home / "input" / "b", sizes=((64, 64),))
    (first,) = run(prepare.TesseraImageFolder, folder="input/a").result
    (dataset,) = run(
        prepare.TesseraImageFolder,
        folder="input/b",
        caption_extension=".txt",
        repeats=4,
        trigger_words="ohwx",
        dataset=first,
    ).result
    assert isinstance(dataset, Dataset)
    assert [(p.name, p.caption, p.repeats) for p in dataset.entries] == [
        ("0.png", "picture 0", 1),
        ("1.png", "picture 1", 1),
        ("0.png", "ohwx, picture 0", 4),
    ]
    inputs = {"folder": "input/a", "caption_extension": ".txt", "repeats": 1, "trigger_words": ""}
    fingerprint = prepare.TesseraImageFolder.fingerprint_inputs(**inputs)
    assert prepare.TesseraImageFolder.fingerprint_inputs(**inputs, dataset=None) == fingerprint
    (home / "input" / "a" / "1.txt").write_text("a new caption")
    assert prepare.TesseraImageFolder.fingerprint_inputs(**inputs) != fingerprint


def test_training_images_takes_control_pictures_and_notices_their_changes(home):
    put_pictures(home / "input" / "after")
    controls = put_pictures(home / "input" / "before", captions=False)
    inputs = {"folder": "input/after", "control_folder": "input/before"}
    assert prepare.TesseraImageFolder.validate_inputs(**inputs) is True
    (dataset,) = run(prepare.TesseraImageFolder, **inputs).result
    assert [[path.name for path in picture.controls] for picture in dataset.entries] == [["0.png"], ["1.png"]]
    name = prepare.TesseraImageFolder.fingerprint_inputs(**inputs)
    assert name != prepare.TesseraImageFolder.fingerprint_inputs(folder="input/after")
    os.utime(controls / "0.png", (1, 1))
    assert prepare.TesseraImageFolder.fingerprint_inputs(**inputs) != name


def test_training_images_takes_masks_and_how_pictures_are_shown_and_notices_their_changes(home):
    put_pictures(home / "input" / "own")
    masks = put_pictures(home / "input" / "masks", captions=False)
    inputs = {"folder": "input/own", "mask_folder": "input/masks"}
    assert prepare.TesseraImageFolder.validate_inputs(**inputs) is True
    folder_options = {"unmasked_weight": 0.2, "flip": "horizontal", "crops": 3, "crop_zoom": 1.5, "loss_weight": 0.5}
    folder_options |= {"sample_ratio": 0.25}
    arguments = inputs | folder_options | {"trigger_words": "ohwx", "class_word": "man"}
    (dataset,) = run(prepare.TesseraImageFolder, **arguments).result
    assert [entry.mask for entry in dataset.entries] == [masks / "0.png", masks / "1.png"]
    assert dataset.entries[0].options == FolderOptions(**folder_options, class_word="man")
    assert dataset.entries[1].variants.class_texts == ("man, picture 1",)
    (regularised,) = run(prepare.TesseraImageFolder, folder="input/own", regularisation=True, alpha_mask=True).result
    assert regularised.entries[0].options == FolderOptions(regularisation=True, alpha_mask=True)
    name = prepare.TesseraImageFolder.fingerprint_inputs(**inputs)
    assert name != prepare.TesseraImageFolder.fingerprint_inputs(folder="input/own")
    os.utime(masks / "0.png", (1, 1))
    assert prepare.TesseraImageFolder.fingerprint_inputs(**inputs) != name
    for node in (prepare.TesseraImageFolder, prepare.TesseraVideoFolder):
        (home / "input" / "own" / "a.mp4").write_bytes(b"1")
        assert "can't be used" in node.validate_inputs(folder="input/own", mask_folder="/etc")
        with pytest.raises(ValueError, match="can't be used"):
            run(node, folder="input/own", mask_folder="input/../elsewhere")
        changed = node.fingerprint_inputs(folder="input/own", mask_folder=None)
        assert changed != changed


def test_training_clips_take_one_mask_for_all_frames(home):
    (home / "input" / "f").mkdir()
    write_film(home / "input" / "f" / "film.mp4", 9, caption="running")
    masks = put_pictures(home / "input" / "masks", sizes=((64, 48),), captions=False)
    (masks / "0.png").rename(masks / "film.png")
    arguments = {"folder": "input/f", "mask_folder": "input/masks", "flip": "horizontal", "regularisation": True}
    (dataset,) = run(prepare.TesseraVideoFolder, **arguments, loss_weight=2.0, crops=2, unmasked_weight=0.1).result
    (part,) = run(prepare.TesseraVideoFolder, folder="input/f", sample_ratio=0.5).result
    assert part.entries[0].options == FolderOptions(sample_ratio=0.5)
    expected = {"flip": "horizontal", "regularisation": True, "loss_weight": 2.0, "crops": 2, "unmasked_weight": 0.1}
    assert dataset.entries[0].mask == masks / "film.png" and dataset.entries[0].options == FolderOptions(**expected)


def test_training_clips_chains_with_pictures_and_notices_changes(home):
    put_pictures(home / "input" / "a")
    write_film(home / "input" / "a.mp4", 3)  # above the folder, no part of it
    (home / "input" / "f").mkdir()
    film = write_film(home / "input" / "f" / "film.mp4", 9, caption="running")
    (first,) = run(prepare.TesseraImageFolder, folder="input/a").result
    inputs = {"folder": "input/f", "target_frames": "1, 8", "fps": 8.0, "extraction": "slide", "frame_stride": 3}
    (dataset,) = run(prepare.TesseraVideoFolder, **inputs, dataset=first, trigger_words="ohwx", repeats=2).result
    assert [type(entry) for entry in dataset.entries[:2]] == [ImageEntry, ImageEntry]
    clip = dataset.entries[2]
    assert (clip.name, clip.caption, clip.repeats) == ("film.mp4", "ohwx, running", 2)
    assert clip.extraction == Extraction((1, 5), 8.0, "slide", 3, 4, 81)
    assert dataset.notes == (
        "target_frames has to be 4n + 1 (for MiniMax H3 17n + 5), as the VAE takes: lowered 8 to 5.",
    )
    (alone,) = run(prepare.TesseraVideoFolder, folder="input/f").result
    assert alone.entries[0].extraction == Extraction() and Extraction().target_frames == (25,)
    name = prepare.TesseraVideoFolder.fingerprint_inputs(folder="input/f")
    (film.with_suffix(".txt")).write_text("walking slowly")
    assert prepare.TesseraVideoFolder.fingerprint_inputs(folder="input/f") != name
    unknown = prepare.TesseraVideoFolder.fingerprint_inputs(folder=None)
    assert unknown != unknown and prepare.TesseraVideoFolder.validate_inputs(folder=None) is True
    with pytest.raises(ValueError, match=r"target_frames is '25.5'; write the numbers"):
        run(prepare.TesseraVideoFolder, folder="input/f", target_frames="25.5")


def test_prepare_gives_data_a_picture_of_the_plan_and_a_summary_that_history_can_carry(home, tiny_vae, tiny_clip):
    put_pictures(home / "input" / "a")
    (dataset,) = run(prepare.TesseraImageFolder, folder="input/a").result
    node = prepare.TesseraPrepareDataset.PREPARE_CLASS_CLONE(None)  # as the executor calls it
    output = run(node, dataset=dataset, vae=tiny_vae, clip=tiny_clip, megapixels=0.01)
    prepared, plan, text = output.result
    assert isinstance(prepared, TrainingData) and len(prepared.samples) == 2
    assert plan.ndim == 4 and plan.shape[0] == 1 and plan.shape[3] == 3 and plan.dtype == torch.float32
    assert 0 <= plan.min() and plan.max() <= 1
    assert "Pictures: 2" in text and f"{prepared.samples[0].tokens} tokens" in text
    assert all(isinstance(value, list) for value in output.ui.values())
    ui = json.loads(json.dumps(output.ui, allow_nan=False))
    assert ui["tessera"][0]["summary"] == text and len(ui["images"]) == 1
    assert sorted((home / "user" / "tessera" / "cache").rglob("*.safetensors"))


def test_latents_of_core_become_training_data():
    latents = [{"samples": torch.zeros(2, 16, 8, 12)}]
    positive = [[[torch.zeros(1, 256, 8), {"pooled_output": torch.zeros(1, 4)}]]]
    output = run(prepare.TesseraLatentsToDataset, latents=latents, positive=positive, max_graphs=[1])
    (data,) = output.result
    assert isinstance(data, TrainingData) and [s.tokens for s in data.samples] == [24, 24]
    assert output.ui == {"tessera": [{"pictures": 2, "notes": []}]}


@pytest.mark.parametrize("node", prepare.NODES, ids=lambda node: node.__name__)
def test_every_input_says_what_it_does(home, node):
    input_types = node.INPUT_TYPES()
    for inputs in (input_types.get("required", {}), input_types.get("optional", {})):
        for name, entry in inputs.items():
            assert len(entry[1]["tooltip"]) > 30, name


def test_the_real_server_prepares_a_folder_and_refuses_others_at_the_door(server, tiny_loaders):
    from comfy_server import ServerFailure

    put_pictures(server.base / "input" / "served")
    prompt = {
        **{name: loader for name, loader in tiny_loaders.items() if name != "model"},
        "folder": {"class_type": "TesseraImageFolder", "inputs": {"folder": "input/served"}},
        "prepare": {
            "class_type": "TesseraPrepareDataset",
            "inputs": {"dataset": ["folder", 0], "vae": ["vae", 0], "clip": ["clip", 0], "megapixels": 0.02},
        },
        "show": {"class_type": "PreviewAny", "inputs": {"source": ["prepare", 2]}},
    }
    outputs = server.run(prompt)["outputs"]
    assert outputs["prepare"]["tessera"][0]["summary"].startswith("Pictures: 2. One epoch")
    assert len(outputs["prepare"]["images"]) == 1
    linked = prompt | {"ending": {"class_type": "PrimitiveString", "inputs": {"value": ".txt"}}}
    inputs = {"folder": "input/served", "caption_extension": ["ending", 0], "caption_dropout": 0.1}
    linked["folder"] = {"class_type": "TesseraImageFolder", "inputs": inputs}
    summary = server.run(linked)["outputs"]["prepare"]["tessera"][0]["summary"]
    assert (
        summary.startswith("Pictures: 2. One epoch")
        and "The empty prompt takes a caption's place in 10 % of showings." in summary
    )
    (server.base / "input" / "served" / "1.txt").unlink()
    with pytest.raises(ServerFailure, match=r"1 of 2 pictures in 'served' has no .txt caption file: 1.png; add one"):
        server.run(prompt)
    for choice in ("/etc", "input/../user", "input/nowhere"):
        prompt["folder"]["inputs"]["folder"] = choice
        with pytest.raises(ServerFailure, match="can't be used|does not exist"):
            server.run(prompt)


def test_the_real_server_prepares_clips_for_wan_with_a_start_picture(server):
    folder = server.base / "input" / "films"
    folder.mkdir()
    write_film(folder / "a.mp4", 12, size=(48, 80), caption="a grey film")
    prompt = {
        "clip": {"class_type": "TesseraTinyClipLoader", "inputs": {"clip_name1": tiny.WAN_NAMES["clip_name"]}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": tiny.WAN_NAMES["vae_name"]}},
        "folder": {
            "class_type": "TesseraVideoFolder",
            "inputs": {"folder": "input/films", "target_frames": "5, 9", "extraction": "chunk"},
        },
        "prepare": {
            "class_type": "TesseraPrepareDataset",
            "inputs": {
                "dataset": ["folder", 0],
                "vae": ["vae", 0],
                "clip": ["clip", 0],
                "megapixels": 0.01,
                "image_to_video": True,
            },
        },
    }
    (output,) = server.run(prompt)["outputs"]["prepare"]["tessera"]
    assert output["summary"].startswith("Clips: 3. One epoch shows 3, repeats included.")
    assert "2 latent frames of" in output["summary"] and "3 latent frames of" in output["summary"]
    assert output["notes"] and "Clips of 2, 3 latent frames need" in output["notes"][0]
