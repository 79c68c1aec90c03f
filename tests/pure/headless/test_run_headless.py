"""Options and workflow as run.py reads them before ComfyUI is started."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tessera.headless import comfyui, command, launch, rank
from tessera.headless.errors import UsageError
from tessera.headless.rank import Rank
from tessera.headless.workflow import TRAIN, read_workflow, set_input

ROOT = Path(__file__).resolve().parents[3]
PROMPT = {
    "4": {"class_type": "TesseraTrainLora", "inputs": {"steps": 10, "output_name": "a", "model": ["1", 0]}},
    "5": {"class_type": "LoadImage", "inputs": {"image": "a.png"}, "_meta": {"title": "First"}},
    "6": {"class_type": "LoadImage", "inputs": {"image": "b.png"}, "_meta": {"title": "Second.one"}},
    "7": {"class_type": "TesseraMemory", "inputs": {"shard": True}},
}


def changed(*changes):
    prompt = json.loads(json.dumps(PROMPT))
    for change in changes:
        set_input(prompt, change)
    return prompt


def test_an_input_is_changed_by_the_node_s_number_class_or_title():
    assert set_input(json.loads(json.dumps(PROMPT)), "Second.one.image=c.png") == ("6", "image")
    prompt = changed("4.steps=20", "TesseraTrainLora.output_name=12", "Second.one.image=c=d.png", "4.seed=3")
    assert prompt["4"]["inputs"] == {"steps": 20, "output_name": "12", "model": ["1", 0], "seed": 3}
    assert prompt["6"]["inputs"]["image"] == "c=d.png" and prompt["5"] == PROMPT["5"]
    inputs = {"resize_type.width": 64, "resize_type": "a", "new.one.more": 1}
    for name in ("5", "First"):
        assignments = [f"{name}.{key}={value}" for key, value in inputs.items()]
        assert changed(*assignments)["5"]["inputs"] == {"image": "a.png", **inputs}
    assert changed("4.learning_rate=1e-4")["4"]["inputs"]["learning_rate"] == 1e-4
    for text in ("false", "False", "FALSE"):
        assert changed(f"7.shard={text}", f"7.new={text}")["7"]["inputs"] == {"shard": False, "new": False}


def test_a_title_that_is_no_text_names_no_node():
    prompt = {"1": {"class_type": "LoadImage", "inputs": {"image": "a"}, "_meta": "x"}}
    assert set_input(prompt, "LoadImage.image=b") == ("1", "image")
    with pytest.raises(UsageError, match="no node of the workflow is called x"):
        set_input(prompt, "x.image=b")


def test_a_workflow_past_its_bounds_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="deep.json has too many lists inside one another; export the workflow again"):
        read_workflow(path)
    with open(path, "wb") as file:
        file.truncate(33_000_000)
    with pytest.raises(UsageError, match="deep.json has 33 MB; a workflow has at most 32 MB"):
        read_workflow(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("steps=3", "write NODE.INPUT=VALUE"),
        ("4.steps", "write NODE.INPUT=VALUE"),
        ("8.steps=3", "no node of the workflow is called 8"),
        ("8.one.steps=3", "no node of the workflow is called 8"),
        ("LoadImage.image=c.png", r"2 nodes \(5, 6\) of the workflow are called LoadImage"),
        ("4.model=3", "model is connected to another node"),
        ("7.shard=off", "shard is a switch; give true or false"),
        ("4.steps=" + "[" * 100_000, r"--set: \[{40}… has too many lists inside one another; give a plain value"),
    ],
)
def test_a_change_that_names_no_input_is_told(change, said):
    with pytest.raises(UsageError, match=said):
        changed(change)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "isn't a JSON file"),
        (
            '{"nodes": [], "links": []}',
            r"is a workflow for the browser; .* use Workflow > Export \(API\)",
        ),
        ("{}", "isn't a workflow in API format"),
        ('{"a": {"inputs": {}}}', "isn't a workflow in API format"),
        ("[1]", "isn't a workflow in API format"),
    ],
)
def test_files_that_are_no_workflow_are_told(text, said, tmp_path, capsys):
    path = tmp_path / "w.json"
    path.write_text(text)
    assert command.main([str(path)]) == 2
    message = capsys.readouterr().err
    assert re.search(said, message) and str(path) in message
    assert command.main([str(tmp_path / "none.json")]) == 2
    assert "can't be read: No such file or directory" in capsys.readouterr().err


def test_prompts_posted_to_a_server_are_taken_too(tmp_path):
    path = tmp_path / "w.json"
    path.write_text(json.dumps({"prompt": PROMPT}))
    assert read_workflow(path) == (PROMPT, {})
    path.write_text(json.dumps({"prompt": PROMPT, "extra_data": {"extra_pnginfo": {"workflow": {}}}}))
    assert read_workflow(path) == (PROMPT, {"extra_pnginfo": {"workflow": {}}})


def test_options_behind_the_dashes_are_comfyui_s():
    arguments, behind = command.parse(["w.json", "--set", "4.steps=1", "--", "--cpu", "--", "x"])
    assert (arguments.workflow, arguments.set, behind) == ("w.json", ["4.steps=1"], ["--cpu", "--", "x"])


def test_windows_is_told_that_torchrun_does_not_start_there(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="use WSL, or leave --launch out"):
        launch.check_launch(2, {"1": {"class_type": TRAIN, "inputs": {}}}, ["--cpu"])


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_each_process_takes_one_of_the_devices_that_are_named(name, monkeypatch):
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TESSERA_WORLD_OF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "2,3")
    visible = []
    monkeypatch.setattr(rank, "see_devices", visible.append)
    for _ in range(2):  # the second process of the second machine; then where none are named
        with Rank(3, 4, 1).prepared({"1": {"class_type": TRAIN, "inputs": {}}}, []):
            monkeypatch.delenv("TESSERA_WORLD_OF")
        monkeypatch.delenv(name, raising=False)
    assert visible == ["3", "1"]


VISIBLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("option", "value", "names", "expected"),
    [
        ("cuda_device", 2, VISIBLE, "2"),
        ("default_device", 2, VISIBLE, ",".join(map(str, [2, 0, 1, *range(3, 32)]))),
        ("oneapi_device_selector", "gpu:1", ["ONEAPI_DEVICE_SELECTOR"], "gpu:1"),
        ("deterministic", True, ["CUBLAS_WORKSPACE_CONFIG"], ":4096:8"),
    ],
)
def test_options_that_torch_reads_of_the_environment_are_put_there(option, value, names, expected, monkeypatch):
    """ComfyUI's main.py does so only where it is started itself."""
    monkeypatch.setattr(os, "environ", {})
    options = dict.fromkeys(("default_device", "cuda_device", "oneapi_device_selector"), None)
    comfyui.set_environment(SimpleNamespace(**options | {"deterministic": False} | {option: value}))
    assert [os.environ.get(name) for name in names] == [expected] * len(names)


def test_comfyui_is_where_the_pack_lies_or_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    with pytest.raises(UsageError, match="COMFYUI_PATH is .*, which isn't a ComfyUI folder"):
        comfyui.find_comfyui()
    (tmp_path / "comfy").mkdir()
    (tmp_path / "main.py").touch()
    assert comfyui.find_comfyui() == tmp_path
    monkeypatch.delenv("COMFYUI_PATH")
    monkeypatch.setattr(comfyui, "RUN", tmp_path / "custom_nodes" / "pack" / "run.py")
    assert comfyui.find_comfyui() == tmp_path
    monkeypatch.setattr(comfyui, "RUN", tmp_path / "else" / "a" / "b" / "run.py")
    with pytest.raises(UsageError, match="put this pack into ComfyUI's custom_nodes"):
        comfyui.find_comfyui()
