"""Cards, and the price of counted kernels by their rates."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# Seconds in which a kernel fills and drains the card, in addition to its work, and seconds of a small memset. From the
# page of one H100 (results/cards): 192 thin matmuls that read 28 MB took 12.7 us each, of which reading takes 9.4, and
# 738 memsets took 0.84 ms.
START, MEMSET = 3e-6, 1.14e-6
# Cycles a second of an H100 in such a step: the slowest kernel of the page, which waits for nothing but its own
# accesses, has 913,000 by count and took 526 us.
CLOCK = 1.755e9
BANDWIDTH = 3.0e12  # of the same page: the cycles of a card with another are taken to be in proportion
# The part of the bandwidth that torch's kernels over lists of tensors reach: clip and AdamW took 2.3 ms on the page.
MULTI_TENSOR = 0.62


@dataclass(frozen=True)
class Card:
    """products: dense bf16 products with fp32 accumulation by the maker's data sheet, FLOP per second; bandwidth: of
    its memory, bytes per second. source: of both figures."""

    products: float
    bandwidth: float
    source: str


CARDS = {
    "H100": Card(989.4e12, 3.35e12, "NVIDIA H100 data sheet, SXM5"),
    "A100 80GB": Card(312e12, 2.039e12, "NVIDIA A100 data sheet, SXM4"),
    "RTX 5090": Card(209.5e12, 1.792e12, "NVIDIA RTX Blackwell architecture paper"),
    "RTX 4090": Card(165.2e12, 1.008e12, "NVIDIA Ada architecture paper"),
    "RTX 3090": Card(71e12, 0.936e12, "NVIDIA GA102 architecture paper"),
}


def rates(card: str) -> Any:
    """Rates that a card is expected to reach: of its peaks the parts that the H100's rates are of the H100's peaks."""
    cost = import_module("tessera.memory.activations.cost")
    h100 = CARDS["H100"]
    target = CARDS[card]
    h100_rates = cost.H100_RATES
    computing, moving = target.products / h100.products, target.bandwidth / h100.bandwidth
    return cost.KernelRates(
        h100_rates.products * computing, h100_rates.attention * computing, h100_rates.attention_backward * computing,
        h100_rates.bandwidth * moving,
    )  # fmt: skip


def seconds_of(line: Sequence[Any], rates: Any) -> float:
    """Seconds of equal launches at a card's rates: products and attention by their FLOP; the others by their memory or
    their cycles, whichever takes longer, and their start.

    line: kind, name, launches, bytes, FLOP, bytes moved, cycles, all but the launches added up. The cycles of other
    cards are taken to be as many times an H100's as their memory is slower.
    """
    kind, name, launches, size, flop, *counts = line
    bytes_moved, cycles = counts or (size, 0)
    if kind in ("product", "attention", "attention_backward"):
        rate = {"product": rates.products, "attention": rates.attention}.get(kind, rates.attention_backward)
        return flop / rate
    if kind == "copy":  # by the driver, which has the next one started before the last one ends
        return max(launches * MEMSET, bytes_moved / rates.bandwidth)
    part = MULTI_TENSOR if name.startswith(("_foreach", "_fused")) else 1.0
    return launches * START + max(bytes_moved / (part * rates.bandwidth), cycles / CLOCK * BANDWIDTH / rates.bandwidth)
