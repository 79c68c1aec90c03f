"""Cost model of a compiled block: FLOP and bytes of its kernels, and their seconds at given rates.

The planner and `benchmarks/counted/counted.py` price blocks by these functions. The estimates made without lowering a
block (bytes from the eager block's saved bytes, the recompute of selective checkpointing) agree with the lowered blocks
of benchmarks/results/counted.json within the tolerances of tests/pure/benchmarks/test_counted_cost.py, and with the
times of an H100 within those of tests/unit/benchmarks/test_card_pages.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Bytes that a compiled block's kernels, except large matmuls and attention, would read and write in their time at full
# memory bandwidth, as multiples of the bytes that the eager block saves for backward. From the kernel times of FLUX.1
# on an H100 (benchmarks/results/cards); other models and cards are assumed to be like it.
FORWARD_BYTES, BACKWARD_BYTES = 4.2, 4.0
# Bytes that a compiled block saves for backward, relative to the eager one: counted as 0.78 to 0.95, the largest taken.
COMPILED_SAVES = 0.95
# Matmul outputs are about half of the bytes that a block could save: below this budget matmuls are recomputed.
PRODUCTS_BUDGET = 0.5
# Fraction of a forward's other kernels that selective checkpointing recomputes at the smallest budget. On the same card
# the default budget of 0.5 took 0.003 s more per step than saving all; smaller budgets have not been measured.
AGAIN_BYTES = 0.25


@dataclass(frozen=True)
class KernelWork:
    """Work of a set of kernels.

    products: FLOP of large matmuls; 8-bit ones count as the FLOP of 16-bit matmuls of the same duration.
    attention: FLOP of attention's forward.
    attention_backward: FLOP of attention's backward.
    bytes: read and written by all other kernels, including the thin matmuls of adapters.
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
    """Achieved rates of a device.

    products: FLOP per second of large matmuls.
    attention: FLOP per second of attention's forward.
    attention_backward: FLOP per second of attention's backward.
    bandwidth: bytes per second of its memory.
    """

    products: float
    attention: float
    attention_backward: float
    bandwidth: float

    def seconds(self, work: KernelWork) -> float:
        """Return the seconds of the kernels run sequentially: matmuls and attention by FLOP, all others by bytes."""
        computing = work.products / self.products
        computing += work.attention / self.attention + work.attention_backward / self.attention_backward
        return computing + work.bytes / self.bandwidth

    def scaled(self, factor: float) -> "KernelRates":
        """Return the rates of a device that is `factor` times as fast at everything."""
        rates = (self.products, self.attention, self.attention_backward, self.bandwidth)
        return KernelRates(*(factor * rate for rate in rates))


# bf16 on an H100, as measured (benchmarks/results/cards): large matmuls, cuDNN's attention, which torch chooses there,
# and copies within device memory. Other cards are assumed to have rates in about these ratios; none has been measured.
# A plan uses a block's own timed seconds, so only the ratios matter there.
H100_RATES = KernelRates(740e12, 632e12, 513e12, 3.0e12)


@dataclass(frozen=True)
class BlockWork:
    """Work of a compiled block in a step without recompute.

    forward: work of the forward.
    backward: work of the backward.

    For a plan: `block_work` makes it from counted FLOP, and `rates.seconds` of `forward` and of
    `recompute_work(...) + backward` are a block's forward and backward seconds. With rates `scaled` to match a timed
    forward, the backward and every kind of checkpointing follow.
    """

    forward: KernelWork
    backward: KernelWork

    def recompute_work(self, checkpointing: str, budget: float) -> KernelWork:
        """Return the work recomputed before the backward.

        checkpointing: none, selective or full, of the compiled block.
        budget: fraction of the savable activations that selective checkpointing saves, 0 to 1.
        """
        if checkpointing == "none":
            return KernelWork()
        if checkpointing == "full":
            return self.forward
        attention = 0.0 if budget > 0 else self.forward.attention
        products = self.forward.products * max(0.0, 1 - budget / PRODUCTS_BUDGET)
        return KernelWork(products, attention, bytes=self.forward.bytes * AGAIN_BYTES * (1 - budget))


class EagerBlockWork(BlockWork):
    """Work of an eager block: selective checkpointing saves the results of attention and of a part of the matmuls, and
    recomputes all other kernels."""

    def recompute_work(self, checkpointing: str, budget: float) -> KernelWork:
        """Return the work recomputed before the backward, see `BlockWork.recompute_work`."""
        if checkpointing != "selective":
            return super().recompute_work(checkpointing, budget)
        attention = 0.0 if budget > 0 else self.forward.attention
        return KernelWork(self.forward.products * (1 - budget), attention, bytes=self.forward.bytes)


def block_work(forward: Mapping[str, float], backward: Mapping[str, float], saved: float) -> BlockWork:
    """Estimate a compiled block's work without lowering it.

    forward, backward: FLOP by op name, as FlopCounterMode counts them for the eager block, adapters included; names
    that contain `attention` are attention's.
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
