"""Cards, and the price of counted kernels by their rates."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

WORK_OF_KIND = {"product": "products", "attention": "attention", "attention_backward": "attention_backward"}


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
    known, asked, ours = CARDS["H100"], CARDS[card], cost.H100_RATES
    computing, moving = asked.products / known.products, asked.bandwidth / known.bandwidth
    return cost.KernelRates(
        ours.products * computing, ours.attention * computing, ours.attention_backward * computing,
        ours.bandwidth * moving,
    )  # fmt: skip


def work(kernels: Iterable[tuple[str, int, int]]) -> Any:
    """The work of launches, each (kind, bytes, FLOP): of products and attention their FLOP, of all others bytes."""
    sums = {"bytes": 0.0}
    for kind, size, flop in kernels:
        name = WORK_OF_KIND.get(kind, "bytes")
        sums[name] = sums.get(name, 0.0) + (size if name == "bytes" else flop)
    return import_module("tessera.memory.activations.cost").KernelWork(**sums)
