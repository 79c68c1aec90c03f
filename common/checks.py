"""The sentences that a value out of range ends in."""

import math
from dataclasses import fields
from typing import Any


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")


def finite(options: Any) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} is {value}; give a finite number.")


def within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; set it between {low} and {high}.")
