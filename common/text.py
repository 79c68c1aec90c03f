"""Helpers for messages: quoted values, lists of names, durations, and errors for values out of range."""

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

_NAMED = 5  # files that a message lists before it only counts the rest
_SHOWN, _END = 100, 30  # characters kept of a text, and of its end


def cut(text: str) -> str:
    """Cut a long text in its middle, to about 100 characters."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - _END]}…{text[-_END:]}"


def quoted(value: Any) -> str:
    """Quote a value that a stranger may have written, cut to about 100 characters."""
    if isinstance(value, str):
        return repr(cut(value))
    try:
        return cut(repr(value))
    except ValueError:  # int: Python prints no more than 4300 digits
        return "a number of thousands of digits"


def shortlist(names: Sequence[str]) -> str:
    """List up to five names, and how many more there are."""
    rest = len(names) - _NAMED
    return ", ".join(map(cut, names[:_NAMED])) + (f" and {rest} more" if rest > 0 else "")


def joined(names: Sequence[str]) -> str:
    """Join names as `a`, `a and b`, `a, b and c`."""
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def quantity(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: `1 folder`, `2 folders`.

    noun: in the singular; a verb may follow it, as in `quantity(count, "file is", "files are")`.
    plural: the same in the plural; empty for the noun with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def plain_phrase(words: str) -> str:
    """Return words without spaces around them and without commas at their end."""
    return words.strip().rstrip(",").rstrip()


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless `value` of the input `name` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {quoted(value)}; choose one of {', '.join(allowed)}.")


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


def clock(seconds: float) -> str:
    """Format a duration as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
