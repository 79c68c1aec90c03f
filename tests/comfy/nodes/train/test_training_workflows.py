"""The shared workflows that train Wan, Qwen-Image, Chroma, Kontext and FLUX.2, fitted to tiny models: queued on a
server they leave a LoRA that changes what is sampled with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from comfy_server import PACK, ComfyServer, ServerFailure
from PIL import Image
from safetensors import safe_open
from thinned import one_in
from tiny.data.films import write_film
from tiny.models.chroma import write_chroma
from tiny.nodes.workflow import fit_workflow

API = PACK / "workflows" / "api"
STEPS = 2
KLEIN_WIDTH = 3 * 32  # three layers of the tiny text encoder
WAN = tiny.WAN_NAMES
QWEN = tiny.QWEN_NAMES
FLUX = tiny.FLUX_NAMES
CHROMA = FLUX | {"unet_name": "tiny_chroma.safetensors", "clip_name": FLUX["clip_name2"]}
# The models that loaders name, in the order of the loaders, and which encoders stand in for those of core's loaders.
CASES: dict[str, tuple[dict[str, str], list[str], dict[str, Any]]] = {
    "wan_t2v_lora": (WAN, [WAN["unet_name"]], {}),
    "wan_i2v_lora": (WAN, ["tiny_wan_i2v.safetensors"], {"clip_vision": True}),
    "wan22_two_experts_lora": (WAN, ["tiny_wan_high.safetensors", "tiny_wan_low.safetensors"], {}),
    "qwen_image_lora": (QWEN, [QWEN["unet_name"]], {}),
    "qwen_edit_lora": (QWEN, [QWEN["unet_name"]], {"qwen": QWEN["clip_name"]}),
    "flux_kontext_lora": (FLUX, [FLUX["unet_name"]], {}),
    "flux2_lora": (FLUX | {"clip_name": ""}, ["tiny_flux2.safetensors"], {"flux2": True}),
    "chroma_lora": (CHROMA, [CHROMA["unet_name"]], {}),
    "everything_at_once": (FLUX, [FLUX["unet_name"]], {}),
    "lora_with_everything": (FLUX, [FLUX["unet_name"]], {}),
    "lora_with_validation": (FLUX, [FLUX["unet_name"]], {}),
    "age_slider": (FLUX, [FLUX["unet_name"]], {}),
}
SMALL: dict[str, dict[str, Any]] = {
    "TesseraTrainLora": {"steps": STEPS, "compile": "off", "rank": 4},
    "TesseraPrepareDataset": {"megapixels": 0.01, "control_megapixels": 0.01},
    "TesseraLoraNetwork": {"rank": 4},
    "TesseraOptimizer": {"warmup_steps": 1},
    "TesseraMemory": {"blocks_to_swap": 0, "checkpointing": "full"},
    "TesseraPreview": {"width": 64, "height": 64, "steps": 2, "every_n_steps": 1},
    "TesseraValidation": {"part": 0.5, "every_n_steps": 1},
    "KSampler": {"steps": 2},
    "KSamplerAdvanced": {"steps": 2},
    "EmptyHunyuanLatentVideo": {"width": 64, "height": 64, "length": 5},
    "WanImageToVideo": {"width": 64, "height": 64, "length": 5},
    "EmptySD3LatentImage": {"width": 64, "height": 64},
    "TesseraCompareLoras": {"width": 64, "height": 64, "steps": 2},
    "EmptyFlux2LatentImage": {"width": 64, "height": 64},
    "Flux2Scheduler": {"steps": 2, "width": 64, "height": 64},
}


@pytest.fixture(scope="module")
def filled(server: ComfyServer) -> ComfyServer:
    """The server with the tiny models of each workflow, and pictures and clips in the folders that they name."""
    models = server.base / "models" / "diffusion_models"
    tiny.write_wan(models / "tiny_wan_i2v.safetensors", variant="2.1-i2v")
    for seed, side in enumerate(("high", "low"), start=1):
        tiny.write_wan(models / f"tiny_wan_{side}.safetensors", seed=seed)
    write_chroma(models / CHROMA["unet_name"])
    tiny.write_flux2(models / "tiny_flux2.safetensors", context_dim=KLEIN_WIDTH, guidance=False)
    input_folder = server.base / "input"
    for folder in ("my_clips", "my_pictures", "my_edits", "my_edits_before"):
        (input_folder / folder).mkdir(exist_ok=True)
    for number, size in enumerate([(64, 96), (96, 64)]):
        write_film(input_folder / "my_clips" / f"{number}.mp4", 9, size=size, caption=f"clip {number}")
        for folder in ("my_pictures", "my_edits", "my_edits_before"):
            pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(input_folder / folder / f"{number}.png")
            (input_folder / folder / f"{number}.txt").write_text(f"picture {number}")
    Image.new("RGB", (64, 64), "teal").save(input_folder / "example.png")
    return server


def fitted(name: str) -> dict[str, Any]:
    names, models, encoders = CASES[name]
    workflow = json.loads((API / f"{name}.json").read_text(encoding="utf-8"))
    folders = {key: node["inputs"].get("folder") for key, node in workflow.items()}
    prompt = fit_workflow(workflow, names)
    loaders = iter(models)
    for key, node in prompt.items():
        kind, inputs = node["class_type"], node["inputs"]
        inputs |= SMALL.get(kind, {})
        if kind == "TesseraLoadDiffusionModel":
            inputs |= {"unet_name": next(loaders), "blocks_to_swap": 1}
        elif kind == "TesseraVideoFolder":
            inputs["target_frames"] = "5" if name == "wan_i2v_lora" else "1, 5"
        elif kind == "TextEncodeQwenImageEditPlus":
            inputs.pop("vae")  # core's node enlarges the picture to a megapixel, of which a tiny VAE makes long work
        elif kind == "TesseraImageFolder":
            inputs["folder"] = folders[key]
        elif kind == "FluxKontextImageScale":
            scale = {"upscale_method": "bilinear", "width": 64, "height": 64, "crop": "disabled"}
            node |= {"class_type": "ImageScale", "inputs": inputs | scale}
        elif kind == "TesseraCompileModel":
            inputs["backend"] = "aot_eager"
        elif kind == "KSamplerAdvanced":
            inputs |= (
                {"start_at_step": 0, "end_at_step": 1} if inputs["add_noise"] == "enable" else {"start_at_step": 1}
            )
    if encoders:
        use_encoders(prompt, {"qwen": "", "flux2": False, "clip_vision": False} | encoders)
    return prompt


def use_encoders(prompt: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Takes what the fixture pack's loader gives in place of what core's loaders would."""
    outputs = {"CLIPVisionLoader": 2}
    if inputs["qwen"] or inputs["flux2"]:
        outputs["TesseraTinyClipLoader"] = 0
    if inputs["flux2"]:
        outputs["VAELoader"] = 1
    replaced = {key: outputs[node["class_type"]] for key, node in prompt.items() if node["class_type"] in outputs}
    for node in prompt.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in replaced:
                node["inputs"][name] = ["encoders", replaced[value[0]]]
    for key in replaced:
        del prompt[key]
    prompt["encoders"] = {"class_type": "TesseraTinyEncoders", "inputs": inputs}


