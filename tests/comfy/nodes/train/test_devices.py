"""Train LoRA's devices: a server whose node trains in several processes, here on the CPU."""

import contextlib
import json
import time

import psutil
import pytest
from comfy_server import PATIENCE, ServerFailure, error_of
from safetensors.torch import load_file
from tiny.models.models_folder import WAN_NAMES
from tiny.nodes.prompt import node
from tiny.nodes.server_runs import paused_at, put_pictures, training_graph

STEPS = 120


def graph(loaders, name, devices="0,1", **changes):
    prompt = training_graph(loaders, name, steps=STEPS, save_every=0, devices=devices, **changes)
    # Adam enlarges the last bits of gradients that are all but zero, unless eps is of their size.
    optimizer = {"optimizer": "adamw", "learning_rate": 1e-3, "lr_scheduler": "constant", "warmup_steps": 0}
    prompt["optimizer"] = node("TesseraOptimizer", **optimizer, max_grad_norm=1.0, eps=1e-4)
    prompt["train"]["inputs"]["optimizer"] = ["optimizer", 0]
    prompt["save"] = node(
        "TesseraSaveLora", lora=["train", 0], filename_prefix=f"{name} saved", format="kohya", dtype="fp32"
    )
    return prompt


def run_of(server, name):
    listed = server.get(f"/tessera/runs?name={name}")["runs"]
    return server.get(f"/tessera/runs/{listed[0]['id']}?since=0") if listed else {"running": False, "step": 0}


def wait_for(is_there, predicate):
    end = time.monotonic() + PATIENCE
    while not predicate(value := is_there()):
        assert time.monotonic() < end, value
        time.sleep(0.05)
    return value


def processes(server):
    """The processes that train for a node of the server, by their rank; that of the launcher is None."""
    by_rank = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if "TESSERA_JOB" in variables and str(server.base) in process.cmdline():
                assert variables.get("RANK") not in by_rank
                by_rank[variables.get("RANK")] = process
    return by_rank


def trained(server, prompt):
    return server.run(prompt)["outputs"]["train"]["tessera"][0]


