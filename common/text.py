"""Parts of messages: lists of names, and the sentences that reject a value out of range."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

_NAMED = 5  # how many files a message lists before it only counts the rest


def shortlist(names: Sequence[str]) -> str:
    """List up to five names, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def joined(names: Sequence[str]) -> str:
    """Join names as `a`, `a and b`, `a, b and c`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` of the input `name` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")


def finite(options: Any) -> None:
    """Raise ValueError for the first float field of a dataclass that is infinite or NaN."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} is {value}; give a finite number.")


def within(name: str, value: float, low: float, high: float) -> None:
    """Raise ValueError unless `low` <= value <= `high`, both ends included."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; set it between {low} and {high}.")
