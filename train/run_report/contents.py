"""Contents of a run's report, read from the run's folder.

Anybody may have written the folder, so every reading is bounded, and what is not as Train LoRA writes it is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...common.text import clock, quantity
from ...common.untrusted.tensor_files import metadata_field, open_tensors
from ...data.samples import trigger_words
from ...lora.files.header import without_paths
from ...lora.options import NetworkOptions
from ..config.settings import MemoryOptions
from ..objective.options import ObjectiveOptions
from ..optim.options import OptimizerOptions
from ..runs.run_folder import RunFolder, step_in
from ..runs.run_record import RunCurve, RunReader, loss_ends, own_file

MOST_CHARACTERS = 300  # of a value
MOST_NOTES = 100
MOST_SAVES = 100
# Settings that every report shows; of the others it shows at the top those that were changed.
_MAIN = ("batch_size", "gradient_accumulation", "resolution", "seed")
_MAIN_OF = {"network": ("algorithm", "rank", "alpha"), "optimizer": ("optimizer", "learning_rate", "lr_scheduler")}
_DEFAULTS: dict[str, type[Any]] = {
    "network": NetworkOptions,
    "optimizer": OptimizerOptions,
    "objective": ObjectiveOptions,
    "memory": MemoryOptions,
}
_ENDINGS = {
    "finished": "Finished after {count}.",
    "stopped": "Stopped and kept at step {step} of {steps}.",
    "paused": "Paused at step {step} of {steps}.",
    "cancelled": "Stopped at step {step} of {steps}.",
    "failed": "Ended by an error at step {step} of {steps}.",
    "unsaved": "Finished after {count}, but not saved.",
}
_BROKE_OFF = "Broke off at step {step} of {steps}."


@dataclass(frozen=True)
class Save:
    """LoRA of a run.

    file: its name.
    step: optimizer steps it was trained for; None if unknown.
    validation: mean validation loss measured at its step; None without.
    remarks: what it stands out by, such as "newest".
    """

    file: str
    step: int | None
    validation: float | None
    remarks: Sequence[str]


@dataclass(frozen=True)
class RunReport:
    """Contents of a report. Mappings are from a label to a text.

    name: name of the run's folder.
    outcome: sentence on how the run ended.
    settings: the main settings, and those that are not at their default.
    other_settings: all other settings.
    measures: loss, time and memory.
    data: the training data.
    versions: of the pack, ComfyUI and torch.
    saves: LoRAs by step.
    notes: what the run said.
    loss: loss of each step, of steps 1 to n.
    validation: (steps done, loss) of each validation.
    """

    name: str
    outcome: str
    settings: Mapping[str, str]
    other_settings: Mapping[str, str]
    measures: Mapping[str, str]
    data: Mapping[str, str]
    versions: Mapping[str, str]
    saves: Sequence[Save] = ()
    notes: Sequence[str] = ()
    loss: Sequence[float] = ()
    validation: Sequence[tuple[int, float]] = ()


def read_report(folder: RunFolder) -> RunReport:
    """Read the contents of a run's report. Raises OSError if the folder is gone."""
    reader = RunReader(folder.path)
    facts, curve = reader.facts(), reader.read()
    summary = folder.read_summary() or {}
    loras = folder.loras()
    recorded = _recorded_settings(loras)
    settings = {**_texts({"model": facts.get("model"), "steps": facts.get("steps")}), **_main_settings(recorded)}
    changed, unchanged = _other_settings(recorded)
    return RunReport(
        name=folder.path.name,
        outcome=_outcome(curve, facts),
        settings={**settings, **changed},
        other_settings=unchanged,
        measures=_measures(curve, facts, summary),
        data=_data(recorded),
        versions=_texts({name: recorded.get(f"{name}_version") for name in ("tessera", "comfyui", "torch")}),
        saves=list(_saves(folder, loras, curve, summary)),
        notes=[without_paths(note) for note in list(curve.notes)[:MOST_NOTES]],
        loss=[loss for _, loss, _ in curve.loss.values()],
        validation=list(curve.validation.values()),
    )


def _recorded_settings(loras: Sequence[Path]) -> dict[str, Any]:
    """Read all settings from the metadata of the newest LoRA; empty without a readable one. loras: by step."""
    for path in loras[::-1]:
        if own_file(path.parent, path.name) is None:
            continue
        try:
            with open_tensors(path) as file:
                recorded = metadata_field(file.metadata(), "tessera")
        except (OSError, SafetensorError, KeyError, ValueError):
            continue
        if isinstance(recorded, dict):
            return recorded
    return {}


