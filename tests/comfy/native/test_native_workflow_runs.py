"""The shared workflows that train with ComfyUI's own forward, queued on tiny models: each leaves a LoRA, and pictures
sampled with it."""

import json
from typing import Any

import numpy as np
import pytest
from comfy_server import PACK, ComfyServer
from PIL import Image
from safetensors import safe_open

# The workflow, and the tiny model in place of what its loaders name.
CASES = {"z_image_lora": "z-image", "krea2_lora": "krea-2", "anima_lora": "anima", "sdxl_lora": "sdxl"}
STEPS = 2
# The places of MODEL, CLIP and VAE among the outputs of each loader.
LOADERS = {
    "TesseraLoadDiffusionModel": [0],
    "UNETLoader": [0],
    "CLIPLoader": [1],
    "VAELoader": [2],
    "CheckpointLoaderSimple": [0, 1, 2],
}
SMALL: dict[str, dict[str, Any]] = {
    "TesseraTrainLora": {"steps": STEPS, "compile": "off", "rank": 4},
    "TesseraPrepareDataset": {"megapixels": 0.01},
    "KSampler": {"steps": 2},
    "EmptySD3LatentImage": {"width": 64, "height": 64},
    "EmptyLatentImage": {"width": 64, "height": 64},
}


@pytest.fixture(scope="module")
def filled(server: ComfyServer) -> ComfyServer:
    """The server with two pictures in the folder that the workflows name."""
    folder = server.base / "input" / "my_pictures"
    folder.mkdir(exist_ok=True)
    for number, size in enumerate([(64, 96), (96, 64)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return server


def fitted(name: str) -> dict[str, Any]:
    prompt = json.loads((PACK / "workflows" / "api" / f"{name}.json").read_text(encoding="utf-8"))
    loaders = {key: node["class_type"] for key, node in prompt.items() if node["class_type"] in LOADERS}
    for key in loaders:
        del prompt[key]
    for node in prompt.values():
        node["inputs"] |= SMALL.get(node["class_type"], {})
        for each, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in loaders:
                node["inputs"][each] = ["tiny", LOADERS[loaders[value[0]]][value[1]]]
    prompt["tiny"] = {"class_type": "TesseraTinyNative", "inputs": {"name": CASES[name]}}
    return prompt


@pytest.mark.parametrize("name", CASES)
def test_a_workflow_trains_and_samples_with_its_lora(name, filled):
    prompt = fitted(name)
    entry = filled.run(prompt)
    (train,) = (key for key, node in prompt.items() if node["class_type"] == "TesseraTrainLora")
    (summary,) = entry["outputs"][train]["tessera"]
    assert (summary["status"], summary["steps_done"]) == ("finished", STEPS), summary
    with safe_open(filled.base / "output" / summary["path"], "pt") as file:
        assert len(file.keys()) == 3 * summary["targets"] > 0
    saved = [file for output in entry["outputs"].values() for file in output.get("images", ())]
    files = [filled.base / "output" / f["subfolder"] / f["filename"] for f in saved if f["type"] == "output"]
    assert files and all(path.stat().st_size > 0 for path in files)
    assert "lora key not loaded" not in filled.log.read_text(encoding="utf-8", errors="replace")
