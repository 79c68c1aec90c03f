"""The rows of smoke: every pair of options that can be together occurs, in few rows."""

import sys
from itertools import combinations, product
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from card.checks.cases import ALLOCATORS, KEEP, OPTIONS, PLACES, SWAPS, excludes, smoke, training_case, training_rows
from card.checks.pairs import covering_rows, pairs_of, possible_pairs


def test_every_pair_of_options_that_can_be_together_is_in_a_row():
    rows = training_rows(ALLOCATORS)
    covered_pairs = {pair for row in rows for pair in pairs_of(row)}
    for first, second in combinations(OPTIONS, 2):
        for a, b in product(OPTIONS[first], OPTIONS[second]):
            pair = ((first, a), (second, b))
            assert (pair in covered_pairs) is not excludes({first: a, second: b}), pair
    assert not any(excludes(row) for row in rows)


def test_the_rows_are_few_and_their_graphs_fewer():
    rows = training_rows(ALLOCATORS)
    compiled = [row for row in rows if row["mode"] == "compiled"]
    assert len(rows) <= 36 and len(compiled) <= 20
    assert len({tuple(row[name] for name in ("stored", "batch", "dropout")) for row in compiled}) < len(compiled)


def test_the_first_rows_compile_each_checkpointing_under_each_allocator():
    first = training_rows(ALLOCATORS)[: len(KEEP) * len(ALLOCATORS)]
    assert {row["mode"] for row in first} == {"compiled"}
    assert {(row["allocator"], row["checkpointing"]) for row in first} == set(product(ALLOCATORS, KEEP))


def test_the_rows_are_the_same_each_time():
    first = [{"allocator": "native", "mode": "compiled"}]
    assert covering_rows(OPTIONS, excludes, first) == covering_rows(OPTIONS, excludes, first)


def test_pairs_of_two_options_are_their_product():
    options = {"a": ("1", "2"), "b": ("3", "4", "5")}
    rows = covering_rows(options, lambda row: False)
    assert sorted(tuple(row.values()) for row in rows) == sorted(product("12", "345"))
    assert len(possible_pairs(options, lambda row: row == {"a": "1", "b": "3"})) == 5


def test_a_first_row_that_can_not_be_is_an_error():
    with pytest.raises(ValueError, match="No row can hold"):
        covering_rows(OPTIONS, excludes, [{"swap": "nothing swapped", "place": "staged"}])


def test_a_case_is_told_all_of_its_row():
    row = {name: values[0] for name, values in OPTIONS.items()}
    assert training_case(row).name == "train: eager, none"
    row |= {"mode": "compiled", "swap": "some swapped", "place": "staged", "stored": "int8 multiplied"}
    row |= {"checkpointing": "full with offload", "delay": "delay both", "ahead": "2 ahead", "dropout": "dropout"}
    row |= {"batch": "batch 2", "evicted": "evicted between the steps"}
    case = training_case(row)
    assert case.settings == {
        "do": "train",
        "compiled": True,
        "swap": SWAPS["some swapped"],
        "place": "staged",
        "checkpointing": "full",
        "offload_activations": True,
        "stored": "int8 rotated",
        "low_bit_matmul": "int8",
        "prefetch_blocks": 2,
        "batch": 2,
        "dropout": 0.3,
        "delay": "both",
        "evict": True,
    }
    assert case.name == (
        "train: compiled, full with offload, some swapped, staged, int8 multiplied, delay both, 2 ahead, batch 2, "
        "dropout, evicted between the steps"
    )


def test_sampling_is_checked_where_weights_may_lie_and_in_each_mode():
    names = [case.name for group in smoke("cuda") for case in group.cases]
    for place in PLACES:
        assert f"sample: all swapped, {place}, native" in names
    for mode in ("reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune", "scope stack", "scope model"):
        assert f"sample: compiled, {mode}, native" in names
    assert not any("reduce-overhead" in name and "Async" in name for name in names)
