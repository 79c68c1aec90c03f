"""Saves of LoRAs: when they are made, which stay, what they say of their run, and the workflow beside them."""

import json
import sys
from dataclasses import replace

import folder_paths
import pytest
import torch
from comfy.cli_args import args
from comfy.model_management import InterruptProcessingException
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from tessera.nodes.common.saved_workflow import workflow_files
from tessera.train.preview.gallery import Shot, save_shot
from tiny.nodes.prompt import node
from tiny.train.runs import Watcher, cancel_at, mixed_data, run_settings, sample, train, training_data


def run_folder(root):
    (folder,) = root.iterdir()
    return folder


def steps_kept(folder):
    return sorted(int(path.stem.rpartition("-step")[2]) for path in folder.rglob("*-step*.safetensors"))


def test_the_newest_loras_stay_and_nothing_else_goes(tiny_flux, tmp_path):
    first = train(tiny_flux, mixed_data(), tmp_path, steps=3, save_every=1).path.parent
    foreign = ["tiny-step2.safetensors", "other-step000001.safetensors", "tiny-step000001.safetensors.bak"]

    def put(step):
        (folder,) = set(tmp_path.iterdir()) - {first}
        for name in foreign:
            (folder / name).write_text("foreign")
            (folder / "tiny_steps" / name).write_text("foreign")

    watcher = Watcher(at_step=lambda step: put(step) if step == 3 else None)
    options = {
        "save_every": 1,
        "keep_last": 2,
        "seed": 4,
        "validation": {"data": training_data(sample("unseen", 4, 4))},
    }
    result = train(tiny_flux, mixed_data(), tmp_path, watcher, steps=6, **options)
    folder = result.path.parent
    step_files = {"tiny-step000004.safetensors", "tiny-step000005.safetensors"}
    loras = {"tiny.safetensors", "tiny-best.safetensors"}
    assert {path.name for path in folder.iterdir() if "safetensors" in path.name} == loras | set(foreign)
    assert {path.name for path in (folder / "tiny_steps").iterdir()} == step_files | set(foreign)
    assert steps_kept(first) == [1, 2]
    assert set(result.summary["files"]) == loras | {f"tiny_steps/{name}" for name in step_files}


def test_a_run_that_goes_on_earlier_leaves_what_lies_ahead(tiny_flux, tmp_path):
    earlier = []

    def keep(step):
        if step == 4:  # the state of step 3 is there, and goes soon
            (path,) = tmp_path.glob("*/state-000003.tessera")
            earlier.append((path, path.read_bytes()))

    watcher = cancel_at(6)
    watcher.at_step = keep
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path, watcher, steps=9, save_every=1, keep_last=3)
    folder = run_folder(tmp_path)
    assert steps_kept(folder) == [4, 5, 6]
    for state in folder.glob("*.tessera"):
        state.unlink()
    ((path, content),) = earlier
    path.write_bytes(content)
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path, cancel_at(4), steps=9, save_every=1, keep_last=1)
    assert steps_kept(folder) == [4, 5, 6]


def test_a_run_saves_when_that_many_epochs_were_shown(tiny_flux, tmp_path):
    """Five pictures, two a step: 6, 10, 16 and 20 showings are the first with one, two, three and four epochs."""
    train(tiny_flux, mixed_data(), tmp_path / "1", steps=11, batch_size=2, save_every=0, save_every_epochs=1)
    assert steps_kept(run_folder(tmp_path / "1")) == [3, 5, 8, 10]
    train(tiny_flux, mixed_data(), tmp_path / "2", steps=11, batch_size=2, save_every=0, save_every_epochs=2)
    assert steps_kept(run_folder(tmp_path / "2")) == [5, 10]


def test_an_epoch_counts_the_pictures_of_every_micro_batch(tiny_flux, tmp_path):
    options = {"steps": 6, "gradient_accumulation": 2, "save_every": 0, "save_every_epochs": 1}
    train(tiny_flux, mixed_data(), tmp_path, **options)
    assert steps_kept(run_folder(tmp_path)) == [3, 5]


def test_the_metadata_says_what_the_run_was_made_with(tiny_flux, tmp_path):
    data = training_data(*mixed_data().samples, sample("secret/folder/picture.png", 4, 4, repeats=3))
    data = replace(
        data, made_with={"fit": "ragged edge", "folders": [{"repeats": 3, "captions": {"tag_dropout": 0.1}}]}
    )
    validation = {"part": 0.2, "every_n_steps": 3, "seed": 9}
    result = train(
        tiny_flux, data, tmp_path, steps=3, save_every=0, save_every_epochs=7, keep_last=2, validation=validation
    )
    with safe_open(result.path, "pt") as file:
        metadata = file.metadata()
    assert "secret" not in json.dumps(metadata) and str(tmp_path) not in json.dumps(metadata)
    said = json.loads(metadata["tessera"])
    assert {k: said["validation"][k] for k in validation} == validation and said["validation"]["data"] is None
    assert said["saving"] == {"save_every": 0, "save_every_epochs": 7, "keep_last": 2} and said["compile"] == "off"
    names = result.summary["validation"]["samples"]
    remaining = [item for item in data.samples if item.name not in names]
    assert said["data"]["made_with"] == data.made_with
    assert said["data"]["samples"] == len(remaining) == 5
    assert said["data"]["shown_per_epoch"] == said["samples"] == sum(item.repeats for item in remaining)
    buckets = {tuple(bucket["grid"]): bucket["samples"] for bucket in said["data"]["buckets"]}
    assert buckets == {grid: sum(item.grid == grid for item in remaining) for grid in {item.grid for item in remaining}}


