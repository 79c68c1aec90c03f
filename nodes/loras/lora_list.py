"""LoRA files selected by text, one per line with * for any text, or all saves of a run."""

import math
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import folder_paths

from ...common.text import quoted
from ...common.untrusted.budgets import PATTERN_LINES, check_size
from ...common.untrusted.patterns import name_matcher
from ...train.runs.run_names import STEPS

NONE = "none"
MOST_LORAS = 32
ENDING = ".safetensors"
_STEP = re.compile(r"-step(\d{6,})$")


def listed_loras() -> list[str]:
    """List ComfyUI's LoRA files, with forward slashes, sorted by name and step."""
    names = (name.replace("\\", "/") for name in folder_paths.get_filename_list("loras"))
    return sorted((name for name in names if name.endswith(ENDING)), key=_order)


def _order(name: str) -> tuple[str, str, float]:
    """Return the sort key: saves of a run by step, the finished LoRA last."""
    place = PurePosixPath(name)
    step = _STEP.search(place.stem)
    stem = place.stem[: step.start()] if step else place.stem
    return str(run_folder(name)), stem, float(step.group(1)) if step else math.inf


def path_of(name: str) -> Path:
    listed = {other.replace("\\", "/"): other for other in folder_paths.get_filename_list("loras")}
    return Path(folder_paths.get_full_path_or_raise("loras", listed[name]))


def listed_runs() -> list[str]:
    """List the folders with saves of a training run, relative to the LoRA folders."""
    runs = {str(run_folder(name)) for name in listed_loras() if _STEP.search(PurePosixPath(name).stem)}
    return sorted(runs - {"."})


def run_folder(name: str) -> PurePosixPath:
    """Return the folder of the run that saved a LoRA; saves of single steps are in a subfolder of it."""
    place = PurePosixPath(name)
    steps = place.parent.name.endswith(STEPS) and place.name.startswith(f"{place.parent.name.removesuffix(STEPS)}-step")
    return place.parent.parent if steps else place.parent


def lines_of(loras: str) -> list[str]:
    """Split the text into its lines. Raises OverBudget for more than a grid could need."""
    check_size(PATTERN_LINES, "loras", characters=len(loras))
    lines = [line.strip().replace("\\", "/") for line in loras.splitlines() if line.strip()]
    check_size(PATTERN_LINES, "loras", items=len(lines))
    return lines


def matching(line: str, listed: Sequence[str]) -> list[str]:
    """List the LoRAs that match a line: the one of that name, else those that match its * pattern."""
    exact = [name for name in listed if line in (name, name.removesuffix(ENDING))]
    matcher = name_matcher(line, "loras")
    return exact or [name for name in listed if matcher.match(name)]


def loras_of_run(run: str, listed: Sequence[str]) -> list[str]:
    return [] if run == NONE else [name for name in listed if str(run_folder(name)) == run]


def unknown_lora(line: str) -> ValueError:
    return ValueError(
        f"loras: {quoted(line)} isn't a LoRA that ComfyUI lists; write its name as a LoRA loader shows it, or use * "
        "for any text."
    )


def check_count(count: int) -> None:
    if count > MOST_LORAS:
        raise ValueError(f"loras: these are {count} LoRAs, and a grid takes {MOST_LORAS}; name fewer.")


def loras_named(loras: str, run: str) -> list[str]:
    """List the LoRAs named by the lines and the run, each once.

    Raises ValueError for a line that matches none.
    """
    listed = listed_loras()
    selected: list[str] = []
    for line in lines_of(loras):
        matches = matching(line, listed)
        if not matches and " + " in line:
            raise ValueError(
                f"loras: {quoted(line)} names the LoRAs of two experts; connect model_low_noise, or name one LoRA."
            )
        if not matches:
            raise unknown_lora(line)
        selected += matches
    selected = list(dict.fromkeys(selected + loras_of_run(run, listed)))
    check_count(len(selected))
    return selected
