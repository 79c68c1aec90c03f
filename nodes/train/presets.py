"""Presets of Train LoRA: values that the browser fills in for a kind of subject, and notes on prompts that differ.

Steps, rank and accumulation are those of the help page, which names its sources (ai-toolkit's FLUX example;
DreamBooth, arXiv 2208.12242; LoRA, arXiv 2106.09685; musubi-tuner's docs/wan.md). Learning rates are those of
musubi-tuner's docs (Wan, HunyuanVideo 2e-4; Qwen-Image 5e-5; HunyuanVideo 1.5, Kandinsky 5, Krea 2, FLUX.2, Z-Image
1e-4), of ai-toolkit's examples (FLUX.1, Chroma 1e-4; HiDream I1 2e-4), of sd-scripts' docs (SDXL, SD3, Anima 1e-4), and
of the trainers of LTX-Video (2e-4) and LTX-2 (1e-4 for text to video).
"""

import re
from collections.abc import Mapping
from typing import Any

CUSTOM = "custom"
MOTION = "motion"
USUAL_RATE = 1e-4

# kind of subject → (steps, rank, gradient_accumulation), quick, balanced and best.
KINDS = {
    "face": ((1000, 16, 1), (2000, 16, 1), (3000, 32, 1)),
    "style": ((1000, 16, 2), (2000, 16, 4), (3000, 32, 4)),
    "object": ((800, 8, 1), (1200, 16, 1), (1500, 16, 1)),
    MOTION: ((1500, 32, 1), (2000, 32, 1), (3000, 32, 1)),
}
# (name, pattern for the title of its family or its file name in lower case, is a video model, learning rate)
FAMILIES = (
    ("Wan", r"(^|[^a-z])wan", True, 2e-4),
    ("HunyuanVideo 1.5", r"hunyuan[ _-]?video[ _-]?1[._]?5", True, USUAL_RATE),
    ("HunyuanVideo", r"hunyuan[ _-]?video", True, 2e-4),
    ("LTX-2", r"(^|[^a-z])ltx[ _-]?2([^0-9b]|$)", True, USUAL_RATE),
    ("LTX-Video", r"(^|[^a-z])ltx", True, 2e-4),
    ("Kandinsky Video", r"kandinsky.*(video|[ti]2v)", True, USUAL_RATE),
    ("MiniMax", r"minimax", True, USUAL_RATE),
    ("Qwen-Image", r"qwen[ _-]?image", False, 5e-5),
    ("FLUX", r"flux", False, USUAL_RATE),
    ("Chroma", r"chroma", False, USUAL_RATE),
    ("Z-Image", r"z[ _-]?image", False, USUAL_RATE),
    ("Krea", r"krea", False, USUAL_RATE),
    ("HiDream", r"hidream", False, 2e-4),
    ("Anima", r"(^|[^a-z])anima([^a-z]|$)", False, USUAL_RATE),
    ("SDXL", r"sd[ _-]?xl", False, USUAL_RATE),
    ("SD", r"(^|[^a-z])sd[ _-]?[0-9]", False, USUAL_RATE),
)

PRESETS = {
    f"{kind}, {effort}": {"steps": steps, "rank": rank, "gradient_accumulation": accumulation}
    for kind, rows in KINDS.items()
    for effort, (steps, rank, accumulation) in zip(("quick", "balanced", "best"), rows, strict=True)
}


def for_the_browser() -> dict[str, Any]:
    """Return the options of the widget, read by its file in web/js."""
    families = [{"name": n, "pattern": p, "video": v, "learning_rate": r} for n, p, v, r in FAMILIES]
    return {"presets": PRESETS, "families": families, "learning_rate": USUAL_RATE}


def preset_notes(preset: str, title: str, values: Mapping[str, float]) -> list[str]:
    """List notes on values of a prompt that differ from its preset's: the values take precedence.

    title: title of the model's family, such as Wan 2.1.
    values: values, by name, of the node's own inputs that are in effect.

    Raises ValueError for a preset that does not exist, and for a motion preset on an image model.
    """
    if preset == CUSTOM:
        return []
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; choose one of {', '.join((CUSTOM, *PRESETS))}.")
    match = next((family for family in FAMILIES if re.search(family[1], title.lower())), None)
    _, _, video, rate = match or ("", "", True, USUAL_RATE)
    if preset.startswith(MOTION) and not video:
        raise ValueError(
            f"preset is {preset!r}, which is for video models, and {title} makes pictures; choose one of a face, a "
            "style or an object, or custom."
        )
    stands_for = {**PRESETS[preset], "learning_rate": rate}
    other = {name: value for name, value in stands_for.items() if values.get(name, value) != value}
    if not other:
        return []
    input_values = ", ".join(f"{name} {values[name]:g}" for name in other)
    preset_values = ", ".join(f"{name} {value:g}" for name, value in other.items())
    return [
        f"The preset '{preset}' means {preset_values} for {title}, but this run uses {input_values}, as set on the "
        "inputs. Choose the preset again on the node to fill them in."
    ]
