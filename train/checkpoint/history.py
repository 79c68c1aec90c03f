"""Resume history: the segments of a run that was resumed with changed settings.

A state holds all segments; the last one has no `to_step`. A LoRA's metadata and the summary list the changed settings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ...lora.options import NetworkOptions
from ..config.settings import MemoryOptions
from ..objective.options import ObjectiveOptions
from ..optim.options import OptimizerOptions
from .metadata import RunFacts, plain_facts
from .state import read_header

Plain = dict[str, Any]
_OPTIONS = {"network": NetworkOptions, "optimizer": OptimizerOptions, "objective": ObjectiveOptions}
_OF_MEMORY = ("low_bit_matmul", "quantize")
_FIELDS = (
    *("family", "variant", "base_model", "batch_size", "gradient_accumulation", "seed"),
    *("network", "optimizer", "objective", "data", "samples", "resolution"),
)


def segment_settings(facts: RunFacts, data: str, weights: str) -> Plain:
    """Return the settings that decide what a segment learns, as plain JSON.

    data, weights: fingerprints of training data and model; they reveal a change, not its content.
    """
    plain = plain_facts(facts)
    names = {name: plain["memory"][name] for name in _OF_MEMORY}
    names |= {"data_fingerprint": fingerprint(data)[:8], "model_fingerprint": fingerprint(weights)[:8]}
    return {name: plain[name] for name in _FIELDS} | names


def run_segments(state: Path | None, lineage: str, settings: Plain, settings_lineage: str) -> list[Plain]:
    """List the segments of a run of this lineage that resumes from `state`; the segment that begins now comes last.

    settings: settings of the new segment, see `segment_settings`.
    settings_lineage: lineage of its settings, by which `resume.continued_lineage` finds the run again.
    """
    last = {"made_with": settings, "asked": settings_lineage}
    if state is None:
        return [last]
    header = read_header(state)
    *earlier, previous = header.parts
    if header.lineage == lineage:
        return [*earlier, last]
    return [*earlier, previous | {"to_step": header.step}, last]


def continued_from(parts: Sequence[Plain]) -> list[Plain]:
    """List the earlier segments that had other settings.

    An entry is `{"from_step" (exclusive), "to_step", "settings"}`. `settings` holds the earlier values of the changed
    settings.
    """
    *earlier, current = parts
    entries, begin = [], 0
    for part in earlier:
        entry = {"from_step": begin, "to_step": part["to_step"]}
        begin = part["to_step"]
        if settings := _otherwise(_with_defaults(part["made_with"]), _with_defaults(current["made_with"])):
            entries.append(entry | {"settings": settings})
    return entries


def _with_defaults(settings: Plain) -> Plain:
    """Add the options that did not exist when these settings were saved, with their default values."""
    options = {name: asdict(kind()) | settings.get(name, {}) for name, kind in _OPTIONS.items()}
    return {name: getattr(MemoryOptions, name) for name in _OF_MEMORY} | settings | options


def _otherwise(previous: Mapping[str, Any], current: Mapping[str, Any]) -> Plain:
    """Return the entries of `previous` that differ in `current`, nested mappings entry by entry."""
    differences: Plain = {}
    for name in sorted(previous.keys() | current.keys()):
        old, new = previous.get(name), current.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            old = _otherwise(old, new)
            if old:
                differences[name] = old
        elif old != new:
            differences[name] = old
    return differences
