"""ComfyUI's own forward as a transformer of the trainer: ComfyUI owns the loop, and hooks run its blocks in the
trainer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....common.text import quoted
from ....memory.comfy_compiler import without_comfy_compiler
from ....memory.weights.residency import FrozenModule
from ...blocks import BlockOfModel, list_of
from ...family import ModelInputs, RunBlock
from ...layers.attention import Attention
from ...layers.lora_linear import LoraLayer
from ..comfyui.entries import entries_of, hook_block
from ..comfyui.refusals import OF_CORE, cause_of, is_of_core, refusal
from .blocks import NativeBlock, varying_attributes
from .calls import BlockCalls, RunCall
from .inputs import NativeGroup, NativeInputs, patchify
from .kernels import kernel_that_raised, training_kernels
from .precision import cast_buffers, dtype_told
from .shadow import Shadow, restore


@dataclass
class ForwardRecord:
    """Facts that the forwards of a run have shown. A rebuilt transformer shares it, so that it matches its graphs.

    results: the structure of a method's return value, by block and method.
    streams: indices of the tensors that come from the previous block, by structure.
    apart: whether the samples of a batch run one by one, since they influence each other.
    """

    results: dict[tuple[str, str], Any] = field(default_factory=dict)
    streams: dict[str, set[int]] = field(default_factory=dict)
    apart: bool = False

    def separate(self) -> None:
        """Run the samples of a batch one by one from here on."""
        self.apart = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the samples of a batch in one forward within the context."""
        apart, self.apart = self.apart, False
        try:
            yield
        finally:
            self.apart = apart


