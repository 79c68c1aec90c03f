"""Cost of one block in a swap plan: its bytes and seconds under each kind of checkpointing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..activations.cost import H100_RATES, BlockWork

# The smallest budget of selective checkpointing: it saves attention's results and almost nothing else, as full
# checkpointing without the recompute of attention.
LEAST_BUDGET = 0.01


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block. In inference only weights, working, forward and in_file are used.

    name: name in the plan, such as single_blocks.3.
    weights: bytes.
    inputs: bytes saved by full checkpointing.
    saved: bytes saved without checkpointing.
    working: peak bytes besides those while it runs forward or backward.
    forward: seconds of computing the forward, 0 if unknown.
    backward: seconds of computing the backward, 0 if unknown.
    in_file: bytes of its weights in the mapped file.
    attention: bytes of attention's results, which selective checkpointing saves at every budget but 0.
    budgeted: bytes of the other activations to which the selective budget applies; None for all the rest.
    work: work of its kernels; None treats all parts of the forward's seconds alike.
    """

    name: str
    weights: int
    inputs: int = 0
    saved: int = 0
    working: int = 0
    forward: float = 0.0
    backward: float = 0.0
    in_file: int = 0
    attention: int = 0
    budgeted: int | None = None
    work: BlockWork | None = None


def add_costs(parts: Sequence[BlockCost]) -> BlockCost:
    """Return the cost of a block that runs in several ways in a step, each measured separately."""
    first, *rest = parts
    for other in rest:
        budgeted = None if first.budgeted is None or other.budgeted is None else first.budgeted + other.budgeted
        work = None
        if first.work is not None and other.work is not None:
            forward, backward = first.work.forward + other.work.forward, first.work.backward + other.work.backward
            work = replace(first.work, forward=forward, backward=backward)
        first = replace(
            first,
            inputs=first.inputs + other.inputs,
            saved=first.saved + other.saved,
            working=max(first.working, other.working),
            forward=first.forward + other.forward,
            backward=first.backward + other.backward,
            attention=first.attention + other.attention,
            budgeted=budgeted,
            work=work,
        )
    return first


def saved_bytes(block: BlockCost, checkpointing: str | None, budget: float) -> int:
    """Return the bytes that the block saves from its forward to its backward."""
    if checkpointing is None:
        return 0
    if checkpointing == "none":
        return block.saved
    if checkpointing == "full" or budget == 0:
        return block.inputs
    always = block.inputs + block.attention
    rest = block.saved - always if block.budgeted is None else block.budgeted
    return always + int(budget * max(0, rest))


def block_seconds(block: BlockCost, checkpointing: str | None, budget: float) -> tuple[float, float]:
    """Return seconds of (forward, backward with recompute)."""
    if checkpointing is None:
        return block.forward, 0.0
    return block.forward, block.backward + _recompute_fraction(block, checkpointing, budget) * block.forward


def _recompute_fraction(block: BlockCost, checkpointing: str, budget: float) -> float:
    """Return the recompute time as a fraction of the forward's seconds."""
    if block.work is None:
        return {"none": 0.0, "selective": 1 - budget, "full": 1.0}[checkpointing]
    # The rates of another card differ by about one common factor, which the timed forward already includes.
    return H100_RATES.seconds(block.work.recompute_work(checkpointing, budget)) / H100_RATES.seconds(block.work.forward)
