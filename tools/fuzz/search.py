"""Searches for an input that breaks a bound, and from it for the smallest."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from readers import Reader
from watch import Broken, watched

SHRINKING = 20.0  # seconds to look for a smaller input
SHOWN = 1500  # characters of an input


class Enough(KeyboardInterrupt):
    """Ends hypothesis's search for a smaller input: of all exceptions it lets KeyboardInterrupt alone through."""


@dataclass(frozen=True)
class Fault:
    """An input that broke a bound.

    reader: name of the reader. seed: of the round that found it. bound: which bound, and by how much.
    """

    reader: str
    seed: str
    bound: str
    value: Any

    def __str__(self) -> str:
        text = repr(self.value)
        excerpt = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text):,} characters)"
        return f"{self.reader} (seed {self.seed}): {self.bound}\n  {excerpt}"


def search(reader: Reader, seed: str, size: int, folder: Path) -> tuple[int, Fault | None]:
    """Give a reader `size` inputs. Returns (how many it got, the smallest that broke a bound).

    folder: keeps the input in hand as `input.txt`, for one that never ends.
    """
    count, smallest = 0, None
    failing: dict[str, str] = {}  # inputs and the bounds that they broke
    shrink_until = 0.0

    @hypothesis.seed(f"{reader.name} {seed}")
    @settings(
        max_examples=size,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(reader.inputs)
    def run(given_input: Any) -> None:
        nonlocal count, smallest, shrink_until
        count += 1
        text = repr(given_input)
        if failing and time.monotonic() > shrink_until:
            raise Enough
        if text not in failing:
            (folder / "input.txt").write_text(f"{reader.name}\n{text}", encoding="utf-8", errors="backslashreplace")
            try:
                watched(reader.read, given_input, len(text))
            except Broken as broken:
                shrink_until = shrink_until or time.monotonic() + SHRINKING
                failing[text] = str(broken)
                if smallest is None or len(text) < len(repr(smallest.value)):
                    smallest = Fault(reader.name, seed, str(broken), given_input)
        if text in failing:
            raise Broken(failing[text])

    try:
        run()
    except (Enough, Exception):  # Broken, or what hypothesis makes of it
        if smallest is None:
            raise
    return count, smallest
