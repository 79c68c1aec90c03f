"""The graph that goes to the processes that train for a node, and graphs that are refused before."""

import json
import os
import signal
import subprocess
import sys
import time

import comfy.model_management
import psutil
import pytest
from tessera.nodes.train.devices import OnDevices, SameRun, needed_prompt
from tessera.train.distributed import launcher
from tessera.train.distributed.launcher import JOB, PARENT, RUN, Facts, Job, Launched, child_environment, child_options
from tessera.train.preflight.run_start import RunStart
from tessera.train.report.errors import TrainingStopped
from tessera.train.report.observer import SilentObserver
from tessera.train.runs.run_folder import RunFolder
from tiny.nodes.prompt import node
from tiny.train.runs import run_settings

PROMPT = {
    "1": node("UNETLoader", unet_name="a.safetensors") | {"is_changed": [0.5]},
    "2": node("LoadImage", image="a picture.png"),
    "3": node("TesseraTrainLora", model=["1", 0], data=["4", 0], devices="0,1", output_name='a "name" $(x)'),
    "4": node("Made", picture=["2", 0]),
    "5": node("TesseraSaveLora", lora=["3", 0]),
}


def test_the_processes_get_the_node_with_all_that_it_is_made_of_and_no_more():
    prompt = needed_prompt(PROMPT, "3")
    assert list(prompt) == ["1", "2", "3", "4"] and "is_changed" not in prompt["1"]
    assert prompt["3"]["inputs"] == PROMPT["3"]["inputs"] | {"devices": "this one"}
    assert PROMPT["3"]["inputs"]["devices"] == "0,1"


@pytest.mark.parametrize(
    ("changed", "target", "said"),
    [
        ({}, "3.0.1", "by a loop"),
        ({"4": node("Made", picture=["2.0.7", 0])}, "3", "by a loop"),
        ({"2": node("LoadImage", image="shot.png [temp]")}, "3", r"image of LoadImage \(2\) is in ComfyUI's temporary"),
    ],
)
def test_nodes_that_other_processes_cannot_run_are_told(changed, target, said):
    with pytest.raises(ValueError, match=said):
        needed_prompt(PROMPT | changed, target)


def test_values_that_no_file_can_hold_are_told(tmp_path):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (object(), deep):
        with pytest.raises(ValueError, match="not a plain value"):
            Job(tmp_path).write({"1": {"class_type": "A", "inputs": {"x": value}}}, {}, Facts())
    assert not list(tmp_path.iterdir())


def test_devices_are_counted_as_the_server_counts_them(tmp_path):
    def visible_devices(devices, **environment):
        child = child_environment(environment, devices, tmp_path, tmp_path / "a job")
        assert child[PARENT] == str(os.getpid()) and child[JOB] == str(tmp_path / "a job")
        return child.get("CUDA_VISIBLE_DEVICES"), child.get("HIP_VISIBLE_DEVICES")

    assert visible_devices([0, 1]) == ("0,1", "0,1")
    assert visible_devices([2, 0], CUDA_VISIBLE_DEVICES="GPU-a, GPU-b,GPU-c") == ("GPU-c,GPU-a", "GPU-c,GPU-a")
    assert visible_devices([1], CUDA_VISIBLE_DEVICES="3,1,0,2") == ("1", "1")  # --default-device 3
    assert visible_devices([1, 0], HIP_VISIBLE_DEVICES="4,6") == ("6,4", "6,4")
    assert visible_devices([], CUDA_VISIBLE_DEVICES="1") == ("1", None)  # on the CPU
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "PATH": "p"}
    child = child_environment(torchrun, [], tmp_path, tmp_path)
    assert not torchrun.keys() - {"PATH"} & child.keys() and child["PATH"] == "p"


def test_options_of_the_server_reach_the_processes_but_for_its_device():
    options = ["--listen", "--cuda-device", "1", "--base-directory", "a folder", "--cuda-malloc", "--default-device=0"]
    options += ["--auto-launch", "--extra-model-paths-config", "a.yaml", "b.yaml", "--default-hashing-function", "md5"]
    assert child_options(options, {"--output-directory": "out put"}) == [
        *("--listen", "--base-directory", "a folder", "--cuda-malloc", "--extra-model-paths-config", "a.yaml"),
        *("b.yaml", "--default-hashing-function", "md5", "--output-directory", "out put"),
    ]


def test_requests_are_taken_once_and_not_by_another_job(tmp_path):
    (tmp_path / "one").mkdir()
    job, other = Job(tmp_path / "one"), Job(tmp_path)
    job.ask("save")
    job.ask("save")
    assert other.take_requests() == frozenset()
    assert job.take_requests() == {"save"} and job.take_requests() == frozenset()


