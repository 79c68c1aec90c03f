"""Cost of a compiled block, counted: what its kernels do, and the seconds that this takes at given rates.

The planner and `benchmarks/counted.py` price blocks by these functions. What they reckon without lowering a block
(bytes by what eager saves, what selective checkpointing computes again) holds for the lowered blocks of
benchmarks/results/counted.json within what tests/pure/test_counted_cost.py says, and for what an H100 took within what
tests/unit/test_card_pages.py says.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Bytes that a compiled block's kernels would read and write at the full rate of the memory in the time that they take
# beside large products and attention, as multiples of what the eager block saves for backward. From what FLUX.1's
# kernels took on an H100 (benchmarks/results/cards); other models and cards are assumed to be like it.
FORWARD_BYTES, BACKWARD_BYTES = 4.2, 4.0
# The part that a compiled block saves for backward of what the eager one does: counted 0.78 to 0.95, taken the most.
COMPILED_SAVES = 0.95
# Outputs of products are about half of what a block could save: below this budget products are computed again.
PRODUCTS_BUDGET = 0.5
# The part of a forward's other kernels that selective checkpointing runs again at the least budget. On the same card
# the default budget of 0.5 took 0.003 s more a step than keeping all; smaller budgets have not been measured.
AGAIN_BYTES = 0.25


@dataclass(frozen=True)
class KernelWork:
    """Work of some kernels.

    products: FLOP of large matrix products; of those in 8 bit, of full ones that take as long.
    attention, attention_backward: FLOP of attention, forward and back.
    bytes: read and written by all other kernels, thin products of adapters among them.
    """

    products: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "KernelWork") -> "KernelWork":
        return KernelWork(
            self.products + other.products,
            self.attention + other.attention,
            self.attention_backward + other.attention_backward,
            self.bytes + other.bytes,
        )


@dataclass(frozen=True)
class KernelRates:
    """Rates that a device reaches.

    products, attention, attention_backward: FLOP per second.
    bandwidth: bytes per second of its memory.
    """

    products: float
    attention: float
    attention_backward: float
    bandwidth: float

    def seconds(self, work: KernelWork) -> float:
        """Return the seconds of the kernels, one after the other: those of products and attention by their FLOP, all
        others by their bytes."""
        computing = work.products / self.products
        computing += work.attention / self.attention + work.attention_backward / self.attention_backward
        return computing + work.bytes / self.bandwidth

    def scaled(self, factor: float) -> "KernelRates":
        """Return the rates of a device that is `factor` times as fast in everything."""
        rates = (self.products, self.attention, self.attention_backward, self.bandwidth)
        return KernelRates(*(factor * rate for rate in rates))


# bf16 on an H100, as measured on one (benchmarks/results/cards): large products, cuDNN's attention, which torch chooses
# there, and copies within its memory. That another card's rates are in about these ratios is assumed: nobody has
# measured one. A plan is made from a block's own timed seconds, so of these only the ratios count there.
H100_RATES = KernelRates(740e12, 632e12, 513e12, 3.0e12)


@dataclass(frozen=True)
class BlockWork:
    """Work of a compiled block in a step that computes nothing again.

    For a plan: `block_work` makes it of counted FLOP, and `rates.seconds` of `forward` and of `again(...) + backward`
    are a block's seconds forward and back. With rates `scaled` so that a timed forward comes out as it was timed, the
    backward and every kind of checkpointing follow.
    """

    forward: KernelWork
    backward: KernelWork

    def again(self, checkpointing: str, budget: float) -> KernelWork:
        """Return what is computed again before the backward.

        checkpointing: none, selective or full, of the compiled block.
        budget: part of what could be saved that selective checkpointing saves, 0 to 1.
        """
        if checkpointing == "none":
            return KernelWork()
        if checkpointing == "full":
            return self.forward
        attention = 0.0 if budget > 0 else self.forward.attention
        products = self.forward.products * max(0.0, 1 - budget / PRODUCTS_BUDGET)
        return KernelWork(products, attention, bytes=self.forward.bytes * AGAIN_BYTES * (1 - budget))


class EagerBlockWork(BlockWork):
    """Work of an eager block: with selective checkpointing it keeps attention and a part of the products' results, and
    runs all other kernels again."""

    def again(self, checkpointing: str, budget: float) -> KernelWork:
        """Return what is computed again before the backward, see `BlockWork.again`."""
        if checkpointing != "selective":
            return super().again(checkpointing, budget)
        attention = 0.0 if budget > 0 else self.forward.attention
        return KernelWork(self.forward.products * (1 - budget), attention, bytes=self.forward.bytes)


def block_work(forward: Mapping[str, float], backward: Mapping[str, float], saved: float) -> BlockWork:
    """Reckon a compiled block's work without lowering it.

    forward, backward: FLOP by name of the op, as FlopCounterMode gives them for the eager block, adapters included;
    names with `attention` in them are attention's.
    saved: bytes that the eager block saves for backward.
    """
    attention = sum(flop for op, flop in forward.items() if "attention" in op)
    attention_backward = sum(flop for op, flop in backward.items() if "attention" in op)
    return BlockWork(
        KernelWork(sum(forward.values()) - attention, attention, bytes=FORWARD_BYTES * saved),
        KernelWork(
            sum(backward.values()) - attention_backward,
            attention_backward=attention_backward,
            bytes=BACKWARD_BYTES * saved,
        ),
    )
