"""Pairs of LoRAs for Wan 2.2's two experts, matched by the names that training gives them.

The halves are `<name>_high_noise` (or `<name>` if there is none) and `<name>_low_noise`. They are in one folder, or
each in the folder of its run.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from safetensors import SafetensorError

from ...common.text import quoted
from ...common.untrusted.tensor_files import metadata_field, open_tensors
from ...train.config.expert_pair import HIGH, LOW
from ...train.runs.run_names import name_of, without_numbers
from .lora_list import (
    ENDING,
    NONE,
    check_count,
    lines_of,
    listed_loras,
    loras_of_run,
    matching,
    path_of,
    run_folder,
    unknown_lora,
)

_SEPARATOR = " + "
# Metadata fields, and prefixes of option fields, that differ between the two runs of one pair.
_OF_ONE_RUN = {"output_name", "base_model", "loader_quantize", "started", "finished", "final_loss"}
_OF_ONE_EXPERT = ("min_sigma", "max_sigma", "start_from", "base_lora", "base_strength", "training_adapter")


@dataclass(frozen=True)
class Pair:
    """LoRA for each expert, by its listed name.

    high: LoRA of the high noise expert; None leaves that expert unchanged.
    low: LoRA of the low noise expert; None leaves that expert unchanged.
    """

    high: str | None
    low: str | None

    @property
    def name(self) -> str:
        """Title with the folder, for pairs with equal titles."""
        return self._called([_short(half) for half in self._halves()])

    @property
    def title(self) -> str:
        return self._called([_short(PurePosixPath(half).name) for half in self._halves()])

    def _halves(self) -> Iterator[str]:
        return (half for half in (self.high, self.low) if half is not None)

    def _called(self, names: Sequence[str]) -> str:
        if len(names) == 1:
            return f"{names[0]} ({_spoken(HIGH if self.low is None else LOW)} only)"
        base_names = [without_side(name) for name in names]
        # The two runs may have different numbers.
        return (
            base_names[0]
            if without_numbers(base_names[0]) == without_numbers(base_names[1])
            else _SEPARATOR.join(names)
        )


def pairs(loras: str, run: str) -> list[Pair]:
    """List the pairs named by the lines and the run, each once.

    A line is the name of either half or their common part, with * for any text; or both names as `high + low`, one of
    which may be none. A run is that of either expert. Raises ValueError for a line that matches nothing, and if the
    other half is missing or ambiguous.
    """
    listed = listed_loras()
    selected: list[Pair] = []
    for line in lines_of(loras):
        if matches := matching(line, listed):
            selected += [_with_other_half(name, listed) for name in matches]
        elif _SEPARATOR in line:
            selected.append(_written_out(line, listed))
        elif matches := [name for name in listed if _side_of(name) and without_side(_short(name)) == line]:
            selected += [_with_other_half(name, listed) for name in matches]
        else:
            raise unknown_lora(line)
    selected += [_with_other_half(name, listed) for name in loras_of_run(run, listed)]
    selected = list(dict.fromkeys(selected))
    check_count(len(selected))
    return selected


def _written_out(line: str, listed: Sequence[str]) -> Pair:
    halves = [half.strip() for half in line.split(_SEPARATOR)]
    if len(halves) != 2 or halves == [NONE, NONE]:
        raise ValueError(
            f"loras: {quoted(line)} isn't a pair; write the two names as 'high + low' (one of them may be none)."
        )
    names: list[str | None] = []
    for half in halves:
        matches = [] if half == NONE else matching(half, listed)
        if half != NONE and not matches:
            raise unknown_lora(half)
        if len(matches) > 1:
            raise ValueError(
                f"loras: {quoted(half)} stands for {len(matches)} LoRAs; name one of them in {quoted(line)}."
            )
        names.append(matches[0] if matches else None)
    return Pair(*names)


def _with_other_half(name: str, listed: Sequence[str]) -> Pair:
    side = _side_of(name)
    if side is None and (lows := _named_after(name, listed)):
        return Pair(name, lows[0])
    if side is None:
        raise ValueError(
            f"loras: {_short(name)} says neither {HIGH} nor {LOW} in its name; write the LoRAs of both experts as "
            f"'high + low', or '{_short(name)} + {_short(name)}' to put it on both."
        )
    other = LOW if side == HIGH else HIGH
    candidates = _candidates(name, side, other, listed)
    if len(candidates) > 1:
        settings = _settings(name)
        candidates = [
            candidate for candidate in candidates if settings is not None and _settings(candidate) == settings
        ] or candidates
    names_by_side = {side: _short(name)}
    if not candidates:
        alone = {other: NONE} | names_by_side
        raise ValueError(
            f"loras: {_short(name)} has no {_spoken(other)} half: there is no {_swapped(name, side, other).stem} in "
            f"its folder or in that of a {_spoken(other)} run beside it. Train or copy it, write the pair as "
            f"'high + low', or write '{alone[HIGH]} + {alone[LOW]}' to compare this half alone."
        )
    if len(candidates) > 1:
        first = names_by_side | {other: _short(candidates[0])}
        raise ValueError(
            f"loras: {_short(name)} has {len(candidates)} {_spoken(other)} halves ({', '.join(map(_short, candidates))}"
            f"); write the one that you mean, such as '{first[HIGH]} + {first[LOW]}'."
        )
    return Pair(name, candidates[0]) if side == HIGH else Pair(candidates[0], name)


def _side_of(name: str) -> str | None:
    stem = PurePosixPath(name).stem
    return next((side for side, other in ((HIGH, LOW), (LOW, HIGH)) if side in stem and other not in stem), None)


def without_side(name: str) -> str:
    return re.sub(f"_({HIGH}|{LOW})", "", name)


def _plain(name: str) -> str:
    """Return a LoRA's path without a side, in the same folder: run numbers of different names don't identify a pair."""
    place = PurePosixPath(name)
    return str(place.with_name(without_side(place.name)))


def _swapped(name: str, side: str, other: str) -> PurePosixPath:
    place = PurePosixPath(name)
    return place.with_name(place.name.replace(side, other))


def _candidates(name: str, side: str, other: str, listed: Sequence[str]) -> list[str]:
    """Find the other half: in the same folder, else in runs of the same output name."""
    counterpart = _swapped(name, side, other)
    if str(counterpart) in listed:
        return [str(counterpart)]
    if side == LOW and (plain := _plain(name)) in listed:
        return [plain]
    folder = run_folder(name)
    output_name = name_of(folder.name)
    if output_name is None:
        return []
    matches = []
    for candidate in listed:
        candidate_folder = run_folder(candidate)
        if PurePosixPath(candidate).name == counterpart.name and candidate_folder.parent == folder.parent:
            if name_of(candidate_folder.name) == output_name.replace(side, other):
                matches.append(candidate)
    return matches


def _named_after(name: str, listed: Sequence[str]) -> list[str]:
    """Find the low noise half of a LoRA whose name states no side."""
    halves = {
        _side_of(candidate): candidate for candidate in listed if _side_of(candidate) and _plain(candidate) == name
    }
    return [halves[LOW]] if halves.keys() == {LOW} else []


def _settings(name: str) -> dict[str, Any] | None:
    """Read the settings shared by both halves of a pair from the file's metadata; None if it has none."""
    try:
        with open_tensors(path_of(name)) as file:
            metadata = metadata_field(file.metadata(), "tessera")
        common = {key: value for key, value in metadata.items() if key not in _OF_ONE_RUN}
        if PurePosixPath(name).stem.endswith("-best"):
            del common["steps"]
        for part in ("objective", "network", "validation"):
            if common.get(part):
                common[part] = {key: value for key, value in common[part].items() if not key.startswith(_OF_ONE_EXPERT)}
        return common
    except (OSError, SafetensorError, KeyError, ValueError, AttributeError):
        return None


def _short(name: str) -> str:
    return name.removesuffix(ENDING)


def _spoken(side: str) -> str:
    return side.replace("_", " ")
