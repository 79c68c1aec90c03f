"""Placement of compiled code in a MODEL's modules, during one inference call."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP, get_all_wrappers
from torch import nn

from ..common.notes import Notes
from ..memory.swap.forward import swapped_forward
from ..models.blocks import BlockOfModel
from ..models.transformer_options import carries_code
from .calls import call_block, call_model, call_stack, entry_of, run_forward, run_model, set_temporarily
from .cuda_graphs import no_cuda_graphs
from .model_blocks import ModelBlocks
from .region import RegionTable
from .settings import CompileOptions, CompileSettings
from .stack import BlockWiring, StackModule, WiringTracer, run_stack


class CodePlacement:
    """Puts compiled code in the place of blocks, of lists of blocks, or of the whole model, as the settings ask for.

    What can't run compiled runs eagerly, with a note.
    """

    def __init__(self, settings: CompileSettings, device: torch.device, notes: Notes, regions: RegionTable):
        self.settings = settings
        self.device = device
        self.notes = notes
        self.regions = regions
        self._wiring: dict[str, BlockWiring | str] = {}  # of each list; or why it has none, as the end of a sentence

    def forget_wiring(self) -> None:
        """Trace each stack again: the model's modules have changed."""
        self._wiring.clear()

    @contextmanager
    def in_place(self, layout: ModelBlocks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Have the model run compiled within the context. args, kwargs: those of the call of `apply_model`."""
        streams = any(swapped_forward(block.module) for block in layout.blocks)
        scope = self._scope(streams, args, kwargs)
        with ExitStack() as placed:
            if scope != "model" or not self._place_model(placed, layout.model):
                stacked = self._place_stacks(placed, layout) if scope == "stack" else set()
                for block in layout.blocks:
                    if block.name not in stacked:
                        self._place_block(placed, block, streams)
            yield

    def _scope(self, streams: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the scope that a call allows, with a note if it isn't that of the settings."""
        scope = self.settings.scope
        if scope == "stack":
            # Another wrapper may pass them by keyword.
            control = args[4] if len(args) > 4 else kwargs.get("control")
            transformer_options = args[5] if len(args) > 5 else kwargs.get("transformer_options", {})
            if reason := _no_stack(control, transformer_options, kwargs):
                self.notes.add(f"scope stack: this run compiles block by block, because {reason}.")
                return "blocks"
        if scope != "blocks" and streams:
            self.notes.add(f"scope {scope}: blocks are compiled one by one, because some stream from RAM (block swap).")
            return "blocks"
        return scope

    def feasible(self, options: CompileOptions, streams: bool = False) -> CompileOptions:
        """Drop CUDA graphs, with a note, if the allocator or block swap does not allow them.

        A CUDA graph replays on the weight addresses that it was recorded with. A streamed block has those of its slot,
        which other blocks use too and which change after each unload; the graphs' own pool takes memory that no plan
        counts. Resident blocks do without as well, as blocks of one kind share their graph.
        """
        reason = no_cuda_graphs(self.device) or ("some stream from RAM (block swap)" if streams else None)
        if reason is None or not options.cuda_graphs():
            return options
        setting = f"mode {options.mode}" if options.backend == "inductor" else f"backend {options.backend}"
        subject = "the model is" if self.settings.scope == "model" and not streams else "blocks are"
        instead = options.without_cuda_graphs()
        self.notes.add(
            f"{setting}: {subject} compiled without CUDA graphs (backend {instead.backend}, mode {instead.mode}), "
            f"because {reason}."
        )
        return instead

    def _place_block(self, placed: ExitStack, block: BlockOfModel, streams: bool) -> None:
        requested = self.settings.options_for(block.name)
        if requested is None:
            return
        options = self.feasible(requested, streams)
        swapped = swapped_forward(block.module)
        if swapped is not None and swapped.inner is None:
            # The weights are swapped under it: the block in its slot is compiled like any other.
            set_temporarily(
                placed, swapped, "run", partial(call_block, self.regions.region(block.kind, run_forward, options))
            )
            return
        if "forward" in vars(block.module):
            self.notes.add(
                f"{block.name} and similar blocks run uncompiled, because another node replaced their forward."
            )
            return
        region = self.regions.region(block.kind, run_forward, options)
        set_temporarily(placed, block.module, "forward", partial(call_block, region, block.module))

    def _place_model(self, placed: ExitStack, model: nn.Module) -> bool:
        name = "_forward" if hasattr(type(model), "_forward") else "forward"
        if name in vars(model):
            self.notes.add(
                "scope model: blocks are compiled instead, because another node replaced the model's forward."
            )
            return False
        region = self.regions.region(f"{type(model).__name__}:model", run_model, self.feasible(self.settings.options()))
        set_temporarily(placed, model, name, partial(call_model, region, model))
        return True

    def _place_stacks(self, placed: ExitStack, layout: ModelBlocks) -> set[str]:
        """Replace each list that is known to run as one region by a stack, and trace the others eagerly.

        Returns the names of the blocks that this covers.
        """
        provided: set[str] = set()
        for name, blocks in layout.lists.items():
            block_options = {self.settings.options_for(block.name) for block in blocks}
            options = next(iter(block_options))
            wiring = self._wiring.get(name)
            if len(block_options) > 1:
                self.notes.add(
                    f"scope stack: {name} is compiled block by block, because overrides give its blocks different "
                    "settings."
                )
            elif options is None or isinstance(wiring, str):
                continue
            elif any("forward" in vars(block.module) for block in blocks):
                self.notes.add(
                    f"scope stack: {name} is compiled block by block, because another node replaced a forward."
                )
            elif wiring is None:
                self._trace_wiring(placed, name, blocks)
                provided |= {block.name for block in blocks}
            else:
                kinds = "+".join(dict.fromkeys(block.kind for block in blocks))
                region = self.regions.region(f"{name}:{kinds}", run_stack, self.feasible(options))
                members = tuple(block.module for block in blocks)
                stack = StackModule(partial(call_stack, region, members, wiring))
                modules, key, original = entry_of(layout.model, name)
                modules[key] = nn.ModuleList([stack])
                placed.callback(modules.__setitem__, key, original)
                provided |= {block.name for block in blocks}
        return provided

    def _trace_wiring(self, placed: ExitStack, name: str, blocks: list[BlockOfModel]) -> None:
        """Run the blocks eagerly in this call, under a tracer that records their wiring."""
        tracer = WiringTracer([block.module for block in blocks])

        def traced(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tracer.before_block(block, args, kwargs)
            out = type(block).forward(block, *args, **kwargs)
            tracer.after_block(out)
            return out

        def learn(kind: type[BaseException] | None, *_: Any) -> None:
            if kind is not None:  # interrupted: the trace is incomplete
                return
            wiring = self._wiring[name] = tracer.wiring()
            if isinstance(wiring, str):
                self.notes.add(f"scope stack: {name} is compiled block by block, because {wiring}.")

        placed.push(learn)
        for block in blocks:
            set_temporarily(placed, block.module, "forward", partial(traced, block.module))


def _no_stack(control: Any, transformer_options: dict[str, Any], conds: dict[str, Any]) -> str | None:
    if control is not None:
        return "a ControlNet adds to the blocks' results"
    if "vace_context" in conds:
        return "VACE adds to the blocks' results"
    if transformer_options.get("patches_replace"):
        return "another node replaces blocks"
    if carries_code(transformer_options):
        return "another node patches the model"
    if get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options):
        return "another node's wrapper runs inside the model"
    return None
