"""Regions of a run: blocks of one structure, which share a compiled function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...compile.compile_report import RegionReport
from ...compile.region import TooManyGraphs, compiled_function, limits_each_region, run_block
from ...compile.settings import CompileOptions, CompileSettings
from ...memory.low_bit.matmul import FULL
from ...memory.low_bit.quantize import AS_STORED
from ...models.family import Block
from ...models.layers.lora_linear import LoraLinear

# Structure that the blocks of a region share, and how they are compiled; None is eager.
RegionKey = tuple[str, CompileOptions | None]


@dataclass(frozen=True)
class CompileRules:
    """Compile options of each block of a run.

    settings: compile settings of the run; None runs all blocks eagerly.
    graphs: number of planned (token count, text length) pairs; each compiles one graph per region.
    """

    settings: CompileSettings | None
    graphs: int

    def region_key(self, name: str, block: Block) -> RegionKey:
        """Return the region that the block of this name belongs to."""
        options = self.settings.options_for(name) if self.settings else None
        return block.structure(), None if options is None else self.static(options, block.shapes)

    def static(self, options: CompileOptions, shapes: int = 1) -> CompileOptions:
        """Set the trainer's own arguments: every shape of the data is known before training, so each has its graph.

        No CUDA graphs: blocks of one kind share one callable, and a CUDA graph is bound to one block's weights.
        """
        return replace(options.without_cuda_graphs(), dynamic="false", limit=self.graphs * shapes)


class BlockRegion:
    """Blocks of one region: the function that runs them, and its report if it is compiled.

    low_bit: texts of quantize and low-precision matmuls, those that are set.
    """

    def __init__(self, key: RegionKey, block: Block, quantize: str, eager: Callable[..., Any]):
        """block: one of its blocks. quantize: format of Training Memory. eager: runs a block uncompiled."""
        self.structure, self.compile_options = key
        self.low_bit = _low_bit(block, quantize)
        self.eager = self.run = eager
        self.report: RegionReport | None = None

    def compile(
        self, number: int, device: torch.device, checkpointed: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> RegionReport | None:
        """Run the blocks compiled from now on. Returns the report; None if the options leave them eager.

        number: of the region in the run.
        checkpointed: checkpoints the compiled function.
        """
        if self.compile_options is None:
            return None
        kind = self.structure.partition(":")[0]
        label = ", ".join((kind, f"LoRA {number + 1}", *self.low_bit))
        report = RegionReport(f"run_{kind}_{number}", label, self.compile_options)
        # Always fullgraph: a compile then fails before anything has run, so the call can be made eagerly.
        compiled = compiled_function(run_block, report.name, replace(self.compile_options, fullgraph=True))
        self.report, self.run = report, checkpointed(_watched(compiled, report, device))
        return report

    def run_eager(self) -> None:
        """Run the blocks eagerly from now on."""
        self.report, self.run = None, self.eager

    def leave_compiled(self, report: RegionReport) -> None:
        """Run the blocks eagerly from now on, and count their calls in the report of the compiled ones."""
        eager, self.report = self.eager, None

        def counted(*args: Any) -> Any:
            report.count_eager_call()
            return eager(*args)

        self.run = counted


def _low_bit(block: Block, quantize: str) -> list[str]:
    linears = (layer for layer in block.linears().values() if isinstance(layer, LoraLinear))
    precisions = {precision for linear in linears for precision in (linear.low_bit or ())[:2]} - {FULL}
    return [f"quantize {quantize}"] * (quantize != AS_STORED) + [
        f"{precision} matmuls" for precision in sorted(precisions)
    ]


def _watched(compiled: Callable[..., Any], report: RegionReport, device: torch.device) -> Callable[..., Any]:
    counts = not limits_each_region()

    def run(*args: Any) -> Any:
        with report.watch(device) as record:
            out = compiled(*args)
        if counts and record.event is not None and sum(e.graphs for e in report.events) > report.options.limit:
            raise TooManyGraphs(f"{report.label} has more graphs than {report.options.limit}")
        return out

    return run
