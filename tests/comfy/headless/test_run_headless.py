"""run.py: a workflow from a terminal, in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from comfy_server import PATIENCE
from safetensors.torch import load_file
from tiny.nodes.server_runs import paused_at, put_pictures, training_graph

RUN = Path(__file__).resolve().parents[3] / "run.py"
STEPS = 12


@pytest.fixture
def workflow(server, tiny_loaders, tmp_path):
    """A file in API format that trains on two pictures of the server's input folder."""
    put_pictures(server.base)
    prompt = training_graph(tiny_loaders, steps=STEPS, save_every=0)
    path = tmp_path / "workflow.api.json"
    path.write_text(json.dumps(prompt))
    return path


def line(server, workflow, output, log, *options):
    comfyui = ["--base-directory", str(server.base), "--database-url", "sqlite:///:memory:", "--cpu"]
    arguments = ["--output", str(output), "--log", str(log), *options]
    return [sys.executable, str(RUN), str(workflow), *arguments, "--", *comfyui, "--use-pytorch-cross-attention"]


def events_of(log):
    return [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []


def started(command, environment, log, step):
    """The process that a command line starts, as soon as its run has come to a step."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + PATIENCE
    while not any(event.get("kind") == "step" and event["step"] >= step for event in events_of(log)):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)
    return process


def test_a_headless_run_trains_as_a_server_does_and_goes_on_after_its_end(server, workflow, tmp_path):
    output, log = tmp_path / "output", tmp_path / "log.jsonl"
    command = line(server, workflow, output, log, "--set", "train.output_name=headless")
    environment = os.environ | {"COMFYUI_PATH": str(server.comfyui)}
    with paused_at(server, 5):
        process = started(command, environment, log, 3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, errors
    assert "Everything up to here is saved; run the same command again to continue." in errors
    assert not list(output.rglob("headless.safetensors"))

    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert finished.returncode == 0, finished.stderr
    (file,) = output.rglob("headless.safetensors")
    assert f"  {file.relative_to(output).as_posix()}" in finished.stdout.splitlines()
    *_, last = events_of(log)
    (summary,) = last["outputs"]["train"]["tessera"]
    assert last["event"] == "done" and any("Resumed at step" in note for note in summary["notes"])

    prompt = json.loads(workflow.read_text())
    prompt["train"]["inputs"]["output_name"] = "served"
    served = server.run(prompt)["outputs"]["train"]["tessera"][0]
    assert summary["loss"] == served["loss"] and len(served["loss"]) == STEPS
    tensors, reference = load_file(file), load_file(server.base / "output" / served["path"])
    assert tensors.keys() == reference.keys() and all(torch.equal(tensors[name], reference[name]) for name in tensors)


def test_a_workflow_that_cannot_run_is_told_before_anything_is_loaded(server, workflow, tmp_path):
    environment = os.environ | {"COMFYUI_PATH": str(server.comfyui)}
    command = line(
        server, workflow, tmp_path, tmp_path / "log.jsonl", "--set", "train.steps=0", "--set", "image0.image=x.png"
    )
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert process.returncode == 2
    *_, first, second = process.stderr.splitlines()
    assert {first.split(":")[0], second.split(":")[0]} == {"TesseraTrainLora (train)", "LoadImage (image0)"}
    assert "steps" in process.stderr and "x.png" in process.stderr
    command = line(server, workflow, tmp_path, tmp_path / "log.jsonl", "--set", "image0.imgae=x.png")
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1] == "LoadImage (image0) has no input called imgae; it has image."


def processes_of(launcher):
    """The processes that train, by their rank."""
    processes = {}
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (rank := process.environ().get("RANK")) and str(RUN) in process.cmdline():
                processes[int(rank)] = process
    return processes


def test_two_processes_train_it_together_and_one_goes_on_from_where_another_was_killed(server, workflow, tmp_path):
    output, log = tmp_path / "output", tmp_path / "log.jsonl"
    options = ["--set", "train.output_name=many", "--set", "train.save_every=2"]
    environment = os.environ | {"COMFYUI_PATH": str(server.comfyui)}
    with paused_at(server, 7):
        command = line(server, workflow, output, log, *options, "--launch", "2")
        launcher = started(command, environment, log, 5)
        trained = processes_of(launcher)
        assert sorted(trained) == [0, 1]
        trained[1].kill()
        _, errors = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 75, errors
    assert "Device 1: its process was ended by SIGKILL." in errors.splitlines()
    assert not any(process.is_running() for process in trained.values())
    assert not list(output.rglob("many.safetensors")) and list(output.rglob("state-*.tessera"))

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", "--"]
    command += line(server, workflow, output, log, *options, "--result", str(tmp_path / "result"))[1:]
    with paused_at(server, 9):
        launcher = started(command, environment, log, 8)
        processes_of(launcher)[1].kill()  # and torchrun starts both again
    output_of, errors_of = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 0, errors_of
    starts = [event for event in events_of(log) if event.get("kind") == "begin"]
    assert len(starts) == 3  # that of --launch, and two of torchrun
    assert json.loads((tmp_path / "result").read_text())["code"] == 0
    (file,) = output.rglob("many.safetensors")
    assert output_of.splitlines().count(f"  {file.relative_to(output).as_posix()}") == 1
    (summary,) = events_of(log)[-1]["outputs"]["train"]["tessera"]
    assert summary["world_size"] == 2 and any("Resumed at step" in note for note in summary["notes"])
    assert json.loads((file.parent / "summary.json").read_text())["seconds_waiting"] >= 0

    prompt = json.loads(workflow.read_text())
    prompt["train"]["inputs"] |= {"output_name": "of one"}
    served = server.run(prompt)["outputs"]["train"]["tessera"][0]
    assert summary["loss"] == pytest.approx(served["loss"], rel=1e-4) and len(served["loss"]) == STEPS
    tensors, reference = load_file(file), load_file(server.base / "output" / served["path"])
    for name, tensor in reference.items():
        assert (tensors[name] - tensor).norm() <= 1e-3 * tensor.norm(), name


def test_work_that_two_processes_cannot_share_is_told(server, workflow, tmp_path):
    environment = os.environ | {"COMFYUI_PATH": str(server.comfyui)}
    odd = ["--set", "train.gradient_accumulation=3", "--launch", "2"]
    command = line(server, workflow, tmp_path / "output", tmp_path / "log.jsonl", *odd)
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("set batch_size to 2, or gradient_accumulation to 4") == 1
    assert not any(event["event"] == "node" for event in events_of(tmp_path / "log.jsonl"))  # nothing is loaded before
