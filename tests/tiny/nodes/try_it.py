"""The workflow *Try it* as a prompt, and each of its pictures sampled with and without its LoRA."""

import copy
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def load_prompt(**train: Any) -> dict[str, Any]:
    """Its API form. train: inputs of Train LoRA."""
    prompt = json.loads((ROOT / "workflows" / "api" / "try_it.json").read_text(encoding="utf-8"))
    for node in prompt.values():
        if node["class_type"] == "TesseraTrainLora":
            node["inputs"] |= train
    return prompt


def captions() -> dict[str, tuple[Path, str]]:
    """Return name: (picture, caption) of its training data."""
    pictures = sorted((ROOT / "pictures" / "try_it").glob("*.png"))
    return {p.stem: (p, p.with_suffix(".txt").read_text(encoding="utf-8").strip()) for p in pictures}


def sampled_each(prompt: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Return the prompt with the nodes after its text once for each caption, and the SaveImage nodes: with or without
    the LoRA → name of the picture → node."""
    first = next(key for key, node in prompt.items() if node["class_type"] == "CLIPTextEncode")
    kinds = ("FluxGuidance", "KSampler", "VAEDecode", "SaveImage")
    copied = [first, *(key for key, node in prompt.items() if node["class_type"] in kinds)]
    result, savers = dict(prompt), {"without": dict[str, str](), "with": dict[str, str]()}
    for name, (_, caption) in captions().items():
        names = {key: f"{name} {key}" for key in copied}
        for key in copied:
            node = result[names[key]] = copy.deepcopy(prompt[key])
            for slot, value in node["inputs"].items():
                if isinstance(value, list) and value[0] in names:
                    node["inputs"][slot] = [names[value[0]], value[1]]
            if node["class_type"] == "SaveImage":
                savers[node["_meta"]["title"].split()[1]][name] = names[key]
        result[names[first]]["inputs"]["text"] = caption
    return result, savers
