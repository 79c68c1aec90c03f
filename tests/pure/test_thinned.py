"""Cases of a test that are left to `dev.py test --wide`."""

import pytest
from thinned import one_in


def test_every_second_case_is_kept_and_each_that_is_fast():
    rows = ["a", ("b",), pytest.param("c"), pytest.param("d", marks=pytest.mark.fast), "e", "f"]
    params = one_in(2, rows)
    assert [param.values[0] for param in params] == list("abcdef")
    assert [param.values[0] for param in params if not any(mark.name == "wide" for mark in param.marks)] == list("acde")
