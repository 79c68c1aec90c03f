"""A row for each variant of each model family: the tests of tests/comfy/every_family run on all of them."""

import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any

import pytest
from tiny.models.family_case import AXES, FamilyCase

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
CASES: dict[str, FamilyCase] = {case.name: case for module in _MODULES for case in module.CASES}


def cases(*axes: str) -> list[FamilyCase]:
    """The rows that leave out none of these axes."""
    assert set(axes) <= AXES.keys()
    return [case for case in CASES.values() if not set(axes) & case.left_out.keys()]


Thin = bool | tuple[str, ...]
"""Families of which one row is in every run, True for all of them; the other rows are `wide`."""


def every_case(*axes: str, fast: bool = False, thin: Thin = False) -> Any:
    """Parametrize a test's `case` over the rows that leave out none of these axes.

    fast: mark one of each family so.
    """
    params = [
        pytest.param(case, id=case.name, marks=marks_of(case, *axes, fast=fast, thin=thin)) for case in cases(*axes)
    ]
    return pytest.mark.parametrize("case", params)


def modes_in_turn(modes: Sequence[str], *axes: str, thin: Thin = False) -> Any:
    """Parametrize a test's `case` and `mode` over such rows: the first in every mode, the others in each in turn."""
    params = []
    for number, case in enumerate(cases(*axes)):
        marks = marks_of(case, *axes, fast=False, thin=thin)
        for mode in modes if number == 0 else [modes[number % len(modes)]]:
            params.append(pytest.param(case, mode, id=f"{case.name}-{mode}", marks=marks))
            marks = [pytest.mark.wide] if thin else []
    return pytest.mark.parametrize(("case", "mode"), params)


def marks_of(case: FamilyCase, *axes: str, fast: bool = True, thin: Thin = False) -> list[pytest.MarkDecorator]:
    """Return the marks of a row: `fast` for the first of its family that leaves out none of these axes."""
    assert isinstance(thin, bool) or set(thin) <= {other.family for other in CASES.values()}
    first = next(other for other in cases(*axes) if other.family == case.family)
    if case is first and (isinstance(thin, bool) or case.family in thin):
        return [pytest.mark.fast] if fast else []
    return [pytest.mark.wide] if thin else []
