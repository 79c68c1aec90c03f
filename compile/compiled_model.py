"""Compiled model: the blocks of a MODEL run compiled during each inference call.

The MODEL's modules stay unchanged: nothing is wrapped or replaced for longer than a call, so weight names, saving,
LoRAs, cloning and unloading work as without compiling.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..common.notes import Notes
from ..common.text import quantity
from ..memory.comfy_compiler import without_comfy_compiler
from .code_placement import CodePlacement
from .compile_report import CompileReport
from .model_blocks import ModelBlocks, read_blocks
from .region import RegionTable, signature
from .settings import CompileSettings
from .weights import leave_inference_mode, opaque_patches


class CompiledModel:
    """One model compiled with one set of settings.

    Clones of the MODEL share it, and so do Compile Model nodes of equal settings.

    base: ComfyUI's BaseModel.
    notes: sentences for the user.
    regions: what is compiled.
    placement: puts it into the model.
    layout: blocks of the model as it was at the last call.
    """

    def __init__(self, settings: CompileSettings, base: Any, device: torch.device):
        """Raises ValueError for an override that matches no block."""
        self.settings, self.device = settings, device
        self.base = weakref.ref(base)
        self.notes = Notes()
        self.regions = RegionTable(self.notes.add, device)
        self.placement = CodePlacement(settings, device, self.notes, self.regions)
        self._first_sizes: Any = None
        self.layout = self._read(base.diffusion_model)
        names = [block.name for block in self.layout.blocks]
        for note in settings.ignored(names, device):
            self.notes.add(note)
        for options in settings.distinct_options(names):
            self.placement.feasible(options)  # for its note, before anything is sampled
        if not names and settings.scope != "model":
            self.notes.add(
                f"No repeated blocks were found in {type(self.layout.model).__name__}, so nothing is compiled; choose "
                "scope model."
            )

    def _read(self, model: nn.Module) -> ModelBlocks:
        self.placement.forget_wiring()
        return read_blocks(model, whole_model=self.settings.scope == "model")

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
        if not self.layout.is_current(base.diffusion_model):
            self.layout = self._read(base.diffusion_model)
        weighted = self.layout.weighted
        with ExitStack() as call:
            leave_inference_mode(weighted)
            call.enter_context(without_comfy_compiler(args, kwargs))
            call.enter_context(self._torch_settings(self._met_first(args, kwargs)))
            if base.lowvram_patch_counter:
                call.enter_context(opaque_patches(weighted))
            call.enter_context(self.placement.in_place(self.layout, args, kwargs))
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

    def report(self) -> CompileReport:
        settings, blocks = self.settings, self.layout.blocks
        kinds = {block.kind for block in blocks}
        heading = (
            f"Compile Model: backend {settings.backend}, mode {settings.mode}, dynamic {settings.dynamic}, "
            f"scope {settings.scope}, {quantity(len(blocks), 'block')} of {quantity(len(kinds), 'kind')}"
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
