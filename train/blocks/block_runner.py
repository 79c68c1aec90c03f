"""Block runner: runs a block compiled or eagerly, with the checkpointing of the memory options."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ...compile.compile_report import CompileReport, RegionReport
from ...compile.region import CompileFailed, cannot_compile, graph_break, over_the_limit
from ...compile.settings import CompileSettings
from ...models.family import Block
from ..config.settings import MemoryOptions
from .block_clock import BlockClock
from .checkpointed import BlockCheckpointing
from .region import BlockRegion, CompileRules, RegionKey

log = logging.getLogger(__name__)


class BlockRunner:
    """Callable that runs a block on its inputs.

    rules: compile options of each block.
    checkpointing: recomputes and offloads the blocks' activations.
    regions: the regions of the run; each compiles one graph for each planned (token count, text length) pair.
    planned_graphs: number of graphs that the compiled regions need for all pairs.
    not_compiled: reason why nothing could be compiled, None otherwise.
    failed: cause by label of each region that could not be compiled and runs uncompiled.
    clock: times the compiled blocks while it is set.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, Block]],
        memory: MemoryOptions,
        compile_settings: CompileSettings | None,
        graphs: int,
        device: torch.device,
    ):
        """graphs: number of planned (token count, text length) pairs."""
        self.rules = CompileRules(compile_settings, graphs)
        self.checkpointing = BlockCheckpointing(memory, device)
        self.regions: dict[RegionKey, BlockRegion] = {}
        for name, block in blocks:
            if (key := self.rules.region_key(name, block)) not in self.regions:
                self.regions[key] = BlockRegion(key, block, memory.quantize, self.checkpointing.eager())
        self.set_blocks(blocks)
        self.not_compiled: str | None = None
        self.failed: dict[str, str] = {}
        self.clock: BlockClock | None = None
        self.report = CompileReport("Train LoRA", [])
        self.backward: RegionReport | None = None
        self.planned_graphs = 0
        if compile_settings is not None:
            self._compile(compile_settings, device)

    def _compile(self, compile_settings: CompileSettings, device: torch.device) -> None:
        compile_options = self.rules.static(compile_settings.options())
        compiler = f"backend {compile_options.backend}, mode {compile_options.mode}"
        self.report = replace(self.report, heading=f"Train LoRA: {compiler}, block by block, static shapes")
        try:
            for number, region in enumerate(self.regions.values()):
                if (report := region.compile(number, device, self.checkpointing.compiled)) is not None:
                    self.report.regions.append(report)
        except RuntimeError as error:  # torch refuses to compile at all on some builds of Python
            self.not_compiled = str(error).strip().splitlines()[0]
        self.planned_graphs = sum(report.options.limit for report in self.report.regions)
        # AOTAutograd compiles a backward at its first run and does not say which region it belongs to.
        self.backward = RegionReport("backward", "backward of all", compile_options)
        self.report.regions.append(self.backward)

    def set_blocks(self, blocks: Sequence[tuple[str, Block]]) -> None:
        """Replace the blocks by others with the same regions, for which the graphs stay valid."""
        key_of = {id(block): self.rules.region_key(name, block) for name, block in blocks}
        assert set(key_of.values()) == self.regions.keys()
        self._region_by_id = {block: self.regions[key] for block, key in key_of.items()}  # by the block's id
        self.checkpointing.keep_on_device(blocks[-1][1])

    def time_blocks(self, clock: BlockClock | None) -> None:
        """Time the compiled blocks from now on, or no longer."""
        self.clock = clock

    def progress_text(self) -> str:
        """Describe the next step for a progress display."""
        compiles = self.planned_graphs and not self.report.counts().graphs
        return "Training; the first step compiles and takes longer" if compiles else "Training"

    def watch_backward(self) -> AbstractContextManager[Any]:
        """Return a context for each backward, which reports the graphs that it compiles."""
        return nullcontext() if self.backward is None else self.backward.watch(is_backward=True)

    def __call__(self, block: Block, *args: Any) -> Any:
        region = self._region_by_id[id(block)]
        report = region.report
        if report is None:
            return region.run(block, *args)
        try:
            if self.clock is None:
                return region.run(block, *args)
            with self.clock.time(region.structure, report, args):
                return region.run(block, *args)
        except Exception as error:
            cause = cannot_compile(error)
            if cause is None and not block.shapes_known and over_the_limit(error):
                cause = "its shapes differ from call to call."
            if cause is None:
                raise
            self._end_compiled(region, report, cause, error)
        # Outside the handler: inside it the exception's frames still hold the tensors of the failed call.
        return region.run(block, *args)

    def _end_compiled(self, region: BlockRegion, report: RegionReport, cause: str, error: Exception) -> None:
        """Run the blocks of this region eager from now on. Raises CompileFailed for a graph break under fullgraph."""
        broken = graph_break(error, report.events[-1] if report.events else None)
        if broken is not None and report.options.fullgraph:
            raise CompileFailed(
                f"fullgraph is on, but {report.label} blocks can't be compiled as one graph: {broken} Switch "
                "fullgraph off on Compile Model."
            ) from error
        log.debug("%s", report.label, exc_info=error)
        report.drop_failed_call()
        self._run_eager(region, report, broken or cause)

    def leave_eager(self, block: Block, cause: str) -> None:
        """Run the blocks of this block's region eager from now on."""
        region = self._region_by_id[id(block)]
        if region.report is not None:
            self._run_eager(region, region.report, cause)

    def _run_eager(self, region: BlockRegion, report: RegionReport, cause: str) -> None:
        region.leave_compiled(report)
        self.failed[report.label] = cause
        self.planned_graphs -= report.options.limit

    def fall_back_to_eager(self) -> None:
        """Run every block uncompiled from now on."""
        self.planned_graphs = 0
        for region in self.regions.values():
            region.run_eager()
