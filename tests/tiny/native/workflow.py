"""Fit a shared workflow of a model without a forward of our own to its tiny twin."""

import json
from pathlib import Path
from typing import Any

WORKFLOWS = Path(__file__).resolve().parents[3] / "workflows" / "api"
# The workflow, and the tiny model in place of its loaders.
CASES = {
    "z_image_lora": "z-image",
    "krea2_lora": "krea-2",
    "anima_lora": "anima",
    "sdxl_lora": "sdxl",
    "hunyuan_video15_lora": "hunyuan-video-1.5",
    "ltx_video_lora": "ltx-video",
    "ltx2_3_lora": "ltx-2.3",
    "ltx2_5_lora": "ltx-2.3",
    "minimax_h3_lora": "minimax-h3",
}
# Of CASES, those that train on clips.
CLIPS = ("hunyuan_video15_lora", "ltx_video_lora", "ltx2_3_lora", "ltx2_5_lora", "minimax_h3_lora")
LEAST_FRAMES = {"minimax_h3_lora": 5}  # of a preview that is a clip, if not 9
FOLDERS = ("TesseraImageFolder", "TesseraVideoFolder")
# The places of MODEL, CLIP, VAE and VAE of the sound among the outputs of each loader.
LOADERS = {
    "TesseraLoadDiffusionModel": [0],
    "UNETLoader": [0],
    "CLIPLoader": [1],
    "DualCLIPLoader": [1],
    "VAELoader": [2],
    "CheckpointLoaderSimple": [0, 1, 2],
    "LTXAVTextEncoderLoader": [1],
    "LTXVAudioVAELoader": [3],
}
SMALL: dict[str, dict[str, Any]] = {
    "TesseraTrainLora": {"steps": 2, "compile": "off", "rank": 4},
    "TesseraPrepareDataset": {"megapixels": 0.01},
    "KSampler": {"steps": 2},
    "EmptySD3LatentImage": {"width": 64, "height": 64},
    "EmptyLatentImage": {"width": 64, "height": 64},
    "TesseraVideoFolder": {"target_frames": "9"},
    "EmptyHunyuanVideo15Latent": {"width": 64, "height": 64, "length": 5},
    "EmptyLTXVLatentVideo": {"width": 64, "height": 64, "length": 9},
    "LTXVScheduler": {"steps": 2},
    "LTXVEmptyLatentAudio": {"frames_number": 9},
    "ManualSigmas": {"sigmas": "1.0, 0.7, 0.0"},
    "EmptyMiniMaxH3LatentAV": {"width": 64, "height": 64, "length": 5},
    "TesseraLoraNetwork": {"training_adapter": "none"},
}


def _places(loader: dict[str, Any]) -> list[int]:
    return [3] if "audio" in str(loader["inputs"].get("vae_name")) else LOADERS[loader["class_type"]]


def fitted(name: str, folder: str = "", **training: Any) -> dict[str, Any]:
    """Return the workflow `name` in API form with the tiny model in place of its loaders.

    folder: of the pictures or clips, in place of the workflow's own; training: inputs of Train LoRA.
    """
    prompt = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    loaders = {key: _places(node) for key, node in prompt.items() if node["class_type"] in LOADERS}
    # Sound is decoded by a VAE of its own, of which there is no tiny one.
    sounds = {key for key, node in prompt.items() if node["class_type"] == "VAEDecodeAudio"}
    for key in (*loaders, *sounds):
        del prompt[key]
    for node in prompt.values():
        kind = node["class_type"]
        if kind == "TesseraPreview":
            frames = min(node["inputs"]["frames"], LEAST_FRAMES.get(name, 9))
            node["inputs"] |= {"width": 64, "height": 64, "steps": 2, "frames": frames}
        node["inputs"] |= SMALL.get(kind, {}) | (training if kind == "TesseraTrainLora" else {})
        if folder and kind in FOLDERS:
            node["inputs"]["folder"] = folder
        for name_of_input, value in list(node["inputs"].items()):
            if isinstance(value, list) and value[0] in sounds:
                del node["inputs"][name_of_input]
            elif isinstance(value, list) and value[0] in loaders:
                node["inputs"][name_of_input] = ["tiny", loaders[value[0]][value[1]]]
    prompt["tiny"] = {"class_type": "TesseraTinyNative", "inputs": {"name": CASES[name]}}
    return prompt
