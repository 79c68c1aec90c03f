"""JSON of strangers: bounded in size, number of items and depth before it is parsed, without infinite numbers."""

import json
import math
import re
from pathlib import Path
from typing import Any

from .budgets import Budget, check_size
from .regular_files import read_regular

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def parse_json(text: str, budget: Budget, name: str) -> Any:
    """Parse a JSON text.

    budget: bounds its bytes (of characters here), items and depth.
    name: of the text in messages.
    A number that is not finite becomes None, as no browser reads one. Raises OverBudget past a bound, ValueError for
    what is no JSON.
    """
    check_size(budget, name, bytes=len(text))
    containers = text.count("[") + text.count("{")
    check_size(budget, name, items=text.count(",") + containers)
    if containers > budget.depth:
        check_size(budget, name, depth=depth_of(text, budget.depth))
    return json.loads(text, parse_float=_finite, parse_constant=lambda _: None)


def read_json(path: Path, budget: Budget) -> Any:
    """Read a JSON file as `parse_json` reads a text. Raises OSError as well where there is no regular file."""
    return parse_json(read_regular(path, budget).decode("utf-8-sig"), budget, path.name)


def depth_of(text: str, enough: int | None = None) -> int:
    """Count the levels of lists and objects inside one another.

    enough: bound above which the count ends, for texts of millions of brackets; the result is then above it.
    """
    deepest = level = 0
    for outside in _ESCAPE.sub("", text).split('"')[::2]:  # every other piece lies between two strings
        for bracket in _BRACKET.finditer(outside):
            level += 1 if bracket[0] in "[{" else -1
            if level > deepest:
                deepest = level
                if enough is not None and deepest > enough:
                    return deepest
    return deepest


def finite_json(value: Any) -> Any:
    """Copy plain JSON values with None in place of numbers that are not finite, which no browser reads."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return value


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
