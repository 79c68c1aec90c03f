"""Thins the cases of a test: those that would only repeat what others show are marked `wide`."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, rows: Iterable[Any]) -> list[Any]:
    """Mark all rows `wide` but every `count`-th and those marked `fast`. rows: values or pytest.param of one test."""
    params = [row if hasattr(row, "marks") else pytest.param(*row if isinstance(row, tuple) else [row]) for row in rows]
    keep_flags = [not n % count or any(mark.name == "fast" for mark in param.marks) for n, param in enumerate(params)]
    return [
        param if keep else param._replace(marks=[*param.marks, pytest.mark.wide])
        for param, keep in zip(params, keep_flags, strict=True)
    ]
