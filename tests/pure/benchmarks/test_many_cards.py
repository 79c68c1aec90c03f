"""The arithmetic of benchmarks/studies/many_cards.py."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))
try:
    from studies import many_cards
finally:
    sys.path.remove(str(BENCHMARKS))

SLOW = many_cards.Link(1e9, 0.0, "of this test")


def test_a_step_is_its_parts():
    # By hand: of 2 devices each sends and gets half of 1 GB twice, and one half of 4 GB twice for each of 32 pictures.
    assert many_cards.all_reduce(1e9, 2, SLOW) == pytest.approx(1.0)
    assert many_cards.all_reduce(1e9, 4, SLOW) == pytest.approx(1.5)
    assert many_cards.all_gather(4e9, 2, SLOW) == pytest.approx(2.0)
    step = many_cards.step(1.0, 2, SLOW, lora=1e9)
    assert step.compute == 32 and step.sums == pytest.approx(1.0) and step.gather == 0
    assert step.seconds == pytest.approx(32 + 1 + step.waiting + many_cards.UPDATE)
    sharded = many_cards.step(1.0, 2, SLOW, lora=1e9, base=4e9)
    assert sharded.gather == pytest.approx(128) and sharded.reason == "gather of the base"
    assert sharded.seconds == pytest.approx(128 + 1 + step.waiting + many_cards.UPDATE)
    hidden = many_cards.step(1.0, 2, SLOW, lora=1e9, base=0.5e9)
    assert hidden.seconds == step.seconds  # it fits behind the computation


def test_alone_nothing_is_sent_and_more_devices_are_never_worth_more_than_their_number():
    assert many_cards.step(1.0, 1, SLOW, base=1e9).seconds == 64 + many_cards.UPDATE
    for link in many_cards.LINKS.values():
        efficiencies = [many_cards.efficiency(0.4, ranks, link) for ranks in many_cards.RANKS]
        assert efficiencies[0] == 1 and efficiencies == sorted(efficiencies, reverse=True)


def test_the_page_is_of_these_figures():
    pictures = {"H100": many_cards.priced("H100", "none"), "RTX 4090": many_cards.priced("RTX 4090", "full")}
    assert pictures["H100"] == pytest.approx(0.340, abs=0.0015)  # the sum on the counted page
    assert many_cards.PAGE.read_text(encoding="utf-8") == many_cards.page(pictures, many_cards.LORA, False)
