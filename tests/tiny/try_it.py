"""The workflow *Try it* as a prompt, and each of its pictures sampled with and without its LoRA."""

import copy
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def load_prompt(**train: Any) -> dict[str, Any]:
    """Its API form. train: inputs of Train LoRA."""
    prompt = json.loads((ROOT / "workflows" / "api" / "try_it.json").read_text(encoding="utf-8"))
    for each in prompt.values():
        if each["class_type"] == "TesseraTrainLora":
            each["inputs"] |= train
    return prompt


def captions() -> dict[str, tuple[Path, str]]:
    """name: (picture, caption) of what it trains on."""
    pictures = sorted((ROOT / "pictures" / "try_it").glob("*.png"))
    return {p.stem: (p, p.with_suffix(".txt").read_text(encoding="utf-8").strip()) for p in pictures}


def sampled_each(prompt: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The prompt with what follows its own prompt once for each caption, and the SaveImage nodes: with or without the
    LoRA → name of the picture → node."""
    first = next(key for key, each in prompt.items() if each["class_type"] == "CLIPTextEncode")
    kinds = ("FluxGuidance", "KSampler", "VAEDecode", "SaveImage")
    copied = [first, *(key for key, each in prompt.items() if each["class_type"] in kinds)]
    made, shown = dict(prompt), {"without": dict[str, str](), "with": dict[str, str]()}
    for name, (_, caption) in captions().items():
        names = {key: f"{name} {key}" for key in copied}
        for key in copied:
            each = made[names[key]] = copy.deepcopy(prompt[key])
            for slot, value in each["inputs"].items():
                if isinstance(value, list) and value[0] in names:
                    each["inputs"][slot] = [names[value[0]], value[1]]
            if each["class_type"] == "SaveImage":
                shown[each["_meta"]["title"].split()[1]][name] = names[key]
        made[names[first]]["inputs"]["text"] = caption
    return made, shown
