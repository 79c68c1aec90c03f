"""LoRA files selected by text, one per line with * for any text, or all saves of a run."""

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import folder_paths

from ...common.text import quoted
from ...common.untrusted.budgets import PATTERN_LINES, check_size
from ...common.untrusted.patterns import name_matcher
from ...train.runs.run_folder import step_in
from ...train.runs.run_names import STEPS, name_of

NONE = "none"
MOST_LORAS = 32
ENDING = ".safetensors"
_STEP = re.compile(r"-step(\d{6,})$")


def listed_loras() -> list[str]:
    """List ComfyUI's LoRA files, with forward slashes, sorted by name and by the step in the name."""
    names = (name.replace("\\", "/") for name in folder_paths.get_filename_list("loras"))
    return sorted((name for name in names if name.endswith(ENDING)), key=lambda name: _order(name, _named_step(name)))


def by_step(names: Iterable[str]) -> list[str]:
    """Sort LoRAs as `listed_loras` does, but those of a run by their steps, whose metadata is read for that.

    The final LoRA of a run that was stopped, and then continued, is older than the newest of its saves.
    """
    return sorted(names, key=lambda name: _order(name, step_of(name)))


def step_of(name: str) -> float:
    """Return the step of a LoRA of a run; infinite if it is unknown."""
    step = _named_step(name)
    return step_in(path_of(name)) if step == math.inf and _run_name(name) is not None else step


def marks_of(names: Sequence[str]) -> list[str]:
    """Return what to add to the names of a run's saves: the step where the name has none, and which is the newest.

    Empty for a LoRA that isn't beside another one of its run.
    """
    runs: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        if _run_name(name) is not None:
            runs.setdefault(str(run_folder(name)), []).append(name)
    steps = {name: step_of(name) for saves in runs.values() if len(saves) > 1 for name in saves}
    last = {max(saves, key=_newness) for saves in runs.values() if len(saves) > 1}
    marks = []
    for name in names:
        step = steps.get(name, math.inf)
        parts = [f"step {step:.0f}"] if step < math.inf == _named_step(name) else []
        marks.append(", ".join([*parts, *(["newest"] if name in last else [])]))
    return marks


def _newness(name: str) -> tuple[float, bool]:
    """Return the sort key of a run's saves by age, its best LoRA behind the others, as it is a copy of one."""
    is_best = PurePosixPath(name).stem == f"{_run_name(name)}-best"
    return (-1 if is_best else step_of(name)), _named_step(name) == math.inf


def _run_name(name: str) -> str | None:
    """Return the output name of the run whose folder holds a LoRA; None outside such a folder."""
    return name_of(run_folder(name).name)


def _named_step(name: str) -> float:
    step = _STEP.search(PurePosixPath(name).stem)
    return float(step.group(1)) if step else math.inf


def _order(name: str, step: float) -> tuple[str, str, float, bool, str]:
    """Return the sort key: LoRAs of a run by step, the one without a step in its name behind others of the same."""
    stem = PurePosixPath(name).stem
    series = "" if _run_name(name) is not None else _STEP.sub("", stem)
    return str(run_folder(name)), series, step, _named_step(name) == math.inf, stem


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
    """List the LoRAs that match a line: the one of that name, else those that match its * pattern, by their steps."""
    exact = [name for name in listed if line in (name, name.removesuffix(ENDING))]
    matcher = name_matcher(line, "loras")
    matches = exact or [name for name in listed if matcher.match(name)]
    return by_step(matches) if len(matches) <= MOST_LORAS else matches  # of more than a grid takes no file is read


def loras_of_run(run: str, listed: Sequence[str]) -> list[str]:
    """List the LoRAs in the folder of a run by their steps."""
    return [] if run == NONE else by_step(name for name in listed if str(run_folder(name)) == run)


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
