"""Columns of a grid of LoRAs: each LoRA, or each pair for Wan 2.2's two experts, at each strength."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from torch import Tensor

from ...common.text import quoted
from ...common.untrusted.budgets import SETTINGS, check_size
from ...lora.source import read_lora_file
from ...train.preview.compare import AppliedLora, Column
from .expert_pairs import Pair, without_side
from .lora_list import ENDING, marks_of, path_of

Lora = Mapping[str, Tensor]
# (high noise, low noise); a single model uses the first.
Strengths = tuple[float, float]


@dataclass(frozen=True)
class Source:
    """LoRA that is read lazily.

    name: name in messages.
    read: reads its tensors, by key.
    """

    name: str
    read: Callable[[], Lora]


@dataclass(frozen=True)
class Compared:
    """LoRA or pair to compare at several strengths.

    title: title of its columns, to which a strength is added.
    high: the LoRA, or that of the high noise expert; None in a pair for the low noise expert only.
    low: LoRA of the low noise expert; None for a single LoRA, and in a pair for the high noise expert only.
    """

    title: str
    high: Source | None
    low: Source | None = None

    def _label(self, high: float, low: float) -> str:
        """Write the strengths that have an effect: one, or those of a pair."""
        if self.low is None or high == low:
            return f"{high:g}"
        if self.high is None:
            return f"{low:g}"
        return f"{high:g}/{low:g}"

    def columns(self, strengths: Sequence[Strengths]) -> list[Column]:
        """Make a column for each strength that is not 0. Raises ValueError if all are 0."""
        is_plain = list(strengths) == [(1.0, 1.0)]
        columns = []
        for high, low in strengths:
            first, second = _applied(self.high, high), _applied(self.low, low)
            if first is None and second is None:
                continue
            title = self.title if is_plain else f"{self.title} x {self._label(high, low)}"
            columns.append(Column(title, first, second))
        if not columns:
            raise ValueError(f"strengths are 0 for {self.title}; give one for it, or take it out.")
        return list(dict.fromkeys(columns))


def compared_files(names: Sequence[str]) -> list[Compared]:
    """Collect files, each titled by its file name; by its whole path if another one has the same name."""
    stems = [PurePosixPath(name).stem for name in names]
    return [
        Compared(_marked(stem if stems.count(stem) == 1 else name.removesuffix(ENDING), mark), _file(name))
        for name, stem, mark in zip(names, stems, marks_of(names), strict=True)
    ]


def compared_pairs(pairs: Sequence[Pair]) -> list[Compared]:
    """Collect pairs of files, as `compared_files` does; the step of a pair is that of one of its halves."""
    titles, halves = [pair.title for pair in pairs], [pair.high or pair.low or "" for pair in pairs]
    return [
        Compared(_marked(title if titles.count(title) == 1 else pair.name, mark), *map(_file, (pair.high, pair.low)))
        for pair, title, mark in zip(pairs, titles, marks_of(halves), strict=True)
    ]


def compared_models(loras: Mapping[str, Lora | None]) -> list[Compared]:
    """Collect connected LoRAs."""
    connected = [lora for lora in loras.values() if lora is not None]
    return [Compared(_output_name(lora, n), _connected("lora_models", lora, n)) for n, lora in enumerate(connected, 1)]


def compared_model_pairs(high: Mapping[str, Lora | None], low: Mapping[str, Lora | None]) -> list[Compared]:
    """Pair connected LoRAs by the names of their inputs. Raises ValueError if one half is missing."""
    compared: list[Compared] = []
    for input in sorted({*high, *low}, key=lambda name: (len(name), name)):
        first, second = high.get(input), low.get(input)
        if first is None and second is None:
            continue
        if second is None:
            raise ValueError(
                f"lora_models: {input} has no low noise half; connect Train LoRA's lora_low_noise to {input} of "
                "lora_models_low_noise."
            )
        if first is None:
            raise ValueError(
                f"lora_models_low_noise: {input} has no high noise half; connect Train LoRA's lora to {input} of "
                "lora_models."
            )
        number = len(compared) + 1
        title = without_side(_output_name(first, number))
        compared.append(
            Compared(
                title, _connected("lora_models", first, number), _connected("lora_models_low_noise", second, number)
            )
        )
    return compared


def read_strengths(text: str) -> list[float]:
    """Parse numbers between commas or spaces. Raises ValueError for anything else."""
    try:
        numbers = [_number(part) for part in _parts(text)]
    except ValueError:
        numbers = []
    if not numbers or not all(numbers):
        raise ValueError(f"strengths is {quoted(text)}; give one or more numbers other than 0, such as 0.6, 1.")
    return list(dict.fromkeys(numbers))


def read_pair_strengths(text: str) -> list[Strengths]:
    """Parse strengths for both experts, each one number or `high/low`. Raises ValueError for anything else."""
    split = [part.partition("/") for part in _parts(text)]
    try:
        pairs = [(_number(high), _number(low if slash else high)) for high, slash, low in split]
    except ValueError:
        pairs = []
    if not pairs or not all(map(any, pairs)):
        raise ValueError(
            f"strengths is {quoted(text)}; give one or more numbers other than 0, such as 0.6, 1, or one for "
            "each expert, such as 1/0.6."
        )
    return list(dict.fromkeys(pairs))


def _marked(title: str, mark: str) -> str:
    return f"{title} ({mark})" if mark else title


def _parts(text: str) -> list[str]:
    check_size(SETTINGS, "strengths", characters=len(text))
    return [part for part in re.split(r"[,;\s]+", text) if part]


def _number(text: str) -> float:
    """Parse one strength. Raises ValueError beyond ±100."""
    number = float(text)
    if not abs(number) <= 100:
        raise ValueError(text)
    return number


def _applied(source: Source | None, strength: float) -> AppliedLora | None:
    return AppliedLora(source.name, strength, source.read) if source is not None and strength else None


def _output_name(lora: Lora, number: int) -> str:
    return getattr(lora, "metadata", {}).get("ss_output_name") or f"lora {number}"


def _connected(place: str, lora: Lora, number: int) -> Source:
    return Source(f"{place} {number}", partial(dict, lora))


def _file(name: str | None) -> Source | None:
    return None if name is None else Source(name, partial(_read, name))


def _read(name: str) -> dict[str, Tensor]:
    return read_lora_file(path_of(name), "loras")[0]
