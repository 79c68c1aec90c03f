"""A day with one run on a real server: stop, run, cancel, run again; the newest LoRA is handed out at each point."""

import math

from safetensors import safe_open
from safetensors.torch import load_file
from tiny.nodes.prompt import node
from tiny.nodes.routes import ask
from tiny.nodes.server_runs import newest_step, paused_at, put_pictures, training_graph, wait_for_step

JSON = {"Content-Type": "application/json"}
NAME = "a day"


def norms(path):
    return sorted(float(tensor.double().norm()) for tensor in load_file(path).values())


def run_details(server):
    (run,) = server.get(f"/tessera/runs?name={NAME.replace(' ', '%20')}")["runs"]
    return server.get(f"/tessera/runs/{run['id']}")


def check_newest(server, step, ending):
    """Assert that every place hands out the LoRA of this step: the panel, core's list of LoRAs, Compare saves."""
    details = run_details(server)
    assert details["last_lora"].endswith(ending)
    with safe_open(server.base / "output" / "loras" / details["last_lora"], "pt") as file:
        assert int(file.metadata()["ss_steps"]) == step
    loader = server.get("/object_info/LoraLoader")["LoraLoader"]
    assert details["last_lora"] in loader["input"]["required"]["lora_name"][0]
    saves = server.get(f"/tessera/runs/{details['id']}/saves")["loras"]
    assert saves[-1] == details["last_lora"] and len(set(saves)) == len(saves)


def test_the_newest_lora_is_handed_out_all_day(server, tiny_loaders):
    put_pictures(server.base)
    graph = training_graph(tiny_loaders, NAME, steps=12)
    graph["saved"] = node("TesseraSaveLora", lora=["train", 0], filename_prefix="day", format="kohya", dtype="fp32")

    with paused_at(server, 5):  # stopped and kept
        prompt_id = server.queue(graph)
        wait_for_step(server, NAME, 4, prompt_id)
        details = run_details(server)
        assert ask(server, f"/tessera/runs/{details['id']}/stop", "POST", {"prompt_id": prompt_id}, **JSON)[0] == 200
    (stop_summary,) = server.wait(prompt_id)["outputs"]["train"]["tessera"]
    check_newest(server, stop_summary["steps_done"], f"{NAME}.safetensors")
    assert stop_summary["status"] == "stopped" and math.isclose(stop_summary["steps_done"], 5, abs_tol=1)

    with paused_at(server, 9):  # goes on, and is cancelled
        prompt_id = server.queue(graph)
        wait_for_step(server, NAME, 8, prompt_id)
        server.interrupt()
    server.wait(prompt_id)
    step = newest_step(server, NAME)
    assert step > stop_summary["steps_done"]
    check_newest(server, step, f"{NAME}-step{step:06d}.safetensors")

    entry = server.run(graph)  # goes on to the end
    (last_summary,) = entry["outputs"]["train"]["tessera"]
    assert f"Resumed at step {step}." in last_summary["notes"] and last_summary["steps_done"] == 12
    check_newest(server, 12, f"{NAME}.safetensors")
    saved = sorted((server.base / "output").glob("day_*.safetensors"))[-1]
    newest = server.base / "output" / last_summary["path"]
    assert norms(saved) == norms(newest)  # Save LoRA follows, under other names
