"""Presets of Train LoRA: values that the browser fills in for a kind of subject, and notes on prompts that differ.

Steps, rank and accumulation are those of the help page, which names its sources (ai-toolkit's FLUX example;
DreamBooth, arXiv 2208.12242; LoRA, arXiv 2106.09685; musubi-tuner's docs/wan.md). Learning rates are the models' own,
`usual` of their rows in models/.
"""

from collections.abc import Mapping
from typing import Any

from ...models.catalogue.registry import known_by_file_name
from ...models.family import Family, UsualSettings

CUSTOM = "custom"
MOTION = "motion"

# kind of subject → (steps, rank, gradient_accumulation), quick, balanced and best.
KINDS = {
    "face": ((1000, 16, 1), (2000, 16, 1), (3000, 32, 1)),
    "style": ((1000, 16, 2), (2000, 16, 4), (3000, 32, 4)),
    "object": ((800, 8, 1), (1200, 16, 1), (1500, 16, 1)),
    MOTION: ((1500, 32, 1), (2000, 32, 1), (3000, 32, 1)),
}
PRESETS = {
    f"{kind}, {effort}": {"steps": steps, "rank": rank, "gradient_accumulation": accumulation}
    for kind, rows in KINDS.items()
    for effort, (steps, rank, accumulation) in zip(("quick", "balanced", "best"), rows, strict=True)
}


def for_the_browser() -> dict[str, Any]:
    """Return the options of the widget, read by its file in web/js."""
    families = [
        {
            "name": title,
            "pattern": usual.file_names,
            "video": not usual.pictures_only,
            "learning_rate": usual.learning_rate,
        }
        for title, usual in known_by_file_name()
    ]
    return {"presets": PRESETS, "families": families, "learning_rate": UsualSettings().learning_rate}


def preset_notes(preset: str, family: Family, values: Mapping[str, float]) -> list[str]:
    """List notes on values of a prompt that differ from its preset's: the values take precedence.

    family: of the model.
    values: values, by name, of the node's own inputs that are in effect.

    Raises ValueError for a preset that does not exist, and for a motion preset on an image model.
    """
    if preset == CUSTOM:
        return []
    if preset not in PRESETS:
        raise ValueError(f"preset is {preset!r}; choose one of {', '.join((CUSTOM, *PRESETS))}.")
    if preset.startswith(MOTION) and family.usual.pictures_only:
        raise ValueError(
            f"preset is {preset!r}, which is for video models, and {family.title} makes pictures; choose a face, a "
            "style or an object, or custom."
        )
    stands_for = {**PRESETS[preset], "learning_rate": family.usual.learning_rate}
    other = {name: value for name, value in stands_for.items() if values.get(name, value) != value}
    if not other:
        return []
    input_values = ", ".join(f"{name} {values[name]:g}" for name in other)
    preset_values = ", ".join(f"{name} {value:g}" for name, value in other.items())
    return [
        f"The preset '{preset}' means {preset_values} for {family.title}, but this run uses {input_values}, as set on "
        "the inputs. Choose the preset again on the node to fill them in."
    ]
