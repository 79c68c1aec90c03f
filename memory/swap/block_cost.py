"""Cost of one block in a swap plan: its bytes and seconds under each kind of checkpointing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..activations.cost import H100_RATES, BlockWork

# The least budget of selective checkpointing: attention's results are kept, and of the rest next to nothing. So it is
# full checkpointing without attention's second run.
LEAST_BUDGET = 0.01


@dataclass(frozen=True)
class BlockCost:
    """Cost of one block. In inference only weights, working, forward and in_file count.

    name: as it is to be chosen by, such as single_blocks.3.
    weights: bytes.
    inputs: bytes that full checkpointing saves.
    saved: bytes that are saved without checkpointing.
    working: bytes, the most it takes besides those while it runs forward or back.
    forward, backward: seconds of computing, 0 where that is not known.
    in_file: bytes of its weights that lie in the mapped file.
    attention: bytes of attention's results, which selective checkpointing saves at every budget but 0.
    budgeted: bytes of what selective checkpointing saves its budget of besides; None where that is all the rest.
    work: what its kernels do; None takes each second of the forward for equal.
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
    """Return the cost of a block that runs for several things in a step, each of which was measured by itself."""
    first, *others = parts
    for other in others:
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
    """Bytes that the block saves from its forward to its backward."""
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
    return block.forward, block.backward + _again(block, checkpointing, budget) * block.forward


def _again(block: BlockCost, checkpointing: str, budget: float) -> float:
    """Return what is computed again, as a part of the forward's seconds."""
    if block.work is None:
        return {"none": 0.0, "selective": 1 - budget, "full": 1.0}[checkpointing]
    # The rates of another card differ in about one factor, which the timed forward has in it.
    return H100_RATES.seconds(block.work.again(checkpointing, budget)) / H100_RATES.seconds(block.work.forward)
