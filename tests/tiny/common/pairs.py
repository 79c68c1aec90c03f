"""Fewer cases than a product of axes, with every pair of their values in one of them."""

from collections.abc import Sequence
from typing import Any


def covering(first: Sequence[Any], second: Sequence[Any], *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """List (first, second, *others): every pair of the first two, while each other axis goes round.

    A value of another axis meets every value of the first two if that axis has no more values than either of them.
    """
    return [
        (a, b, *(axis[(row + column) % len(axis)] for axis in axes))
        for row, a in enumerate(first)
        for column, b in enumerate(second)
    ]
