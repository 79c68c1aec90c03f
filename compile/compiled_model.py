"""Compiled model: the blocks of a MODEL run compiled during each inference call.

The MODEL's modules stay unchanged: nothing is wrapped or replaced for longer than a call, so weight names, saving,
LoRAs, cloning and unloading work as without compiling.
"""

import itertools
import logging
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from comfy.patcher_extension import WrappersMP, get_all_wrappers
from torch import nn

from ..memory.comfy_compiler import without_comfy_compiler
from ..memory.swap.forward import swapped_forward
from ..models.blocks import BlockOfModel, block_lists, find_blocks
from ..models.transformer_options import carries_code
from .calls import (
    call_block,
    call_model,
    call_stack,
    entry_of,
    run_forward,
    run_model,
    set_temporarily,
)
from .compile_report import CompileReport
from .cuda_graphs import no_cuda_graphs
from .region import Region, signature
from .settings import CompileOptions, CompileSettings
from .stack import BlockWiring, StackModule, WiringTracer, run_stack
from .weights import keep_flags_on_modules, leave_inference_mode, opaque_patches

log = logging.getLogger(__name__)

_numbers = itertools.count(1)


class CompiledModel:
    """One model compiled with one set of settings.

    Clones of the MODEL share it, and so do Compile Model nodes of equal settings.
    """

    def __init__(self, settings: CompileSettings, base: Any, device: torch.device):
        """base: ComfyUI's BaseModel. Raises ValueError for an override that matches no block."""
        self.settings, self.device = settings, device
        self.base = weakref.ref(base)
        self.notes: list[str] = []
        self.observer: Callable[[str], None] | None = None
        self.regions: dict[Any, Region] = {}
        self._first_sizes: Any = None
        self._wiring: dict[str, BlockWiring | str] = {}
        self._read(base.diffusion_model)
        names = [block.name for block in self.blocks]
        for note in settings.ignored(names, device):
            self.note(note)
        for options in settings.distinct_options(names):
            self._feasible(options)  # for its note, before anything is sampled
        if not self.blocks and settings.scope != "model":
            self.note(
                f"No repeated blocks were found in {type(self.model).__name__}, so nothing is compiled; choose scope "
                "model."
            )

    def _read(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = find_blocks(model)
        self.lists = block_lists(model, self.blocks)
        # Includes their parent modules: a whole list may be replaced.
        names = (block.name.split(".") for block in self.blocks)
        paths = dict.fromkeys(".".join(parts[:n]) for parts in names for n in range(1, len(parts) + 1))
        self._entries = [entry_of(model, path) for path in paths]
        weighted = [m for m in model.modules() if m._parameters]
        inside = {id(m) for block in self.blocks for m in block.module.modules()}
        self._weighted = weighted if self.settings.scope == "model" else [m for m in weighted if id(m) in inside]
        keep_flags_on_modules(model.modules())
        self._wiring.clear()

    def note(self, sentence: str) -> None:
        """Add a sentence for the user, once: to the log and to the observer that shows the node."""
        if sentence in self.notes:
            return
        self.notes.append(sentence)
        log.info(sentence)
        if self.observer is not None:
            self.observer(sentence)

    # Called by ComfyUI.

    def next_run(self, *_: Any) -> None:
        for region in self.regions.values():
            region.next_run()

    def apply_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap `BaseModel.apply_model(x, t, c_concat, c_crossattn, control, transformer_options, **conds)`."""
        base: Any = executor.class_obj
        original: Any = self.base()
        if original is not base:  # a copy on another GPU
            return compiled_model_for(base, self.settings, base.device).apply_model(executor, *args, **kwargs)
        model = base.diffusion_model
        if model is not self.model or any(modules.get(key) is not module for modules, key, module in self._entries):
            self._read(model)
        with ExitStack() as call:
            leave_inference_mode(self._weighted)
            call.enter_context(without_comfy_compiler(args, kwargs))
            call.enter_context(self._torch_settings(self._met_first(args, kwargs)))
            if base.lowvram_patch_counter:
                call.enter_context(opaque_patches(self._weighted))
            call.enter_context(self._in_place(model, args, kwargs))
            return executor(*args, **kwargs)

    def _met_first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if the sizes of this call are those of the first call."""
        sizes = signature((tuple(value for value in args if not isinstance(value, dict)), kwargs))
        if self._first_sizes is None:
            self._first_sizes = sizes
        return sizes == self._first_sizes

    @contextmanager
    def _torch_settings(self, first_sizes: bool) -> Iterator[None]:
        """Set torch's configuration during the call and for this thread only."""
        from torch.fx.experimental import _config

        regions = self.regions.values()
        if any(r.options.cuda_graphs() for r in regions) and self.device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        # Dynamic auto: the first sizes have a graph of their own, and all others share one. By default torch makes only
        # those sizes dynamic that it has seen change, which costs a graph for each thing that a user changes (the
        # width, the batch, the prompt) and for most pairs of them.
        changes: dict[str, bool] = {} if first_sizes else {"assume_static_by_default": False}
        # With dynamic sizes each float is an input of the graph, a norm's epsilon too, which torch finds to be useless
        # only at the end and then traces everything again. A float that does change becomes an input from the fifth
        # graph on.
        if all(len(r.report.events) < 4 for r in regions):
            changes["specialize_float"] = True
        # Equal sizes must not tie two dimensions to one symbol: a batch of 2 would be tied to RoPE's 2x2, and 3072
        # tokens to a width of 3072.
        with _config.patch(use_duck_shape=False), torch._dynamo.config.patch(changes):  # type: ignore[attr-defined]
            yield

    # Placement of compiled code.

    @contextmanager
    def _in_place(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        # Another wrapper may pass them by keyword.
        control = args[4] if len(args) > 4 else kwargs.get("control")
        transformer_options = args[5] if len(args) > 5 else kwargs.get("transformer_options", {})
        scope = self.settings.scope
        if scope == "stack" and (reason := self._no_stack(control, transformer_options, kwargs)):
            self.note(f"scope stack: this run compiles block by block, because {reason}.")
            scope = "blocks"
        streams = any(swapped_forward(block.module) for block in self.blocks)
        if scope != "blocks" and streams:
            self.note(f"scope {scope}: blocks are compiled one by one, because some stream from RAM (block swap).")
            scope = "blocks"
        with ExitStack() as placed:
            if scope != "model" or not self._place_model(placed, model):
                stacked = self._place_stacks(placed, model) if scope == "stack" else set()
                for block in self.blocks:
                    if block.name not in stacked:
                        self._place_block(placed, block, streams)
            yield

    @staticmethod
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

    def _place_block(self, placed: ExitStack, block: BlockOfModel, streams: bool) -> None:
        requested = self.settings.options_for(block.name)
        if requested is None:
            return
        options = self._feasible(requested, streams)
        swapped = swapped_forward(block.module)
        if swapped is not None and swapped.inner is None:
            # The weights are swapped under it: the block in its slot is compiled like any other.
            set_temporarily(placed, swapped, "run", partial(call_block, self._region(block.kind, run_forward, options)))
            return
        if "forward" in vars(block.module):
            self.note(f"{block.name} and similar blocks run uncompiled, because another node replaced their forward.")
            return
        region = self._region(block.kind, run_forward, options)
        set_temporarily(placed, block.module, "forward", partial(call_block, region, block.module))

    def _feasible(self, options: CompileOptions, streams: bool = False) -> CompileOptions:
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
        self.note(
            f"{setting}: {subject} compiled without CUDA graphs (backend {instead.backend}, mode {instead.mode}), "
            f"because {reason}."
        )
        return instead

    def _place_model(self, placed: ExitStack, model: nn.Module) -> bool:
        name = "_forward" if hasattr(type(model), "_forward") else "forward"
        if name in vars(model):
            self.note("scope model: blocks are compiled instead, because another node replaced the model's forward.")
            return False
        region = self._region(f"{type(model).__name__}:model", run_model, self._feasible(self.settings.options()))
        set_temporarily(placed, model, name, partial(call_model, region, model))
        return True

    def _place_stacks(self, placed: ExitStack, model: nn.Module) -> set[str]:
        """Replace each list that is known to run as one region by a stack, and trace the others eagerly.

        Returns the names of the blocks that this covers.
        """
        provided: set[str] = set()
        for name, blocks in self.lists.items():
            block_options = {self.settings.options_for(block.name) for block in blocks}
            options = next(iter(block_options))
            wiring = self._wiring.get(name)
            if len(block_options) > 1:
                self.note(
                    f"scope stack: {name} is compiled block by block, because overrides give its blocks different "
                    "settings."
                )
            elif options is None or isinstance(wiring, str):
                continue
            elif any("forward" in vars(block.module) for block in blocks):
                self.note(f"scope stack: {name} is compiled block by block, because another node replaced a forward.")
            elif wiring is None:
                self._trace_wiring(placed, name, blocks)
                provided |= {block.name for block in blocks}
            else:
                kinds = "+".join(dict.fromkeys(block.kind for block in blocks))
                region = self._region(f"{name}:{kinds}", run_stack, self._feasible(options))
                members = tuple(block.module for block in blocks)
                stack = StackModule(partial(call_stack, region, members, wiring))
                modules, key, original = entry_of(model, name)
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
                self.note(f"scope stack: {name} is compiled block by block, because {wiring}.")

        placed.push(learn)
        for block in blocks:
            set_temporarily(placed, block.module, "forward", partial(traced, block.module))

    def _region(self, key: str, body: Callable[..., Any], options: CompileOptions) -> Region:
        region = self.regions.get((key, options))
        if region is None:
            label = self._label(key.partition(":")[0], options)
            # The number distinguishes compiled models: torch remembers by name which sizes have varied, and would make
            # the first graph of a new model dynamic at once.
            name = re.sub(r"\W", "_", f"run_{label}_{next(_numbers)}")
            region = self.regions[key, options] = Region(name, label, body, options, self.note, self.device)
        return region

    def _label(self, kind: str, options: CompileOptions) -> str:
        """Return a region's label in the report; several regions of one name are numbered."""
        titles = [region.report.label for region in self.regions.values()]
        count = sum(label.partition(" ")[0] == kind for label in titles)
        return kind if not count else f"{kind} ({count + 1})"

    def report(self) -> CompileReport:
        settings = self.settings
        heading = (
            f"Compile Model: backend {settings.backend}, mode {settings.mode}, dynamic {settings.dynamic}, "
            f"scope {settings.scope}, {len(self.blocks)} blocks of {len({block.kind for block in self.blocks})} kinds"
        )
        return CompileReport(heading, [region.report for region in self.regions.values()], list(self.notes))


_compiled_models: "WeakKeyDictionary[nn.Module, dict[CompileSettings, CompiledModel]]" = WeakKeyDictionary()


def compiled_model_for(base: nn.Module, settings: CompileSettings, device: torch.device) -> CompiledModel:
    """Return the compiled model of this base and these settings.

    It is cached with the base: the same settings find their graphs again, even if a LoRA in front of the node has
    changed and the node runs again.
    """
    by_settings = _compiled_models.setdefault(base, {})
    if settings not in by_settings:
        by_settings[settings] = CompiledModel(settings, base, device)
    return by_settings[settings]


def forget_compiled_model(compiled_model: CompiledModel) -> None:
    """Drop a compiled model from the cache; its graphs are freed with the last MODEL that uses it."""
    if (base := compiled_model.base()) is not None:
        _compiled_models.get(base, {}).pop(compiled_model.settings, None)
