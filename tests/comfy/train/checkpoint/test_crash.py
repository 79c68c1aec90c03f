"""A real server: what a run leaves when it is killed or cancelled, and what it gives back when it is queued again."""

import json
import math
import random
import shutil
import time

import comfy.lora
import pytest
import torch
from comfy_server import ServerFailure, error_of
from safetensors.torch import load_file
from tiny.nodes.prompt import ksampler, node
from tiny.nodes.server_runs import STEPS, newest_step, paused_at, put_pictures, training_graph, wait_for_step


def folder_of(server, name):
    (folder,) = (server.base / "output" / "loras").glob(f"{name} (*)")
    return folder


def final_lora(server, name):
    return load_file(folder_of(server, name) / f"{name}.safetensors")


def assert_same(first, second):
    assert first.keys() == second.keys() and first
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def test_a_server_killed_at_any_moment_goes_on_to_the_file_of_an_uninterrupted_run(own_server, tiny_loaders):
    seed = random.SystemRandom().randrange(2**32)
    print(f"the moments of this test come from seed {seed}")
    chance = random.Random(seed)
    put_pictures(own_server.base)
    own_server.start()
    killed_at = []
    for _ in range(2):
        step = newest_step(own_server, "killed")
        with paused_at(own_server, STEPS - 4):
            prompt_id = own_server.queue(training_graph(tiny_loaders, "killed"))
            wait_for_step(own_server, "killed", min(step + chance.randrange(2, 13), STEPS - 12), prompt_id)
            time.sleep(chance.random() * 0.1)
            own_server.kill()
        killed_at.append(newest_step(own_server, "killed"))
        assert not (folder_of(own_server, "killed") / "killed.safetensors").exists()
        own_server.start()
    entry = own_server.run(training_graph(tiny_loaders, "killed"))
    (summary,) = entry["outputs"]["train"]["tessera"]
    assert f"Resumed at step {killed_at[-1]}." in summary["notes"], (summary["notes"], killed_at)
    whole = own_server.run(training_graph(tiny_loaders, "whole"))["outputs"]["train"]["tessera"][0]
    assert_same(final_lora(own_server, "killed"), final_lora(own_server, "whole"))
    assert summary["loss"] == whole["loss"] and not [note for note in whole["notes"] if "Resumed" in note]


def test_cancel_leaves_a_lora_that_loads_and_queueing_again_finishes_the_run(server, tiny_loaders, tiny_flux):
    put_pictures(server.base)
    graph = training_graph(tiny_loaders, "cancelled")
    with paused_at(server, STEPS - 4):
        prompt_id = server.queue(graph)
        wait_for_step(server, "cancelled", 4, prompt_id)
        server.interrupt()
    entry = server.wait(prompt_id)
    assert "TesseraTrainLora train was interrupted" in error_of(entry)

    folder = folder_of(server, "cancelled")
    summary = json.loads((folder / "summary.json").read_text())
    step = summary["steps_done"]
    assert summary["status"] == "cancelled" and 4 <= step < STEPS and len(summary["loss"]) == step
    assert newest_step(server, "cancelled") == step
    lora = load_file(folder / "cancelled_steps" / f"cancelled-step{step:06d}.safetensors")
    keys = comfy.lora.model_lora_keys_unet(tiny_flux.model, {})
    patches = comfy.lora.load_lora(lora, keys)
    modules = {key.removesuffix(".alpha") for key in lora if key.endswith(".alpha")}
    assert len(patches) == len(modules) == 2 * 8 + 2 * 2
    assert {key for patch in patches.values() for key in patch.loaded_keys} == set(lora)

    repeat = server.run(graph)["outputs"]["train"]["tessera"][0]
    assert f"Resumed at step {step}." in repeat["notes"]
    server.run(training_graph(tiny_loaders, "not cancelled"))
    assert_same(final_lora(server, "cancelled"), final_lora(server, "not cancelled"))


