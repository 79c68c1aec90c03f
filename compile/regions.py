"""What is compiled in training: one region per block structure.

A region is called with the block as an argument, so all blocks of one structure share its graphs and the number of
graphs does not grow with depth.
"""

from collections.abc import Sequence
from typing import Any

from ..models.family import Block


def block_regions(blocks: Sequence[tuple[str, Block]]) -> list[str]:
    """The distinct structures among the blocks of a trainer, in order of first use: one region each."""
    return list(dict.fromkeys(block.structure() for _, block in blocks))


def run_block(block: Block, *args: Any) -> Any:
    """The body of every training region."""
    return block(*args)