class NativeTransformer:
    """title: of the model, for messages; blocks: of the MODEL, by their swap names; record: of the run; calls: the
    blocks, as ComfyUI's forward calls them."""

    def __init__(
        self,
        title: str,
        shadow: Shadow,
        blocks: Mapping[str, BlockOfModel],
        attention: Attention,
        dtype: torch.dtype,
        record: ForwardRecord,
    ):
        self.title = title
        self.shadow = shadow
        self.attention = attention
        self.dtype = dtype
        self.record = record
        self.calls = _hooked(shadow, blocks, record)
        self._compute_dtype = dtype  # another dtype during a check
        self._ran = False
        self._clean = shadow.state()

    @property
    def is_in_fp32(self) -> bool:
        """Return whether it runs `in_fp32`, and the run in another dtype."""
        return self._compute_dtype != self.dtype

    def blocks(self) -> list[tuple[str, NativeBlock]]:
        return list(self.calls.blocks.items())

    def linears(self) -> dict[str, LoraLayer]:
        return dict(self.shadow.layers)

    def frozen_modules(self) -> list[FrozenModule]:
        return [*self.shadow.layers.values(), *self.shadow.tensors.values()]

    def training(self) -> Any:
        """Return the context of a forward and its backward: differentiable kernels, and the chosen attention, which may
        take 16 bits only (`models.layers.attention`)."""
        return training_kernels(self.attention)

    def forward(self, run: RunBlock, inputs: ModelInputs) -> Tensor:
        """Compute the raw output of each sample as tokens, (B, N, C·patch)."""

        def run_block(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            block.begin_call(tensors, call)
            try:
                out = run(block, *tensors, call)
            finally:
                block.end_call()
            if not block.has_run(call.method):  # a measured step gets another block's output
                alike, ran = block.structure(), (b for _, b in self.blocks() if b.has_run(call.method))
                block.take_result(next(b for b in ran if b.structure() == alike), call.method)
            return block.result(out, call.method)

        with self.training():
            raw = self.outputs(run_block, inputs, out_of_place=True)
        return _tokens(raw, self._groups(inputs), inputs.tokens.shape[1])

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Run the modules outside the blocks in fp32."""
        inside = [f"{block.name}." for block in self.calls.blocks.values()]
        modules = self.shadow.tensors.items()
        outside = [module for name, module in modules if not f"{name}.".startswith(tuple(inside))]
        clean, self._compute_dtype = self._clean, torch.float32
        restore(clean)
        try:
            with cast_buffers(torch.float32, outside), dtype_told(torch.float32, self.shadow.base):
                self._clean = self.shadow.state()
                yield
                restore(self._clean)
        finally:
            self._clean, self._compute_dtype = clean, self.dtype

    def outputs(self, run: RunCall, inputs: ModelInputs, out_of_place: bool) -> list[Tensor]:
        """Return the raw output of each group.

        run: runs a call of a block. out_of_place: in-place writes are made out of place, as autograd needs.
        """
        outputs = []
        with self.calls.handled_by(run):
            for group in self._groups(inputs):
                restore(self._clean)
                self.calls.begin(len(group.rows))
                if self.is_in_fp32:
                    group = group.cast(self._compute_dtype)
                if out_of_place:
                    model_name = type(self.shadow.diffusion_model).__name__
                    outputs.append(self.calls.out_of_place(model_name, partial(self._call, group)))
                else:
                    outputs.append(self._call(group.copied()))
        return outputs

    def _groups(self, inputs: ModelInputs) -> Sequence[NativeGroup]:
        assert isinstance(inputs, NativeInputs)
        if not self.record.apart:
            return inputs.groups
        return [single for group in inputs.groups for single in group.split()]

    def _call(self, group: NativeGroup) -> Tensor:
        options = group.sampler_options()
        try:
            with without_comfy_compiler((), {"transformer_options": options}):
                conds = dict(group.conds)
                if group.text_options is not None:
                    conds["c_crossattn"] = self._refine_text(conds["c_crossattn"], group.text_options)
                out = self.shadow.base.apply_model(group.x, group.sigma, transformer_options=options, **conds)
        except OF_CORE as error:
            if self._ran or not is_of_core(error):  # once a block is compiled, it may be the compiler's
                raise
            if (refused := refusal(error, kernel_that_raised(error))) is not None:
                raise refused from error
            raise ValueError(
                f"model is {self.title}, whose forward fails on this data ({quoted(cause_of(error))}); prepare the "
                "data with the VAE and the text encoders of this model."
            ) from error
        self._ran = True
        return out

    def _refine_text(self, text: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Run the model's text adapter, (b, L, D), on each sample separately like ComfyUI's sampler."""
        refine: Any = self.shadow.diffusion_model.preprocess_text_embeds
        with self.calls.sample_by_sample():
            return torch.cat([refine(row, **options) for row in text.split(1)])


def _hooked(shadow: Shadow, blocks: Mapping[str, BlockOfModel], record: ForwardRecord) -> BlockCalls:
    """Make the trainer's blocks, to which each call of the shadow's blocks goes."""
    calls = BlockCalls(record.streams)
    cores = {name: shadow.diffusion_model.get_submodule(block.name) for name, block in blocks.items()}
    by_kind: dict[str, list[str]] = {}
    for name, block in blocks.items():
        by_kind.setdefault(block.kind, []).append(name)
    varying = {
        name: text
        for names in by_kind.values()
        for name, text in zip(names, varying_attributes([cores[n] for n in names]), strict=True)
    }
    for name, block in blocks.items():
        tensors = [t for path, t in shadow.tensors.items() if f"{path}.".startswith(f"{block.name}.")]
        inner = hook_block(cores[name], partial(calls.enter, name))
        calls.add(name, NativeBlock(block, inner, tensors, varying[name], record.results))
    lists: dict[str, set[str]] = {}
    for name, native_block in calls.blocks.items():
        lists.setdefault(native_block.structure(), set()).add(list_of(blocks[name]))
    for native_block in calls.blocks.values():
        # Lists of one block type, such as refiners and layers, may see different lengths; each method is a graph.
        entries = entries_of(type(native_block.core), shadow.diffusion_model)
        native_block.expect_shapes(len(lists[native_block.structure()]) * len(entries))
    return calls


def _tokens(raw: Sequence[Tensor], groups: Sequence[NativeGroup], count: int) -> Tensor:
    rows: dict[int, Tensor] = {}
    for group, out in zip(groups, raw, strict=True):
        for row, sample_out in zip(group.rows, out, strict=True):
            rows[row] = patchify(group.pictures(sample_out), count).tokens
    return torch.stack([rows[row] for row in range(len(rows))])
