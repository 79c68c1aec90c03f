"""JSON of strangers: bounded in size, number of items and depth before it is parsed, without infinite numbers."""

import gc
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from .budgets import Budget, check_size
from .regular_files import read_regular

_STEPS = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))
_NO_BRACKETS = bytes(set(range(256)) - _STEPS.keys())
_SLICE = 1000
_DEEPEST = 100  # levels of a value that is written again


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
    with _without_collector():
        return json.loads(text, parse_float=_finite, parse_constant=lambda _: None)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let the garbage collector rest: parsing holds the interpreter, and makes nothing that it could free.

    It would go through all objects of the process again and again while lists are made, which is most of the time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_json(path: Path, budget: Budget) -> Any:
    """Read a JSON file as `parse_json` reads a text. Raises OSError as well where there is no regular file."""
    return parse_json(read_regular(path, budget).decode("utf-8-sig"), budget, path.name)


def depth_of(text: str, enough: int | None = None) -> int:
    """Count the levels of lists and objects inside one another.

    enough: bound above which the count ends, for texts of millions of brackets; the result is then above it.
    """
    without_escapes = text.encode("utf-8", "surrogatepass").replace(rb"\\", b"").replace(rb"\"", b"")
    outside_strings = without_escapes.split(b'"')[::2]
    brackets = b"".join(outside_strings).translate(None, _NO_BRACKETS)
    deepest = level = 0
    for start in range(0, len(brackets), _SLICE):
        levels = list(accumulate(map(_STEPS.__getitem__, brackets[start : start + _SLICE]), initial=level))
        level, deepest = levels[-1], max(deepest, max(levels))
        if enough is not None and deepest > enough:
            break
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


def is_plain(value: Any, depth: int = 0) -> bool:
    """Test for JSON of limited depth and number size, whose strings can be encoded again."""
    if depth > _DEEPEST:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 2**64
    if isinstance(value, str):
        return _is_encodable(value)
    if isinstance(value, list):
        return all(is_plain(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(_is_encodable(name) and is_plain(item, depth + 1) for name, item in value.items())
    return value is None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can represent
        return False
    return True
