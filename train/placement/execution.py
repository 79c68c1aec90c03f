"""Execution of a placed model's blocks: on the device, by a block runner, with the dropout of the LoRA."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...compile.settings import CompileSettings
from ...lora.network import LoraNetwork
from ...models.adapters.base import DropMask
from ...models.family import Block, ModelInputs, RunBlock
from ..blocks.block_runner import BlockRunner
from ..blocks.graph_count import count_graphs
from ..config.settings import MemoryOptions
from ..preflight.context import RunContext
from . import auto
from .weights import PlacedWeights


class BlockExecution:
    """Runs the blocks of a placed model.

    runner: runs a block whose weights are on the device; another one after a change of checkpointing or matmuls.
    compile_settings: those of the blocks; None runs all of them eagerly.
    graphs: number of planned (token count, text length) pairs.
    eager_blocks: names of blocks that must not be compiled, with the reason.
    """

    def __init__(self, context: RunContext, weights: PlacedWeights, network: LoraNetwork, memory: MemoryOptions):
        self.weights, self.network = weights, network
        self.seed, self.share = context.device_settings.seed, context.share
        self.compile_settings = context.compile_settings
        self.graphs = count_graphs(context.all_data, context.family, context.device_settings)
        self.eager_blocks: dict[str, str] = {}
        self.runner = self._make_runner(memory, self.compile_settings)

    def _make_runner(self, memory: MemoryOptions, compile_settings: CompileSettings | None) -> BlockRunner:
        blocks, device = self.weights.transformer.blocks(), self.weights.device
        return BlockRunner(blocks, memory, compile_settings, self.graphs, device)

    def place(self, memory: MemoryOptions) -> None:
        """Run the blocks that were placed again; the graphs are kept unless checkpointing changes."""
        if auto.choice_facts(self.runner.checkpointing.memory) == auto.choice_facts(memory):
            self.runner.set_blocks(self.weights.transformer.blocks())
        else:
            self.renew(memory)

    def renew(self, memory: MemoryOptions) -> None:
        """Take another runner, whose graphs are compiled again."""
        self.runner = self._make_runner(memory, self.compile_settings)
        self._run_eager_blocks()

    @contextmanager
    def eager(self, memory: MemoryOptions) -> Iterator[None]:
        """Run all blocks eagerly and fully checkpointed in this context."""
        runner = self.runner
        self.runner = self._make_runner(replace(memory, checkpointing="full"), None)
        try:
            yield
        finally:
            self.runner.checkpointing.discard_offloaded()
            self.runner = runner

    def fall_back_to_eager(self) -> None:
        """Run all blocks uncompiled from now on."""
        self.runner.fall_back_to_eager()
        self.compile_settings = None

    def leave_eager(self, reasons: Mapping[str, str]) -> None:
        """Run some blocks uncompiled from now on. reasons: by their names."""
        self.eager_blocks |= reasons
        self._run_eager_blocks()

    def _run_eager_blocks(self) -> None:
        for name, block in self.weights.transformer.blocks():
            if name in self.eager_blocks:
                self.runner.leave_eager(block, self.eager_blocks[name])

    def run_block(self, inputs: ModelInputs, rng_key: tuple[int | str, ...] | None) -> RunBlock:
        """Return the function that runs a block of one forward.

        rng_key: (step, micro-batch, …), key of the dropout masks; None turns dropout off, in the same graphs.
        """
        drops = self.network.options.drops
        blocks = self.weights.transformer.blocks() if drops else ()
        block_index = {id(block): index for index, (_, block) in enumerate(blocks)}

        def sample_masks(block: Block) -> dict[str, DropMask]:
            key = ("dropout", *(rng_key or (0, 0)), block_index[id(block)])
            part = self.share.part, self.share.parts
            masks = self.network.sample_masks(block, inputs, self.seed, key, self.weights.dtype, part)
            return masks if rng_key is not None else {name: mask.without_drops() for name, mask in masks.items()}

        def run(block: Block, *args: torch.Tensor) -> object:
            masks = sample_masks(block) if drops else {}
            return self.weights.on_device(self.runner, block, *args, masks)

        return run
