"""The parts of a run that went on from a state under other settings, and what each was made with.

A state holds all of them, the last one without an end; a LoRA's metadata and the summary say what was otherwise.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from .metadata import RunFacts, plain_facts
from .state import read_header

Plain = dict[str, Any]
_FIELDS = (
    *("family", "variant", "base_model", "batch_size", "gradient_accumulation", "seed"),
    *("network", "optimizer", "objective", "data", "samples", "resolution"),
)


def made_with(facts: RunFacts, data: str, weights: str) -> Plain:
    """What decides what a part learns, as plain JSON. data and weights: the fingerprints, which tell that they were
    others and nothing of them."""
    told = plain_facts(facts)
    names = {"data_fingerprint": fingerprint(data)[:8], "model_fingerprint": fingerprint(weights)[:8]}
    return {name: told[name] for name in _FIELDS} | names


def parts_of(state: Path | None, lineage: str, now: Plain, asked: str) -> list[Plain]:
    """The parts of a run of this lineage that goes on from `state`. One of a state from before they were kept has no
    `made_with`. asked: the lineage of its settings, by which it is found again; see `states.continued_lineage`."""
    last = {"made_with": now, "asked": asked}
    if state is None:
        return [last]
    plain = read_header(state)
    *earlier, before = plain.get("parts") or [{}]
    if plain["lineage"] == lineage:
        return [*earlier, last]
    return [*earlier, before | {"to_step": plain["step"]}, last]


def continued_from(parts: Sequence[Plain]) -> list[Plain]:
    """Each earlier part: `from_step` (exclusive) to `to_step`, and the `settings` that were others than those of now,
    as they were; without `settings` where that is not known."""
    *earlier, now = parts
    told, begin = [], 0
    for part in earlier:
        entry = {"from_step": begin, "to_step": part["to_step"]}
        begin = part["to_step"]
        if "made_with" not in part:
            told.append(entry)
        elif settings := _otherwise(part["made_with"], now["made_with"]):
            told.append(entry | {"settings": settings})
    return told


def _otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> Plain:
    """What of `before` is not so in `now`."""
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