def test_contradicting_settings_end_in_one_sentence():
    with pytest.raises(ValueError, match="save_every is 2 steps and save_every_epochs is 1; set one of them to 0"):
        run_settings(save_every_epochs=1)
    with pytest.raises(ValueError, match="keep_last is -1"):
        run_settings(keep_last=-1)
    with pytest.raises(ValueError, match="save_every_epochs is -1"):
        run_settings(save_every=0, save_every_epochs=-1)


def test_comfyui_s_flag_against_metadata_is_kept_to(monkeypatch, tmp_path):
    prompt, extra = {"1": {"class_type": "A", "inputs": {}, "is_changed": [float("nan")]}}, {"workflow": {"nodes": []}}
    files = workflow_files(prompt, extra)
    assert {name: json.loads(text) for name, text in files.items()} == {
        "workflow.json": {"nodes": []},
        "api.json": {"1": {"class_type": "A", "inputs": {}}},
    }
    assert workflow_files(prompt, None).keys() == {"api.json"} and workflow_files(None, None) == {}
    deep: list = []
    for _ in range(sys.getrecursionlimit()):  # which libraries raise; ComfyUI takes such a workflow from a page
        deep = [deep]
    assert workflow_files(prompt, {"workflow": {"nodes": deep}}).keys() == {"api.json"}
    shot, frames = Shot(1, 0, "a", {}), torch.zeros(1, 16, 16, 3)
    clip = replace(shot, frames=2)

    def said():
        with (
            Image.open(save_shot(tmp_path, shot, frames, 8)) as picture,
            Image.open(save_shot(tmp_path, clip, torch.zeros(2, 16, 16, 3), 8)) as film,
        ):
            return "tessera" in picture.text, bool(film.info.get("xmp"))

    assert said() == (True, True)
    monkeypatch.setattr(args, "disable_metadata", True)
    assert said() == (False, False)
    assert workflow_files(prompt, extra) == {}


def test_an_allowed_folder_stands_in_the_workflow_files_by_its_last_part(monkeypatch, tmp_path):
    photos = tmp_path / "ann" / "photos"
    (tmp_path / "tessera.json").write_text(json.dumps({"allowed_folders": [str(tmp_path / "ann")]}))
    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path))
    values = ["/imagine a fox", "/", "input/set", 3, None, str(tmp_path / "other"), f"see {tmp_path}"]

    def graph(folder):
        inputs = {"folder": folder, "text": values, "link": ["2", 0]}
        nodes = [{"type": "A", "widgets_values": [folder, *values]}]
        return {"1": {"class_type": "A", "inputs": inputs}}, {"workflow": {"nodes": nodes}}

    assert workflow_files(*graph(str(photos))) == workflow_files(*graph("photos"))
    assert "ann" in workflow_files(*graph(str(tmp_path / "ann")))["api.json"]


def test_the_workflow_beside_the_lora_is_what_was_queued_and_trains_it_again(server, tiny_loaders):
    """Through the server, with Validation and Loss Plot in the graph."""
    for index in range(3):
        Image.effect_noise((64, 64), 30 + 20 * index).convert("RGB").save(server.base / "input" / f"noise{index}.png")
    train_inputs = {"output_name": "again", "steps": 2, "learning_rate": 1e-3, "rank": 4, "batch_size": 1, "seed": 5}
    train_inputs |= {"gradient_accumulation": 1, "compile": "off", "save_every": 1, "resume": "latest"}
    measured = {"every_n_steps": 1, "at_start": True, "keep_best": True, "min_sigma": 0.0, "max_sigma": 1.0}
    prompt = tiny_loaders | {f"image{n}": node("LoadImage", image=f"noise{n}.png") for n in range(3)}
    prompt |= {f"latent{n}": node("VAEEncode", pixels=[f"image{n}", 0], vae=["vae", 0]) for n in range(3)}
    prompt |= {
        "latents": node("CreateList", **{f"inputs.input{n}": [f"latent{n}", 0] for n in range(3)}),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text="noise"),
        "data": node("TesseraLatentsToDataset", latents=["latents", 0], positive=["positive", 0], max_graphs=1),
        "held": node("TesseraValidation", part=0.3, seed=1, **measured),
        "train": node(
            "TesseraTrainLora",
            model=["model", 0],
            data=["data", 0],
            validation=["held", 0],
            keep_last=1,
            **train_inputs,
        ),
        "plot": node("TesseraLossPlot", loss=["train", 1], smoothing=0.5, log_scale=False),
    }
    workflow = {"nodes": [{"id": 1, "type": "TesseraTrainLora", "widgets_values": ["again", 2]}], "links": [], "ü": 1.5}
    body = {"prompt": prompt, "extra_data": {"extra_pnginfo": {"workflow": workflow}}}
    entry = server.wait(server.post("/prompt", body)["prompt_id"])
    (summary,) = entry["outputs"]["train"]["tessera"]
    assert [point["step"] for point in summary["validation"]["points"]] == [0, 1, 2]
    assert len(summary["validation"]["samples"]) == 1 and entry["outputs"]["plot"]["images"]
    (folder,) = (server.base / "output" / "loras").glob("again (*)")
    queued = json.loads((folder / "again.api.json").read_text(encoding="utf-8"))
    assert json.loads((folder / "again.workflow.json").read_text(encoding="utf-8")) == workflow and queued == prompt
    first = load_file(folder / "again.safetensors")
    folder.rename(folder.with_name("moved"))
    server.post("/free", {"unload_models": True, "free_memory": True})  # what core has kept of it
    server.run(queued)
    (folder,) = (server.base / "output" / "loras").glob("again (*)")
    repeated = load_file(folder / "again.safetensors")
    assert all(torch.equal(repeated[name], first[name]) for name in first)
