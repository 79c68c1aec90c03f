"""The arithmetic of the benchmarks: spreads, ratios within rounds, swapped blocks, profiled events, tables."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

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
    """Quotient of `numerator` and `denominator`: the ratio of their medians in each round, over all rounds.

    Each argument holds the values of each round. Other load of the machine changes from round to round and affects both
    sides of a ratio alike, so ratios vary far less than seconds.
    """
    pairs = zip(numerator, denominator, strict=True)
    return spread(median(a) / median(b) for a, b in pairs)


def swapped_blocks(percent: float, total: int) -> int:
    """Number of blocks that are `percent` of `total`: the nearest number, and at least one if it is above 0."""
    return max(1, int(total * percent / 100 + 0.5)) if percent else 0


def times_the_least(seconds: Sequence[Sequence[float]], resident: Sequence[Sequence[float]], copying: float) -> Spread:
    """Quotient of its seconds and the least of a swapped step, by rounds: the greater one of a step that swaps nothing
    (`resident`, in the same rounds) and of copying alone. Seconds."""
    return ratio_by_round(seconds, [[max(median(values), copying)] for values in resident])


def peak_and_rest(changes: Iterable[tuple[float, int]]) -> tuple[int, int]:
    """(most bytes held at once, bytes held at the end) over an allocator's (time, bytes); releases are negative."""
    current = peak = 0
    for _, change in sorted(changes, key=lambda event: event[0]):
        current += change
        peak = max(peak, current)
    return peak, current


def copies_to_device(events: Iterable[dict[str, Any]], least: int = MIB) -> tuple[int, float]:
    """(bytes, seconds of copying) of the copies from the host of `least` bytes and more, among the events of a trace of
    torch's profiler, which gives microseconds."""
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["name"].startswith("Memcpy HtoD")]
    large = [e for e in copies if e["args"]["bytes"] >= least]
    return sum(e["args"]["bytes"] for e in large), sum(e["dur"] for e in large) / 1e6


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, the others are figures."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, marks, *rows))
