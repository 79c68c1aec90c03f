"""The price of a block: by hand, and what is reckoned without lowering against what was counted with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tessera.memory.activations.cost import H100_RATES, BlockWork, KernelRates, KernelWork, block_work

RATES = KernelRates(products=100.0, attention=50.0, attention_backward=25.0, bandwidth=10.0)
BLOCK = BlockWork(KernelWork(200.0, 100.0, bytes=40.0), KernelWork(200.0, attention_backward=250.0, bytes=60.0))


def test_kernels_take_their_flop_or_their_bytes() -> None:
    assert RATES.seconds(BLOCK.forward) == 2 + 2 + 4
    assert RATES.seconds(BLOCK.backward) == 2 + 10 + 6
    assert RATES.seconds(BLOCK.forward + BLOCK.backward) == 26
    assert RATES.scaled(2.0).seconds(BLOCK.forward) == 4


def test_full_computes_the_forward_again_and_selective_never_attention() -> None:
    assert BLOCK.recompute_work("none", 0.5) == KernelWork()
    assert BLOCK.recompute_work("full", 0.5) == BLOCK.forward
    half, least = BLOCK.recompute_work("selective", 0.5), BLOCK.recompute_work("selective", 0.01)
    assert half.products == half.attention == least.attention == 0 < half.bytes < least.bytes < BLOCK.forward.bytes
    assert least.products == pytest.approx(200.0 * 0.98)
    assert BLOCK.recompute_work("selective", 0.0).attention == 100.0


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.7])
def test_a_larger_budget_computes_less_again(budget: float) -> None:
    less_work, more_work = (BLOCK.recompute_work("selective", b) for b in (budget + 0.1, budget))
    assert RATES.seconds(more_work) > RATES.seconds(less_work)


COUNTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "counted.json"
ROWS = json.loads(COUNTS.read_text(encoding="utf-8"))["rows"]


def counted_work(kernels: list[list[Any]]) -> KernelWork:
    """The work of lowered kernels, each line with kind, name, launches, bytes and FLOP first."""

    def flop(kind: str) -> int:
        return sum(line[4] for line in kernels if line[0] == kind)

    other_work = sum(line[3] for line in kernels if line[0] in ("thin", "triton", "other"))
    return KernelWork(flop("product"), flop("attention"), flop("attention_backward"), other_work)


def eager_flop(kernels: list[list[Any]]) -> dict[str, float]:
    flop: dict[str, float] = {}
    for line in kernels:
        op = line[1].partition(" ")[0]
        flop[op] = flop.get(op, 0.0) + line[4]
    return flop


@pytest.mark.parametrize("row", [name for name, blocks in ROWS.items() if len(blocks[0]["graphs"]) > 1])
def test_reckoning_without_lowering_is_near_the_count(row: str) -> None:
    for way in (*ROWS[row][0]["graphs"], "full"):
        checkpointing, _, budget = way.partition(" ")
        reckoned = counted = 0.0
        for block in ROWS[row]:
            eager = block["eager"]
            work = block_work(
                eager_flop(eager["forward"]["kernels"]),
                eager_flop(eager["backward"]["kernels"]),
                eager["forward"]["kept"],
            )
            recompute = work.recompute_work(checkpointing, float(budget or 0.0))
            reckoned += block["count"] * H100_RATES.seconds(work.forward + recompute + work.backward)
            graphs = block["graphs"]["none" if way == "full" else way]
            forward, backward = (counted_work(graphs[name]["kernels"]) for name in ("forward", "backward"))
            twice = forward if way == "full" else KernelWork()
            counted += block["count"] * H100_RATES.seconds(forward + twice + backward)
        assert reckoned == pytest.approx(counted, rel=0.12), way
