"""The LoRA gradients of every family in every mode equal an fp64 reference: plain autograd over its formulas."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from family_cases import cases, every_case, marks_of, modes_in_turn
from tessera.lora.options import NetworkOptions
from thinned import one_in

MODES = ("none", "selective", "full")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def in_every_mode(*axes: str, fast: bool = False, in_turn: bool = False) -> Iterator[Any]:
    """(case, batch, count, mode, swap) for each case that leaves out none of these axes; fast: the first of a family
    is marked so. in_turn: a batch runs in one mode, resident or swapped, and the next one in the next."""
    ways, number = list(product(MODES, (False, True))), 0
    for case in cases(*axes):
        marks = marks_of(case, *axes, fast=fast, thin=in_turn)
        for batch, counts in case.gradients().items():
            for count in counts:
                number += 1
                for mode, swap in [ways[number % len(ways)]] if in_turn else ways:
                    case_id = f"{case.name}-{batch}-{count}-{mode}-{'swapped' if swap else 'resident'}"
                    yield pytest.param(case, batch, count, mode, swap, id=case_id, marks=marks)
                    marks = [mark for mark in marks if mark.name != "fast"]


@pytest.mark.parametrize(("case", "batch", "count", "mode", "swap"), one_in(6, in_every_mode("gradients", fast=True)))
def test_gradients_equal_the_fp64_reference(check_gradients, case, batch, count, mode, swap):
    check_gradients(case, batch, count, mode=mode, swap=swap)


@pytest.mark.parametrize(
    ("case", "batch", "count", "mode", "swap"),
    one_in(5, in_every_mode("gradients", "compiled gradients", in_turn=True)),
)
def test_gradients_of_compiled_blocks_equal_the_fp64_reference(check_gradients, case, batch, count, mode, swap):
    check_gradients(case, batch, count, mode=mode, swap=swap, backend="aot_eager")


@pytest.mark.parametrize("case", one_in(5, cases("gradients", "inductor")[::-1][1::2]), ids=lambda case: case.name)
def test_gradients_of_inductor_equal_the_fp64_reference(check_gradients, case):
    batch, counts = list(case.gradients().items())[-1]
    check_gradients(case, batch, max(counts), mode="full", swap=True, backend="inductor")


@modes_in_turn(MODES, "gradients", "bf16 gradients", thin=True)
def test_gradients_in_bf16_stay_within_its_rounding(check_gradients, case, mode):
    batch, counts = list(case.gradients().items())[-1]
    check_gradients(case, batch, max(counts), mode=mode, dtype=torch.bfloat16)


@modes_in_turn(MODES, "gradients", "bf16 gradients", thin=("flux", "wan"))
def test_compiled_gradients_in_bf16_stay_within_its_rounding(check_gradients, case, mode):
    batch, counts = list(case.gradients().items())[-1]
    check_gradients(case, batch, max(counts), mode=mode, backend="aot_eager", dtype=torch.bfloat16)


@every_case("gradients", thin=True)
def test_gradients_of_a_ragged_edge_are_those_of_the_tokens_that_are_kept(check_gradients, case):
    ragged = [name for name in case.batches() if name.startswith("ragged")]
    assert ragged
    for name in ragged:
        check_gradients(case, name, 3)


@pytest.mark.parametrize(("mode", "swap"), [("none", False), ("full", True)], ids=["resident", "swapped"])
@every_case("gradients", thin=True)
def test_gradients_reach_every_linear_of_the_model(check_gradients, case, mode, swap):
    """Those that all blocks share, and those around the blocks, too."""
    batch, counts = list(case.gradients().items())[-1]
    network = NetworkOptions(rank=2, alpha=2.0, include=("*",))
    gradients = check_gradients(case, batch, max(counts), mode=mode, swap=swap, network=network)
    assert len(gradients) == 2 * case.linears