def test_history_tells_a_finished_run_and_queueing_it_again_returns_it_from_disk(server, tiny_loaders):
    put_pictures(server.base)
    graph = training_graph(tiny_loaders, "styles/told")
    (summary,) = server.run(graph)["outputs"]["train"]["tessera"]
    assert summary["status"] == "finished" and summary["steps"] == summary["steps_done"] == STEPS
    assert len(summary["loss"]) == STEPS and all(math.isfinite(loss) and loss > 0 for loss in summary["loss"])
    folder = server.base / "output" / "loras" / "styles" / summary["folder"]
    assert summary["path"] == f"loras/styles/{summary['folder']}/told.safetensors"
    assert "told.safetensors" in summary["files"] and all((folder / name).is_file() for name in summary["files"])
    assert (summary["graphs_planned"], summary["graphs_compiled"]) == (0, 0)
    assert summary["seconds_per_step"] > 0 and summary["peak_memory_mib"] > 0 and summary["compile_seconds"] == 0
    assert json.loads((folder / "summary.json").read_text())["loss"] == summary["loss"]

    def stamps():
        return {path: path.stat().st_mtime_ns for path in (server.base / "output" / "loras").rglob("*")}

    previous = stamps()
    server.run(graph)
    # Core drops what it kept for a graph when it is told to free memory, and the node runs again.
    server.post("/free", {"unload_models": True, "free_memory": True})
    server.run(tiny_loaders | {"text": node("CLIPTextEncode", clip=["clip", 0], text="x"), "out": preview("text")})
    entry = server.run(graph)
    cached = next(message for kind, message in entry["status"]["messages"] if kind == "execution_cached")
    assert "train" not in cached["nodes"]
    (repeated,) = entry["outputs"]["train"]["tessera"]
    assert repeated == summary and stamps() == previous


def test_a_saved_state_can_be_chosen_by_its_name_as_soon_as_it_is_there(server, tiny_loaders):
    put_pictures(server.base)
    server.run(training_graph(tiny_loaders, "chosen", steps=6))
    name = f"{folder_of(server, 'chosen').name}/state-000004.tessera"
    entry = server.run(training_graph(tiny_loaders, "chosen", steps=8, resume=name))
    (summary,) = entry["outputs"]["train"]["tessera"]
    assert "Resumed at step 4." in summary["notes"] and len(summary["loss"]) == 8
    with pytest.raises(ServerFailure, match="there is no state .chosen/state-000001.tessera. any more; choose another"):
        server.queue(training_graph(tiny_loaders, "chosen", steps=8, resume="chosen/state-000001.tessera"))


def preview(source):
    return node("PreviewAny", source=[source, 0])


def test_the_outputs_of_training_go_straight_into_cores_nodes(server, tiny_loaders):
    put_pictures(server.base)
    entry = server.run(
        training_graph(tiny_loaders, "onwards", steps=3)
        | {
            "with_lora": node(
                "LoraModelLoader", model=["model", 0], lora=["train", 0], strength_model=1.0, bypass=False
            ),
            "empty": node("EmptySD3LatentImage", width=64, height=64, batch_size=1),
            "sampled": ksampler("with_lora", latent="empty"),
            "picture": node("VAEDecode", samples=["sampled", 0], vae=["vae", 0]),
            "saved_picture": node("SaveImage", images=["picture", 0], filename_prefix="with_lora"),
            "saved": node("SaveLoRA", lora=["train", 0], prefix="loras/from_core", steps=3),
            "plot": node("LossGraphNode", loss=["train", 1], filename_prefix="loss"),
            "path": node("PreviewAny", source=["train", 2]),
        }
    )
    (saved,) = (server.base / "output" / "loras").glob("from_core*.safetensors")
    assert_same(load_file(saved), final_lora(server, "onwards"))
    assert entry["outputs"]["saved_picture"]["images"] and entry["outputs"]["plot"]["images"]
    (path,) = entry["outputs"]["path"]["text"]
    assert path == str(folder_of(server, "onwards") / "onwards.safetensors")
    assert "lora key not loaded" not in server.log.read_text()


def test_a_lora_deleted_while_the_server_runs_is_made_again(server, tiny_loaders):
    put_pictures(server.base)
    graph = training_graph(tiny_loaders, "deleted", steps=4)

    def queue():
        """Queue, and return True where core took the node's outputs from its cache, with what the node told."""
        entry = server.run(graph)
        cached = next(message for kind, message in entry["status"]["messages"] if kind == "execution_cached")
        return "train" in cached["nodes"], entry["outputs"]["train"]["tessera"][0]

    assert not queue()[0]
    original = final_lora(server, "deleted")
    assert queue()[0]
    folder = folder_of(server, "deleted")
    (folder / "deleted.safetensors").unlink()
    cached, summary = queue()
    assert not cached and "Resumed at step 4." in summary["notes"]
    assert_same(final_lora(server, "deleted"), original)
    assert queue()[0]
    shutil.rmtree(folder)
    cached, summary = queue()
    assert not cached and summary["files"] and not [note for note in summary["notes"] if "Resumed" in note]
    assert_same(final_lora(server, "deleted"), original)
    assert queue()[0]