def keys_of(prompt: dict[str, Any], kind: str) -> list[str]:
    return [key for key, node in prompt.items() if node["class_type"] == kind]


def saved_frames(server: ComfyServer, entry: dict[str, Any]) -> list[Path]:
    saved = [file for output in entry["outputs"].values() for file in output.get("images", ())]
    return [server.base / "output" / f["subfolder"] / f["filename"] for f in saved if f["type"] == "output"]


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_a_workflow_trains_and_samples_with_its_lora(name, filled):
    prompt = fitted(name)
    entry = filled.run(prompt)
    (train,) = keys_of(prompt, "TesseraTrainLora")
    summaries = entry["outputs"][train]["tessera"]
    assert len(summaries) == (2 if name == "wan22_two_experts_lora" else 1)
    for summary in summaries:
        assert (summary["status"], summary["steps_done"]) == ("finished", STEPS), summary
        assert summary["blocks_swapped"] == 1  # as set on the loader
        with safe_open(filled.base / "output" / summary["path"], "pt") as file:
            assert len(file.keys()) == 3 * summary["targets"] > 0
        if name == "lora_with_validation":
            check_what_each_part_left(summary, (filled.base / "output" / summary["path"]).parent)
    files = saved_frames(filled, entry)
    sampled = [path for path in files if "loras" not in path.parts]  # where previews lie
    assert bool(sampled) == (name != "lora_with_everything")  # which ends with the LoRA
    assert all(path.stat().st_size > 0 for path in files)
    log = filled.log.read_text(encoding="utf-8", errors="replace")
    assert "lora key not loaded" not in log


def check_what_each_part_left(summary: dict[str, Any], folder: Path) -> None:
    """A preview at the start and after each step, validation at the same times, the best LoRA, and the graph."""
    points, best = summary["validation"]["points"], summary["validation"]["best"]
    assert [point["step"] for point in points] == [0, 1, 2]
    assert best["loss"] == min(point["loss"] for point in points) and (folder / best["file"]).is_file()
    previews = summary["previews"]
    assert len(previews["files"]) == 3
    assert all((folder / file).is_file() for file in (*previews["files"], previews["sheet"]))
    assert (folder / f"{summary['output_name']}.api.json").is_file()


def _drop_inputs(kind: str, *names: str) -> Callable[[dict[str, Any]], None]:
    def change(prompt: dict[str, Any]) -> None:
        (key,) = keys_of(prompt, kind)
        for name in names:
            prompt[key]["inputs"].pop(name)

    return change


def test_the_saves_of_a_run_are_compared_in_a_grid(filled):
    """A column without LoRA and one for each save of `my_best_face`, a row for each of three prompts with two seeds."""
    filled.run(fitted("lora_with_validation"))  # what ran above is not trained again
    saves = list((filled.base / "output" / "loras").glob("my_best_face (*)/**/my_best_face*.safetensors"))
    prompt = fit_workflow(json.loads((API / "compare_loras.json").read_text(encoding="utf-8")), FLUX)
    for node in prompt.values():
        if node["class_type"] in ("TesseraCompareLoras", "TesseraPreview"):
            node["inputs"] |= {"width": 64, "height": 64, "steps": 1}
        if node["class_type"] == "TesseraCompareLoras":
            node["inputs"]["loras"] = "my_best_face (*)/*"
    (grid,) = saved_frames(filled, filled.run(prompt))
    width, height = Image.open(grid).size
    columns, rows = width // 64, height // 64
    assert (columns, len(saves)) == (3, 2) and 6 <= rows < 12, (width, height, saves)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "wan_i2v_lora",
            _drop_inputs("TesseraPrepareDataset", "image_to_video", "clip_vision"),
            "has no start picture",
        ),
        ("wan_i2v_lora", _drop_inputs("TesseraPrepareDataset", "clip_vision"), "has no CLIP vision output"),
    ],
)
def test_an_image_to_video_model_is_never_trained_blind(name, change, message, filled):
    prompt = fitted(name)
    change(prompt)
    with pytest.raises(ServerFailure, match=message):
        filled.run(prompt)
