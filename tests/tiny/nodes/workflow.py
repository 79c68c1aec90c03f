"""A workflow for real models, fitted to the tiny ones."""

import copy
from collections.abc import Mapping
from typing import Any


def fit_workflow(
    prompt: Mapping[str, Any], names: Mapping[str, str], folder: str = "", megapixels: float = 0.06, **train: Any
) -> dict[str, Any]:
    """The API workflow `prompt` with the tiny files (FLUX_NAMES, WAN_NAMES or QWEN_NAMES) and the pictures in `folder`.

    `train` are inputs of TesseraTrainLora. Core's loaders of text encoders become the fixture pack's one.
    """
    fitted = copy.deepcopy(dict(prompt))
    for node in fitted.values():
        kind, inputs = node["class_type"], node["inputs"]
        if kind in ("UNETLoader", "TesseraLoadDiffusionModel"):
            inputs["unet_name"] = names["unet_name"]
        elif kind == "DualCLIPLoader":
            node["class_type"] = "TesseraTinyClipLoader"
            node["inputs"] = {key: names[key] for key in ("clip_name1", "clip_name2")}
        elif kind == "CLIPLoader":
            node["class_type"] = "TesseraTinyClipLoader"
            node["inputs"] = {"clip_name1": names["clip_name"]}
        elif kind == "VAELoader":
            inputs["vae_name"] = names["vae_name"]
        elif kind == "TesseraImageFolder":
            inputs["folder"] = folder
        elif kind == "TesseraPrepareDataset":
            inputs["megapixels"] = megapixels
        elif kind == "EmptySD3LatentImage":
            inputs |= {"width": 128, "height": 128}
        elif kind == "EmptyHunyuanLatentVideo":
            inputs |= {"width": 64, "height": 64, "length": 5}
        elif kind == "KSampler":
            inputs["steps"] = 2
        elif kind == "TesseraPreview":
            inputs |= {"width": 64, "height": 64, "steps": 2, "frames": min(inputs["frames"], 5)}
        elif kind == "TesseraTrainLora":
            inputs.update(train)
    return fitted
