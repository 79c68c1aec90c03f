"""Runs one block as the run's settings ask: compiled or eager, with its activations kept or computed again."""

from collections.abc import Callable, Sequence
from typing import Any

from ..compile.apply import CompileSettings, compile_region
from ..compile.regions import block_regions, run_block
from ..memory import checkpointing
from ..models.family import Block
from .options import MemoryOptions


class BlockRunner:
    """Call it with a block and its inputs. `graphs` is how many (token count, text length) pairs are planned;
    `not_compiled` says why nothing could be compiled, where that is so."""

    def __init__(
        self,
        blocks: Sequence[tuple[str, Block]],
        memory: MemoryOptions,
        compile_settings: CompileSettings | None,
        graphs: int,
    ):
        self.memory = memory
        self.compile_settings = compile_settings
        self.regions = block_regions(blocks)
        self.planned_graphs = len(self.regions) * graphs if compile_settings else 0
        self._structure = {id(block): block.structure() for _, block in blocks}
        self._run = {region: self._eager() for region in self.regions}
        self.not_compiled: str | None = None
        if compile_settings is None:
            return
        try:
            for number, region in enumerate(self.regions):
                compiled = compile_region(f"{region.partition(':')[0]}_{number}", compile_settings, graphs)
                self._run[region] = self._with_checkpointing(compiled)
        except RuntimeError as error:  # torch refuses to compile at all on some builds of Python
            self.not_compiled = str(error).strip().splitlines()[0]

    def _with_checkpointing(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        if self.memory.checkpointing == "full":
            return checkpointing.full(compiled)
        if self.memory.checkpointing == "selective":
            return checkpointing.selective_compiled(compiled, self.memory.activation_budget)
        return compiled

    def _eager(self) -> Callable[..., Any]:
        if self.memory.checkpointing == "full":
            return checkpointing.full(run_block)
        if self.memory.checkpointing == "selective":
            return checkpointing.selective_eager(run_block, self.memory.activation_budget)
        return run_block

    def fall_back_to_eager(self) -> None:
        """From here on every block runs uncompiled."""
        self.planned_graphs = 0
        self._run = {region: self._eager() for region in self.regions}

    def __call__(self, block: Block, *args: Any) -> Any:
        return self._run[self._structure[id(block)]](block, *args)
