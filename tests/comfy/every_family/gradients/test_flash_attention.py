"""Every family trains on flash-attn where it is chosen: the reference's gradients, by its kernels alone, in one graph.

A stand-in with the signatures of the package computes here; the three packages are in
tests/unit/models/layers/test_flash_attention.py.
"""

from typing import Any

import pytest
import torch
from family_cases import CASES, cases, every_case
from tessera.models.layers import ragged_attention
from tessera.models.layers.flash_attention import flash_package
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.memory.flash_attn import installed
from tiny.train.runs import Watcher, train, training_data

pytestmark = pytest.mark.usefixtures("unchecked")


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("another attention ran")


@pytest.fixture
def check_on_flash_attn(check_gradients: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compare the gradients of a case's last batch with the reference's; returns the functions that were called."""

    def check(case: Any, backend: str | None = None) -> list[str]:
        batch, counts = list(case.gradients().items())[-1]
        with installed("2") as packages:
            flash_package(torch.device("cpu"), torch.float32)
            calls = packages["2"].calls
            calls.clear()
            monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
            monkeypatch.setattr(ragged_attention, "_kernel", refuse)
            check_gradients(case, batch, max(counts), mode="selective", backend=backend, attention="flash-attn")
        return calls

    return check


@every_case("gradients", thin=True)
def test_gradients_on_flash_attn_equal_the_fp64_reference(check_on_flash_attn, case):
    calls = check_on_flash_attn(case)
    backward = [name for name in calls if "backward" in name]
    # Selective checkpointing keeps each result: none is computed again for the backward.
    assert backward and len(calls) == 2 * len(backward)


FIRST = {case.family: case for case in reversed(cases("gradients", "compiled gradients"))}


@pytest.mark.parametrize("case", one_in(4, FIRST.values()), ids=FIRST)
def test_blocks_on_flash_attn_are_compiled_whole(check_on_flash_attn, case):
    torch._dynamo.reset()
    graphs = Graphs()
    assert check_on_flash_attn(case, "aot_eager")
    assert graphs() and not graphs.breaks


def test_a_run_names_the_package_that_it_takes(case_file, tmp_path):
    case, watcher = CASES["flux-dev"], Watcher()
    data = training_data(*case.batches()["shapes"]())
    with installed("4", "2") as packages:
        train(case.load(case_file(case)), data, tmp_path, watcher, memory={"attention": "flash-attn"}, steps=1)
    assert "attention runs on FlashAttention 4." in watcher.notes
    assert packages["4"].calls and not packages["2"].calls
