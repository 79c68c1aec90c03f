"""The shared workflows that compile, fitted to the tiny models: they run on a server, the history says what was
compiled, and a second picture compiles nothing."""

import json
from pathlib import Path
from typing import Any

import av
import pytest
import tiny
from comfy_server import PACK, ComfyServer
from PIL import Image
from tiny.nodes.workflow import fit_workflow

API = PACK / "workflows" / "api"
# Settings of this file's own: graphs that other tests made for the same model belong to other settings.
OWN_LIMIT = 61

# Files, the graphs that the first picture compiles for each kind of block, and the sizes of the frames that are saved.
# FLUX has one graph for each kind. Wan has one, as both prompts have 512 tokens and run as one batch. Qwen-Image has
# two, as each prompt has its own length and runs by itself.
CASES = {
    "flux_compile": (tiny.FLUX_NAMES, {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}, [(128, 128)]),
    "flux_block_swap": (tiny.FLUX_NAMES, {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}, [(128, 128)]),
    "wan_compile": (tiny.WAN_NAMES, {"WanAttentionBlock": 1}, 5 * [(64, 64)]),
    "qwen_image_compile": (tiny.QWEN_NAMES, {"QwenImageTransformerBlock": 2}, [(128, 128)]),
}


def fitted(name: str, names: dict[str, str], backend: str) -> dict[str, Any]:
    prompt = fit_workflow(json.loads((API / f"{name}.json").read_text(encoding="utf-8")), names)
    node_of(prompt, "TesseraCompileModel")["inputs"] |= {"backend": backend, "cache_size_limit": OWN_LIMIT}
    loader = node_of(prompt, "TesseraLoadDiffusionModel")["inputs"]
    if loader["blocks_to_swap"] == -1:  # all of the tiny model fits
        loader["blocks_to_swap"] = 3
    return prompt


def node_of(prompt: dict[str, Any], kind: str) -> dict[str, Any]:
    (match,) = (node for node in prompt.values() if node["class_type"] == kind)
    return match


def report_of(entry: dict[str, Any]) -> dict[str, Any]:
    (key,) = (key for key, node in entry["prompt"][2].items() if node["class_type"] == "TesseraCompileReport")
    (facts,) = entry["outputs"][key]["tessera"]
    return facts


def saved_file(server: ComfyServer, entry: dict[str, Any]) -> Path:
    (saved,) = (file for output in entry["outputs"].values() for file in output.get("images", ()))
    path = server.base / "output" / saved["subfolder"] / saved["filename"]
    assert path.is_file()
    return path


def frames_of(file: Path) -> list[tuple[int, int]]:
    """Width and height of each frame of a video, or of a picture."""
    with av.open(str(file)) as container:
        return [(frame.width, frame.height) for frame in container.decode(video=0)]


def by_region(report: dict[str, Any], fact: str) -> dict[str, Any]:
    return {region["region"]: region[fact] for region in report["regions"]}


@pytest.mark.parametrize("name", CASES)
def test_the_first_run_compiles_each_kind_of_block_and_another_seed_nothing(name, server):
    names, graphs, frames = CASES[name]
    prompt = fitted(name, names, "aot_eager")
    first = server.run(prompt)
    report = report_of(first)
    assert by_region(report, "graphs") == graphs and report["graphs"] == sum(graphs.values())
    assert report["graph_breaks"] == 0 and set(by_region(report, "eager_calls").values()) == {0}
    assert report["compile_seconds"] > 0
    headings, *rows = report["text"].splitlines()[1 : 2 + len(report["regions"])]
    assert headings.split()[-1] == "MiB"
    assert [int(row.split()[-1]) for row in rows] == [region["memory_added_mib"] for region in report["regions"]]

    node_of(prompt, "KSampler")["inputs"]["seed"] += 1
    second = server.run(prompt)
    second_report = report_of(second)
    assert by_region(second_report, "graphs") == graphs
    assert second_report["compile_seconds"] == report["compile_seconds"]
    calls, more_calls = by_region(report, "compiled_calls"), by_region(second_report, "compiled_calls")
    assert more_calls == {region: 2 * n for region, n in calls.items()}
    assert frames_of(saved_file(server, first)) == frames
    assert saved_file(server, first).read_bytes() != saved_file(server, second).read_bytes()


def pixels(server: ComfyServer, prompt: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """The picture, and what the loader says of itself in the history."""
    entry = server.run(prompt)
    (key,) = (key for key, node in prompt.items() if node["class_type"] == "TesseraLoadDiffusionModel")
    with Image.open(saved_file(server, entry)) as picture:
        return list(picture.getdata()), entry["outputs"][key]["tessera"][0]["notes"]


def test_with_blocks_that_stream_the_picture_is_the_same_and_the_history_says_how_many(server):
    swapped, said = pixels(server, fitted("flux_block_swap", tiny.FLUX_NAMES, "aot_eager"))
    assert said[0].startswith("Block swap: 3 of 4 blocks stream; ")
    plain, said = pixels(server, fitted("flux_compile", tiny.FLUX_NAMES, "aot_eager"))
    assert said == [] and swapped == plain and len(set(plain)) > 100

    # Without Compile Model, as a client that knows neither node's options would ask for it.
    bare = fitted("flux_block_swap", tiny.FLUX_NAMES, "aot_eager")
    (compiling,) = (key for key, node in bare.items() if node["class_type"] == "TesseraCompileModel")
    loader = bare[compiling]["inputs"]["model"]
    bare = {key: node for key, node in bare.items() if not node["class_type"].startswith("TesseraCompile")}
    node_of(bare, "KSampler")["inputs"]["model"] = loader
    for optional in ("prefetch_blocks", "pin_memory"):
        del bare[loader[0]]["inputs"][optional]
    streamed, said = pixels(server, bare)
    assert said
    bare[loader[0]]["inputs"] = {k: bare[loader[0]]["inputs"][k] for k in ("unet_name", "weight_dtype")}
    resident, said = pixels(server, bare)
    assert said == [] and streamed == resident


def test_with_the_settings_that_the_workflow_is_shared_with_flux_compiles_and_is_measured(server):
    report = report_of(server.run(fitted("flux_compile", tiny.FLUX_NAMES, "inductor")))
    assert by_region(report, "graphs") == {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}
    assert report["notes"] == []
    for region in report["regions"]:
        assert region["how"]["backend"] == "inductor" and region["eager_calls"] == 0
        assert region["speed"][0]["compiled_ms"] > 0
        assert region["region"] in report["text"]
