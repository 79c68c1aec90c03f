"""Checkpointing of blocks, compiled or eager, with their activations offloaded if that is asked for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...compile.region import run_block
from ...memory.activations import checkpointing
from ...memory.activations.offload import ActivationOffload
from ...models.family import Block
from ..config.settings import MemoryOptions


class BlockCheckpointing:
    """Checkpointing of a run's blocks by the memory options.

    offload: copies of the blocks' inputs on the host; None without offload.
    """

    def __init__(self, memory: MemoryOptions, device: torch.device):
        self.memory = memory
        self.offload: ActivationOffload | None = None
        if memory.offload_activations and memory.checkpointing == "full":
            self.offload = ActivationOffload(device)

    def compiled(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Checkpoint a compiled function that runs a block."""
        if self.memory.checkpointing == "full":
            return self._full(run)
        if self.memory.checkpointing == "selective":
            return checkpointing.selective_compiled(run, self.memory.activation_budget)
        return run

    def eager(self) -> Callable[..., Any]:
        """Return the function that runs a block eagerly and checkpointed."""
        if self.memory.checkpointing == "full":
            return _summed_by_block(self._full(run_block))
        if self.memory.checkpointing == "selective":
            return _summed_by_block(checkpointing.selective_eager(run_block, self.memory.activation_budget))
        return _summed_by_block(run_block)

    def _full(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return checkpointing.full(run) if self.offload is None else self.offload.wrap(checkpointing.full(run))

    def keep_on_device(self, last_block: Block) -> None:
        """Leave the inputs of the last block on the device: backward needs them at once."""
        if self.offload is not None:
            self.offload.keep_on_device(last_block)

    def discard_offloaded(self) -> None:
        """Drop offloaded activations. Call it if no backward follows a forward."""
        if self.offload is not None:
            self.offload.drop_broken_step()


def _summed_by_block(run: Callable[..., Any]) -> Callable[..., Any]:
    """Add the gradients of an input inside a block before they join those of other blocks.

    Compiled and swapped blocks do so in any case. A modulation vector that all blocks share, and a double block reads
    twice, would otherwise get its gradients one by one, and the same terms in another order round to other bits.
    """

    def run_with_own_inputs(block: Block, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(block, *args)
        return run(block, *(arg.view_as(arg) if isinstance(arg, Tensor) and arg.requires_grad else arg for arg in args))

    return run_with_own_inputs