def check_same(server, first, second):
    """Compare two LoRAs by their places below the output folder."""
    two_ranks, one_rank = (load_file(server.base / "output" / path) for path in (first, second))
    assert two_ranks.keys() == one_rank.keys()
    for name, tensor in one_rank.items():
        assert (two_ranks[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def test_two_experts_come_back_from_two_processes_as_the_two_loras_that_one_trains(server, tiny_loaders):
    loaders = {
        "model": node("UNETLoader", unet_name=WAN_NAMES["unet_name"], weight_dtype="default"),
        "low": node("UNETLoader", unet_name=WAN_NAMES["unet_name"], weight_dtype="fp8_e4m3fn"),
        "clip": node("TesseraTinyClipLoader", clip_name1=WAN_NAMES["clip_name"]),
    }
    paths = {}
    for devices in ("0,1", "this one"):
        prompt = graph(loaders, f"experts {devices}", devices, model_low_noise=["low", 0])
        prompt["train"]["inputs"] |= {"steps": 6, "gradient_accumulation": 4}
        for picture_key in ("image0", "image1", "latent0", "latent1", "latents"):
            del prompt[picture_key]
        prompt["latent"] = node("EmptyHunyuanLatentVideo", width=32, height=32, length=5, batch_size=1)
        prompt["data"]["inputs"]["latents"] = ["latent", 0]
        for key, output in (("high", 2), ("low noise", 5)):
            prompt[key] = node("PreviewAny", source=["train", output])
        outputs = server.run(prompt)["outputs"]
        paths[devices] = [outputs[key]["text"][0] for key in ("high", "low noise")]
    assert processes(server) == {} and paths["0,1"][0] != paths["0,1"][1]
    for first, second in zip(*paths.values(), strict=True):
        check_same(server, first, second)
    high, low = (load_file(server.base / "output" / path) for path in paths["0,1"])
    assert any(not high[name].equal(low[name]) for name in high)


def test_a_node_trains_in_two_processes_what_it_trains_here_and_heeds_its_buttons(server, tiny_loaders):
    put_pictures(server.base)
    prompt = graph(tiny_loaders, "of two")
    with paused_at(server, 7):
        prompt_id = server.queue(prompt)
        run = wait_for(lambda: run_of(server, "of%20two"), lambda run: run["running"] and run["step"] == 7)
        assert processes(server).keys() == {None, "0", "1"}
        assert run["node"] == "train" and run["prompt_id"] == prompt_id and len(run["loss"]) == 7
        for command in ("save", "stop"):
            assert server.post(f"/tessera/runs/{run['id']}/{command}", {"prompt_id": prompt_id}) == {"asked": command}
    entry = server.wait(prompt_id)
    assert error_of(entry) == "" and processes(server) == {}
    (stopped,) = entry["outputs"]["train"]["tessera"]
    step = stopped["steps_done"]
    assert stopped["status"] == "stopped" and 7 < step < STEPS
    assert f"Stopped at step {step} and saved; Run goes on from there." in stopped["notes"]
    assert run_of(server, "of%20two")["saves"] == [step]
    assert f"of two_steps/of two-step{step:06d}.safetensors" in stopped["files"]  # as it was asked for
    assert entry["outputs"]["save"]  # the graph goes on

    resumed = trained(server, prompt)
    assert (
        f"Resumed at step {step}." in resumed["notes"]
        and resumed["world_size"] == 2
        and resumed["status"] == "finished"
    )
    assert not run_of(server, "of%20two")["running"] and processes(server) == {}
    local = trained(server, graph(tiny_loaders, "of one", devices="this one"))
    assert resumed["loss"] == pytest.approx(local["loss"], rel=1e-5) and "world_size" not in local
    check_same(server, resumed["path"], local["path"])
    folder = (server.base / "output" / resumed["path"]).parent
    saved = json.loads((folder / "of two.api.json").read_text())
    assert saved["train"]["inputs"]["devices"] == "0,1" and "save" in saved  # the graph of the user, not that of run.py


def test_cancel_saves_a_killed_device_is_named_and_a_killed_server_leaves_no_process(own_server, tiny_loaders):
    put_pictures(own_server.base)
    own_server.start()
    prompt = graph(tiny_loaders, "broken off")
    with paused_at(own_server, 7):
        prompt_id = own_server.queue(prompt)
        wait_for(lambda: run_of(own_server, "broken%20off"), lambda run: run["step"] == 7)
        own_server.interrupt()
    entry = own_server.wait(prompt_id)
    assert error_of(entry) == "TesseraTrainLora train was interrupted." and processes(own_server) == {}
    run = run_of(own_server, "broken%20off")
    assert run["status"] == "cancelled" and "and saved; Run goes on from there." in run["text"]
    step = run["step"]
    assert 7 <= step < STEPS

    with paused_at(own_server, step + 2):
        prompt_id = own_server.queue(prompt)
        wait_for(lambda: run_of(own_server, "broken%20off"), lambda run: run["running"] and run["step"] == step + 2)
        killed = processes(own_server)["1"]
        killed.kill()
        psutil.wait_procs([killed], timeout=60)
    message = error_of(own_server.wait(prompt_id))
    assert message.startswith("TesseraTrainLora train: Device 1") and "\n" not in message, message
    assert not run_of(own_server, "broken%20off")["running"]

    with paused_at(own_server, step + 5):
        own_server.queue(prompt)
        wait_for(lambda: run_of(own_server, "broken%20off"), lambda run: run["running"] and run["step"] == step + 5)
        remaining = processes(own_server).values()
        assert len(remaining) == 3
        own_server.kill()
    psutil.wait_procs(remaining, timeout=60)
    assert processes(own_server) == {}
    (folder,) = (own_server.base / "output" / "loras").glob("broken off (*)")
    assert max(path.name for path in folder.glob("state-*")) > f"state-{step:06d}.tessera"  # saved before they ended


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": "two"}, "devices is 'two'; write 'this one', 'all', or numbers such as 0,1"),
        ({"devices": "0,0"}, "names device 0 twice"),
        ({"gradient_accumulation": 3}, "set batch_size to 2, or gradient_accumulation to 4"),
    ],
)
def test_devices_that_cannot_be_used_are_told_before_anything_starts(changes, said, server, tiny_loaders):
    put_pictures(server.base)
    try:
        message = error_of(server.wait(server.queue(graph(tiny_loaders, "refused", **changes))))
    except ServerFailure as failure:  # when it was queued
        message = str(failure)
    assert (
        said in message and "\n" not in error_of({"status": {"messages": []}}) + message.split(said)[0].split('"')[-1]
    )
    assert not list((server.base / "output" / "loras").glob("refused (*)"))
