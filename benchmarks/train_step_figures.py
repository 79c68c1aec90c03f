"""The arithmetic of the step benchmark: spreads, ratios within rounds, grids, memory events, tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isqrt
from statistics import median

MIB = 2**20


@dataclass(frozen=True)
class Spread:
    """The least, the median and the greatest of some values."""

    low: float
    middle: float
    high: float

    def text(self, digits: int = 2) -> str:
        return f"{self.middle:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    assert ordered
    return Spread(ordered[0], median(ordered), ordered[-1])


def ratio_by_round(numerator: Sequence[Sequence[float]], denominator: Sequence[Sequence[float]]) -> Spread:
    """How many times `numerator` is `denominator`: the ratio of their medians in each round, over all rounds.

    Each argument holds the values of each round. What else the machine does changes from round to round and weighs on
    both sides of a ratio alike, so these vary far less than seconds do.
    """
    pairs = zip(numerator, denominator, strict=True)
    return spread(median(above) / median(below) for above, below in pairs)


def grid_of(tokens: int) -> tuple[int, int]:
    """(height, width) of the grid nearest to a square that holds exactly `tokens`."""
    height = next(h for h in range(isqrt(tokens), 0, -1) if tokens % h == 0)
    return height, tokens // height


def peak_and_rest(changes: Iterable[tuple[float, int]]) -> tuple[int, int]:
    """(most bytes held at once, bytes held at the end) over an allocator's (time, bytes); releases are negative."""
    held = peak = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        held += change
        peak = max(peak, held)
    return peak, held


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are figures."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, marks, *rows))