def _group(recorded: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = recorded.get(name)
    return group if isinstance(group, dict) else {}


def _main_settings(recorded: Mapping[str, Any]) -> dict[str, str]:
    main = {name: recorded.get(name) for name in _MAIN}
    for group, names in _MAIN_OF.items():
        main |= {name: _group(recorded, group).get(name) for name in names}
    return _texts(main)


def _other_settings(recorded: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the settings that differ from their default, and those that do not, without the main ones."""
    changed: dict[str, Any] = {}
    unchanged: dict[str, Any] = {}
    for group, options in _DEFAULTS.items():
        defaults = without_paths(asdict(options()))
        for name, value in _group(recorded, group).items():
            if name not in _MAIN_OF.get(group, ()) and name in defaults:
                (unchanged if value == defaults[name] else changed)[name] = value
    changed |= {"compile": recorded.get("compile"), "quantized by the loader": recorded.get("loader_quantize")}
    for group in ("saving", "validation"):
        changed |= {name: value for name, value in _group(recorded, group).items() if value}
    return _texts(changed), _texts(unchanged)


def _outcome(curve: RunCurve, facts: Mapping[str, Any]) -> str:
    steps = facts.get("steps")
    steps = steps if type(steps) is int else curve.step
    ending = _ENDINGS.get(curve.status, _BROKE_OFF)
    return ending.format(step=f"{curve.step:,}", steps=f"{steps:,}", count=quantity(curve.step, "step"))


def _measures(curve: RunCurve, facts: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, str]:
    """Return loss, time and memory. Means are over the first and the last twentieth of the steps."""
    measures = _texts({"started": _moment(facts.get("started"))})
    if (ends := loss_ends([loss for _, loss, _ in curve.loss.values()])) is not None:
        measures["loss, first and last steps"] = f"{ends[0]:.4g}, {ends[1]:.4g}"
    if curve.seconds is not None:
        measures["time, loading included"] = clock(curve.seconds)
    if (seconds := _number(summary.get("seconds_per_step"))) is not None:
        measures["seconds per step"] = f"{seconds:.3g}"
    if (compiling := _number(summary.get("compile_seconds"))) and (graphs := _number(summary.get("graphs_compiled"))):
        measures["compiling"] = f"{compiling:.3g} s for {quantity(int(graphs), 'graph')}"
    if (peak := _number(summary.get("peak_memory_mib"))) is not None:
        measures["peak memory"] = f"{peak / 1024:.1f} GiB of the {_text(summary.get('peak_memory_of'))}"
    if (swapped := _number(summary.get("blocks_swapped"))) is not None:
        measures["blocks swapped"] = f"{swapped:g}"
    if (parameters := _number(summary.get("parameters"))) is not None:
        measures["trained parameters"] = f"{parameters:,.0f}"
    return measures


def _data(recorded: Mapping[str, Any]) -> dict[str, str]:
    data = _group(recorded, "data")
    names = ("samples", "regularisation", "shown_per_epoch", "pictures_per_sample", "captions_per_sample")
    texts = _texts({name.replace("_", " "): data.get(name) for name in names})
    buckets = data.get("buckets")
    for bucket in buckets[:MOST_SAVES] if isinstance(buckets, list) else ():
        grid = bucket.get("grid") if isinstance(bucket, dict) else None
        if isinstance(grid, list) and len(grid) == 3:
            size = " x ".join(str(side) for side in grid[grid[0] == 1 :])
            texts[f"samples of {size} tokens"[:MOST_CHARACTERS]] = _text(bucket.get("samples"))
    made_with = _group(data, "made_with")
    return {**texts, **_texts({"trigger words": trigger_words(made_with)}), **_texts(made_with)}


def _saves(folder: RunFolder, loras: Sequence[Path], curve: RunCurve, summary: Mapping[str, Any]) -> Iterator[Save]:
    """Yield the LoRAs of a run by step, the newest last."""
    steps = {path: step for step, path in folder.step_loras().items()}
    paths = loras[-MOST_SAVES:]
    best = _group(_group(summary, "validation"), "best")
    best_step = best.get("step")
    for path in paths:
        step = steps[path] if path in steps else _whole(step_in(path))
        remarks = ["newest"] * (path == paths[-1]) + ["lowest validation loss"] * (
            step is not None and step == best_step
        )
        _, loss = curve.validation.get(-1 if step is None else step, (step, None))
        yield Save(path.name, step, loss, remarks)
    if own_file(folder.path, folder.best_path.name) is not None and type(best_step) is int:
        yield Save(folder.best_path.name, best_step, _number(best.get("loss")), ["lowest validation loss"])


def _moment(started: Any) -> str:
    """Format ISO 8601 as date and time with the name of its zone; empty for anything else."""
    try:
        return f"{datetime.fromisoformat(started):%Y-%m-%d %H:%M %Z}"
    except (ValueError, TypeError):
        return ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(step: float) -> int | None:
    return int(step) if isfinite(step) else None


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert plain values to texts; what is empty is left out."""
    texts = {str(name)[:MOST_CHARACTERS]: _text(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if text}


def _text(value: Any) -> str:
    """Convert a plain value to a text without paths of a disk; empty for an object."""
    if isinstance(value, dict) or value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(filter(None, map(_text, value[:20])))[:MOST_CHARACTERS]
    text = f"{value:g}" if isinstance(value, float) else without_paths(str(value))
    return str(text).strip()[:MOST_CHARACTERS]
