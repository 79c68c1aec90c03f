"""The blocks of a MODEL, in which compiled code is placed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ..models.blocks import BlockOfModel, block_lists, find_blocks
from .calls import Entry, entry_of
from .weights import keep_flags_on_modules


@dataclass(frozen=True)
class ModelBlocks:
    """The repeated blocks of a model, as its modules are now.

    model: the diffusion model.
    blocks: all of them, in the order of the modules.
    lists: the blocks by the names of their lists.
    entries: the blocks and the modules around them, as a whole list may be replaced.
    weighted: the modules whose weights compiled code reads.
    """

    model: nn.Module
    blocks: Sequence[BlockOfModel]
    lists: Mapping[str, list[BlockOfModel]]
    entries: Sequence[Entry]
    weighted: list[nn.Module]

    def is_current(self, model: nn.Module) -> bool:
        """Return whether the MODEL still has these modules."""
        return model is self.model and all(modules.get(key) is module for modules, key, module in self.entries)


def read_blocks(model: nn.Module, whole_model: bool) -> ModelBlocks:
    """Find the blocks of a model. whole_model: compiled code reads all weights, not only those of blocks."""
    blocks = find_blocks(model)
    names = (block.name.split(".") for block in blocks)
    paths = dict.fromkeys(".".join(parts[:n]) for parts in names for n in range(1, len(parts) + 1))
    weighted = [module for module in model.modules() if module._parameters]
    inside = {id(module) for block in blocks for module in block.module.modules()}
    keep_flags_on_modules(model.modules())
    return ModelBlocks(
        model,
        blocks,
        block_lists(model, blocks),
        [entry_of(model, path) for path in paths],
        weighted if whole_model else [module for module in weighted if id(module) in inside],
    )