def test_events_are_read_as_they_come_whole_lines_only(tmp_path):
    job = Job(tmp_path)
    events = job.events()
    assert next(events) is None
    with job.log.open("ab", buffering=0) as log:
        line = json.dumps({"event": "a", "text": "ü"}, ensure_ascii=False).encode() + b"\n"
        log.write(line[:-4])
        assert next(events) is None
        log.write(line[-4:] + line)
        assert [next(events), next(events), next(events)] == [{"event": "a", "text": "ü"}] * 2 + [None]


class Silent(SilentObserver):
    node_id = "3"


def run_start(tmp_path, key="a key"):
    return RunStart("weights", "lineage", "lineage", key, RunFolder(tmp_path / "loras" / "a (001)", "a"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print('Device 1: There is no room.\\nmore'); raise SystemExit(1)", r"^Device 1: There is no room\.$"),
        ("raise SystemExit(1)", "^The training processes were ended from outside"),
        ("", "^devices: the other processes got a different run than this one"),
    ],
)
def test_models_are_unloaded_and_processes_that_train_no_such_run_are_told(
    script, said, tmp_path, tiny_flux, monkeypatch
):
    """A stand-in for run.py, which ends at once."""
    other = tmp_path / "run.py"
    other.write_text(script)
    monkeypatch.setattr(launcher, "RUN", other)
    comfy.model_management.load_models_gpu([tiny_flux])
    assert comfy.model_management.loaded_models()
    train = OnDevices([0, 1], PROMPT, None, run_settings(batch_size=2), {}, Silent())
    with pytest.raises(TrainingStopped, match=said):
        train(run_start(tmp_path))
    assert not comfy.model_management.loaded_models()


def test_a_process_that_makes_another_run_of_the_graph_is_told():
    with pytest.raises(
        ValueError, match="got a different run than this one, so an input of Train LoRA is not the same"
    ):
        SameRun("another key")(run_start(RUN.parent))
    check = SameRun("a key")
    assert check(run_start(RUN.parent)) is None
    assert check(run_start(RUN.parent, "that of the second expert")) is None


def test_steps_that_the_devices_cannot_share_are_told_before_anything_is_unloaded():
    with pytest.raises(ValueError, match="2 devices can't share evenly; set batch_size to 4"):
        OnDevices([0, 1], PROMPT, None, run_settings(batch_size=3, gradient_accumulation=1), {}, Silent())


def test_measurements_and_notes_of_the_processes_are_told_as_of_a_run_here():
    events = []

    class Listening(Silent):
        def validated(self, step, loss):
            events.append((step, loss))

        def note(self, text):
            events.append(text)

    train = OnDevices([0, 1], PROMPT, None, run_settings(batch_size=2), {}, Listening())
    train.tell({"event": "train", "kind": "validation", "step": 4, "loss": 0.5})
    train.tell({"event": "train", "kind": "note", "text": "a note"})
    assert events == [(4, 0.5), "a note"]


def test_processes_that_do_not_end_are_killed_at_the_second_cancel(tmp_path, monkeypatch):
    """A stand-in for run.py that heeds no signal, with a process below it in another session, as torchrun's are."""
    code = f"import time, sys; sys.path.insert(0, {str(RUN.parent)!r}); "
    code += "from headless.parent import watch_parent; from headless.rank import Rank; "
    code += "watch_parent(Rank(0, 2), False); print('up', flush=True); time.sleep(600)"
    stubborn = tmp_path / "a folder" / "run.py"
    stubborn.parent.mkdir()
    stubborn.write_text(
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.environ['TESSERA_PARENT'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        'open(sys.argv[3], \'w\').write(\'{"event": "up", "pid": %d}\\n\' % child.pid)\n'
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(launcher, "RUN", stubborn)
    messages = []

    def cancel():
        if messages:
            raise KeyboardInterrupt

    launched = Launched(Job(tmp_path), [0], True, tmp_path, [])
    with pytest.raises(KeyboardInterrupt):
        launched.follow(messages.append, cancel, frozenset)
    assert launched.process.returncode == -signal.SIGKILL
    end = time.monotonic() + 30
    while psutil.pid_exists(messages[0]["pid"]) and psutil.Process(messages[0]["pid"]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_launcher_ends_with_the_process_that_started_it(tmp_path):
    """Not the one that its environment names alone: where that is gone before it looks, it ends as well."""
    finished = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    workflow = tmp_path / "w.json"
    workflow.write_text(json.dumps({"1": node("TesseraTrainLora", steps=1)}))
    command = [sys.executable, str(RUN), str(workflow), "--launch", "2", "--", "--cpu"]
    environment = os.environ | {PARENT: finished.stdout.strip(), "COMFYUI_PATH": os.environ.get("COMFYUI_PATH", "")}
    process = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert process.returncode == -signal.SIGTERM
