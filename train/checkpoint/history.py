"""Resume history: the segments of a run that was resumed with changed settings.

A state holds all segments; the last one has no `to_step`. A LoRA's metadata and the summary list the changed settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ...lora.options import NetworkOptions
from ..objective.options import ObjectiveOptions
from ..optim.options import OptimizerOptions
from ..settings import MemoryOptions
from .metadata import RunFacts, plain_facts
from .state import read_header

Plain = dict[str, Any]
_OPTIONS = {"network": NetworkOptions, "optimizer": OptimizerOptions, "objective": ObjectiveOptions}
_OF_MEMORY = ("products", "base")
_FIELDS = (
    *("family", "variant", "base_model", "batch_size", "gradient_accumulation", "seed"),
    *("network", "optimizer", "objective", "data", "samples", "resolution"),
)


def segment_settings(facts: RunFacts, data: str, weights: str) -> Plain:
    """Return the settings that decide what a segment learns, as plain JSON.

    data, weights: fingerprints of training data and model; they reveal a change, not its content.
    """
    told = plain_facts(facts)
    names = {name: told["memory"][name] for name in _OF_MEMORY}
    names |= {"data_fingerprint": fingerprint(data)[:8], "model_fingerprint": fingerprint(weights)[:8]}
    return {name: told[name] for name in _FIELDS} | names


def run_segments(state: Path | None, lineage: str, now: Plain, asked: str) -> list[Plain]:
    """List the segments of a run of this lineage that resumes from `state`, the one that begins now last.

    now: settings of this segment, see `segment_settings`.
    asked: lineage of its settings, by which `resume.continued_lineage` finds the run again.

    A segment of an old state, which did not hold them, has no `made_with`.
    """
    last = {"made_with": now, "asked": asked}
    if state is None:
        return [last]
    header = read_header(state)
    *earlier, before = header.parts or [{}]
    if header.lineage == lineage:
        return [*earlier, last]
    return [*earlier, before | {"to_step": header.step}, last]


def continued_from(parts: Sequence[Plain]) -> list[Plain]:
    """List the earlier segments that had other settings.

    An entry is `{"from_step" (exclusive), "to_step", "settings"}`. `settings` holds the earlier values of what has
    changed; it is missing where they are unknown.
    """
    *earlier, now = parts
    told, begin = [], 0
    for part in earlier:
        entry = {"from_step": begin, "to_step": part["to_step"]}
        begin = part["to_step"]
        if "made_with" not in part:
            told.append(entry)
        elif settings := _otherwise(_with_defaults(part["made_with"]), _with_defaults(now["made_with"])):
            told.append(entry | {"settings": settings})
    return told


def _with_defaults(settings: Plain) -> Plain:
    """Add the options that there were none of when these settings were saved, as they are where nobody sets them."""
    options = {name: asdict(kind()) | settings.get(name, {}) for name, kind in _OPTIONS.items()}
    return {name: getattr(MemoryOptions, name) for name in _OF_MEMORY} | settings | options


def _otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> Plain:
    """Return the entries of `before` that differ in `now`, nested mappings entry by entry."""
    found: Plain = {}
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            old = _otherwise(old, new)
            if old:
                found[name] = old
        elif old != new:
            found[name] = old
    return found
