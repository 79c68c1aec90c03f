"""Block runner: runs a block compiled or eagerly, with the checkpointing of the memory options."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...compile.region import block_regions, compiled_function, run_block
from ...compile.report.report import CompileReport, RegionReport
from ...compile.settings import CompileSettings, HowToCompile
from ...memory.activations import checkpointing
from ...memory.activations.offload import ActivationOffload
from ...models.family import Block
from ..settings import MemoryOptions


class BlockRunner:
    """Callable that runs a block on its inputs.

    graphs: number of planned (token count, text length) pairs; each compiles one graph per region.
    not_compiled: reason why nothing could be compiled, None otherwise.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, Block]],
        memory: MemoryOptions,
        compile_settings: CompileSettings | None,
        graphs: int,
        device: torch.device,
    ):
        self.memory, self.compile_settings, self.device = memory, compile_settings, device
        self.regions = block_regions(blocks)
        self.planned_graphs = len(self.regions) * graphs if compile_settings else 0
        self.offload: ActivationOffload | None = None
        if memory.offload_activations and memory.checkpointing == "full":
            self.offload = ActivationOffload(device)
        self.set_blocks(blocks)
        self._run = {region: self._eager() for region in self.regions}
        self.not_compiled: str | None = None
        self.report = CompileReport("Train LoRA", [])
        self.backward: RegionReport | None = None
        if compile_settings is None:
            return
        # Static shapes and full graphs: every shape of the data is known before training.
        how = HowToCompile(compile_settings.backend, compile_settings.mode, "false", True, graphs)
        self.report.heading = f"Train LoRA: backend {how.backend}, mode {how.mode}, block by block, static shapes"
        try:
            for number, region in enumerate(self.regions):
                kind = region.partition(":")[0]
                report = RegionReport(f"run_{kind}_{number}", f"{kind}, LoRA {number + 1}", how)
                compiled = compiled_function(run_block, report.name, how)
                self.report.regions.append(report)
                self._run[region] = self._with_checkpointing(_watched(compiled, report, device))
        except RuntimeError as error:  # torch refuses to compile at all on some builds of Python
            self.not_compiled = str(error).strip().splitlines()[0]
        # AOTAutograd compiles a backward at its first run and does not tell to which region it belongs.
        self.backward = RegionReport("backward", "backward of all", how)
        self.report.regions.append(self.backward)

    def _with_checkpointing(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        if self.memory.checkpointing == "full":
            return self._full(compiled)
        if self.memory.checkpointing == "selective":
            return checkpointing.selective_compiled(compiled, self.memory.activation_budget)
        return compiled

    def _eager(self) -> Callable[..., Any]:
        if self.memory.checkpointing == "full":
            return self._full(run_block)
        if self.memory.checkpointing == "selective":
            return checkpointing.selective_eager(run_block, self.memory.activation_budget)
        return run_block

    def _full(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return checkpointing.full(run) if self.offload is None else self.offload.wrap(checkpointing.full(run))

    def set_blocks(self, blocks: Sequence[tuple[str, Block]]) -> None:
        """Replace the blocks by others with the same structures, for which the graphs stay valid."""
        self._structure = {id(block): block.structure() for _, block in blocks}
        assert set(self._structure.values()) == set(self.regions)
        if self.offload is not None:
            self.offload.keep_on_device(blocks[-1][1])

    def discard_offloaded(self) -> None:
        """Drop offloaded activations. Call it where no backward follows a forward."""
        if self.offload is not None:
            self.offload.forget()

    def fall_back_to_eager(self) -> None:
        """Run every block uncompiled from now on."""
        self.planned_graphs = 0
        self._run = {region: self._eager() for region in self.regions}

    def watch_backward(self) -> AbstractContextManager[Any]:
        """Return a context for each backward, which reports the graphs that it compiles."""
        return nullcontext() if self.backward is None else self.backward.watch()

    def __call__(self, block: Block, *args: Any) -> Any:
        return self._run[self._structure[id(block)]](block, *args)


def _watched(compiled: Callable[..., Any], report: RegionReport, device: torch.device) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        report.compiled_calls += 1
        with report.watch(device):
            return compiled(*args)

    return run
