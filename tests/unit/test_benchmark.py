"""The arithmetic behind the step benchmark."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "train_step_figures.py"
_spec = importlib.util.spec_from_file_location("train_step_figures", FILE)
assert _spec is not None and _spec.loader is not None
figures = sys.modules["train_step_figures"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(figures)


def test_a_ratio_is_taken_within_each_round_so_that_a_slow_round_does_not_weigh():
    ours = [[1.0, 1.0, 9.0], [10.0, 10.0, 10.0], [2.0, 2.0, 2.0]]
    core = [[2.0, 2.0, 2.0], [30.0, 30.0, 90.0], [3.0, 3.0, 3.0]]
    assert figures.ratio_by_round(core, ours) == figures.Spread(1.5, 2.0, 3.0)


def test_contestants_of_unequal_rounds_are_no_ratio():
    with pytest.raises(ValueError):
        figures.ratio_by_round([[1.0]], [[1.0], [2.0]])


@pytest.mark.parametrize(("tokens", "grid"), [(1024, (32, 32)), (4032, (63, 64)), (48, (6, 8)), (7, (1, 7))])
def test_a_grid_holds_exactly_its_tokens_and_is_near_a_square(tokens, grid):
    assert figures.grid_of(tokens) == grid


def test_the_peak_of_allocations_is_found_in_order_of_time():
    events = [(3.0, -50), (1.0, 100), (2.0, 50), (4.0, 20)]
    assert figures.peak_and_rest(events) == (150, 120)
