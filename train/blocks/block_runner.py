"""Block runner: runs a block compiled or eagerly, with the checkpointing of the memory options."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compile.region import (
    CompileFailed,
    TooManyGraphs,
    cannot_compile,
    compiled_function,
    graph_break,
    limits_each_region,
    over_the_limit,
    run_block,
)
from ...compile.report.report import CompileReport, RegionReport
from ...compile.settings import CompileOptions, CompileSettings
from ...memory.activations import checkpointing
from ...memory.activations.offload import ActivationOffload
from ...memory.low_bit.matmul import FULL
from ...memory.low_bit.quantize import AS_STORED
from ...models.family import Block
from ...models.layers.lora_linear import LoraLinear
from ..settings import MemoryOptions
from .block_clock import BlockClock

log = logging.getLogger(__name__)

# A region: the structure that its blocks share, and how they are compiled; None is eager.
RegionKey = tuple[str, CompileOptions | None]


class _Blocks:
    """Blocks of one region: the function that runs them, and its report if it is compiled.

    low_bit: texts of quantize and low-precision matmuls, those that are set.
    """

    def __init__(self, region: RegionKey, run: Callable[..., Any], low_bit: list[str]):
        self.structure, self.compile_options = region
        self.run, self.low_bit = run, low_bit
        self.report: RegionReport | None = None


def _low_bit(block: Block, quantize: str) -> list[str]:
    linears = (layer for layer in block.linears().values() if isinstance(layer, LoraLinear))
    precisions = {precision for linear in linears for precision in (linear.low_bit or ())[:2]} - {FULL}
    return [f"quantize {quantize}"] * (quantize != AS_STORED) + [
        f"{precision} matmuls" for precision in sorted(precisions)
    ]


class BlockRunner:
    """Callable that runs a block on its inputs.

    graphs: number of planned (token count, text length) pairs; each compiles one graph per region.
    planned_graphs: number of graphs that the compiled regions need for all pairs.
    not_compiled: reason why nothing could be compiled, None otherwise.
    failed: cause by label of each region that could not be compiled and runs eager.
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
        self.memory, self.compile_settings, self.device, self.graphs = memory, compile_settings, device, graphs
        first: dict[RegionKey, Block] = {}
        for name, block in blocks:
            first.setdefault(self._region(name, block), block)
        self.regions = list(first)
        self.offload: ActivationOffload | None = None
        if memory.offload_activations and memory.checkpointing == "full":
            self.offload = ActivationOffload(device)
        self._blocks = {
            key: _Blocks(key, self._eager(), _low_bit(block, memory.quantize)) for key, block in first.items()
        }
        self.set_blocks(blocks)
        self.not_compiled: str | None = None
        self.failed: dict[str, str] = {}
        self.clock: BlockClock | None = None
        self.report = CompileReport("Train LoRA", [])
        self.backward: RegionReport | None = None
        self.planned_graphs = 0
        if compile_settings is None:
            return
        compile_options = self._trainer_options(compile_settings.options(), 1)
        self.report.heading = (
            f"Train LoRA: backend {compile_options.backend}, mode {compile_options.mode}, block by block, static shapes"
        )
        try:
            for number, group in enumerate(self._blocks.values()):
                self._compile(group, number)
        except RuntimeError as error:  # torch refuses to compile at all on some builds of Python
            self.not_compiled = str(error).strip().splitlines()[0]
        self.planned_graphs = sum(report.options.limit for report in self.report.regions)
        # AOTAutograd compiles a backward at its first run and does not say which region it belongs to.
        self.backward = RegionReport("backward", "backward of all", compile_options)
        self.report.regions.append(self.backward)

    def _trainer_options(self, compile_options: CompileOptions, shapes: int) -> CompileOptions:
        """Set the trainer's own arguments: every shape of the data is known before training, so each has its graph.

        No CUDA graphs: blocks of one kind share one callable, and a CUDA graph is bound to one block's weights.
        """
        return replace(compile_options.without_cuda_graphs(), dynamic="false", limit=self.graphs * shapes)

    def _region(self, name: str, block: Block) -> RegionKey:
        compile_options = self.compile_settings.options_for(name) if self.compile_settings else None
        return block.structure(), None if compile_options is None else self._trainer_options(
            compile_options, block.shapes
        )

    def _compile(self, group: _Blocks, number: int) -> None:
        if group.compile_options is None:
            return
        kind = group.structure.partition(":")[0]
        label = ", ".join((kind, f"LoRA {number + 1}", *group.low_bit))
        report = RegionReport(f"run_{kind}_{number}", label, group.compile_options)
        # Always fullgraph: a compile then fails before anything has run, so the call can be made eagerly.
        compiled = compiled_function(run_block, report.name, replace(group.compile_options, fullgraph=True))
        self.report.regions.append(report)
        group.report, group.run = report, self._with_checkpointing(_watched(compiled, report, self.device))

    def _with_checkpointing(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        if self.memory.checkpointing == "full":
            return self._full(compiled)
        if self.memory.checkpointing == "selective":
            return checkpointing.selective_compiled(compiled, self.memory.activation_budget)
        return compiled

    def _eager(self) -> Callable[..., Any]:
        if self.memory.checkpointing == "full":
            return _summed_by_block(self._full(run_block))
        if self.memory.checkpointing == "selective":
            return _summed_by_block(checkpointing.selective_eager(run_block, self.memory.activation_budget))
        return _summed_by_block(run_block)

    def _full(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return checkpointing.full(run) if self.offload is None else self.offload.wrap(checkpointing.full(run))

    def set_blocks(self, blocks: Sequence[tuple[str, Block]]) -> None:
        """Replace the blocks by others with the same regions, for which the graphs stay valid."""
        region_of = {id(block): self._region(name, block) for name, block in blocks}
        assert set(region_of.values()) == set(self.regions)
        self._blocks_by_id = {block: self._blocks[region] for block, region in region_of.items()}  # by the block's id
        if self.offload is not None:
            self.offload.keep_on_device(blocks[-1][1])

    def discard_offloaded(self) -> None:
        """Drop offloaded activations. Call it if no backward follows a forward."""
        if self.offload is not None:
            self.offload.drop_broken_step()

    def fall_back_to_eager(self) -> None:
        """Run every block uncompiled from now on."""
        self.planned_graphs = 0
        for group in self._blocks.values():
            group.report, group.run = None, self._eager()

    def time_blocks(self, clock: BlockClock | None) -> None:
        """Time the compiled blocks from now on, or no longer."""
        self.clock = clock

    def progress_text(self) -> str:
        """Describe the next step for a progress display."""
        compiles = self.planned_graphs and not self.report.counts().graphs
        return "Training; the first step compiles and takes longer" if compiles else "Training"

    def watch_backward(self) -> AbstractContextManager[Any]:
        """Return a context for each backward, which reports the graphs that it compiles."""
        return nullcontext() if self.backward is None else self.backward.watch()

    def __call__(self, block: Block, *args: Any) -> Any:
        group = self._blocks_by_id[id(block)]
        report = group.report
        if report is None:
            return group.run(block, *args)
        try:
            if self.clock is None:
                return group.run(block, *args)
            with self.clock.time(group.structure, report, args):
                return group.run(block, *args)
        except Exception as error:
            cause = cannot_compile(error)
            if cause is None and not block.shapes_known and over_the_limit(error):
                cause = "its shapes differ from call to call."
            if cause is None:
                raise
            self._leave_eager(group, report, cause, error)
        # Outside the handler: inside it the exception's frames still hold the tensors of the failed call.
        return group.run(block, *args)

    def _leave_eager(self, group: _Blocks, report: RegionReport, cause: str, error: Exception) -> None:
        """Run the blocks of this region eager from now on. Raises CompileFailed for a graph break under fullgraph."""
        broken = graph_break(error, report.events[-1] if report.events else None)
        if broken is not None and report.options.fullgraph:
            raise CompileFailed(
                f"fullgraph is on, but {report.label} blocks can't be compiled as one graph: {broken} Switch "
                "fullgraph off on Compile Model."
            ) from error
        log.debug("%s", report.label, exc_info=error)
        report.compiled_calls -= 1  # the one that failed
        self._run_eager(group, report, broken or cause)

    def leave_eager(self, block: Block, cause: str) -> None:
        """Run the blocks of this block's region eager from now on."""
        group = self._blocks_by_id[id(block)]
        if group.report is not None:
            self._run_eager(group, group.report, cause)

    def _run_eager(self, group: _Blocks, report: RegionReport, cause: str) -> None:
        group.report = None
        self.failed[report.label] = cause
        self.planned_graphs -= report.options.limit
        eager = self._eager()

        def counted(*args: Any) -> Any:
            report.eager_calls += 1
            return eager(*args)

        group.run = counted


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


def _watched(compiled: Callable[..., Any], report: RegionReport, device: torch.device) -> Callable[..., Any]:
    counts = not limits_each_region()

    def run(*args: Any) -> Any:
        report.compiled_calls += 1  # first: a recompute stops as soon as it has the tensors that it needs
        with report.watch(device) as record:
            out = compiled(*args)
        if counts and record.event is not None and sum(e.graphs for e in report.events) > report.options.limit:
            raise TooManyGraphs(f"{report.label} has more graphs than {report.options.limit}")
        return out

    return run
