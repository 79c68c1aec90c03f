"""ComfyUI's own forward as a transformer of the trainer: ComfyUI owns the loop, and hooks run its blocks in the
trainer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...common.text import quoted
from ...memory.comfy_compiler import without_comfy_compiler
from ...memory.weights.residency import FrozenModule
from ..blocks import BlockOfModel, list_of
from ..family import ModelInputs, RunBlock
from ..layers.attention import Attention
from ..layers.lora_linear import LoraLayer
from ..transformer_options import steady
from .blocks import NativeBlock, flatten, varying_attributes
from .comfyui.entries import entries_of, hook_block
from .comfyui.refusals import OF_CORE, cause_of, is_of_core, refusal
from .gradients import check_gradients
from .inputs import NativeGroup, NativeInputs, patchify
from .kernels import kernel_that_raised, training_kernels
from .shadow import Shadow, restore
from .verify.outside import Unloaded
from .verify.precision import cast_buffers, dtype_told, run_in
from .writes.out_of_place import OutOfPlace

# The largest influence of a sample on another of its batch. Independent samples are bit-identical; experts that a
# router gives other tokens add in another order.
INFLUENCE = 1e-5

OnDevice = Callable[..., Any]


@dataclass
class Batching:
    """apart: True if the samples of a batch run one by one, since they influence each other."""

    apart: bool = False


class NativeTransformer:
    """title: of the model, for messages; blocks: of the MODEL, by their swap names; streams: indices of the tensors
    that come from the previous block, by structure, shared so that a rebuilt transformer matches its graphs; batching:
    whether samples share a forward, shared with a rebuilt transformer too."""

    def __init__(
        self,
        title: str,
        shadow: Shadow,
        blocks: Mapping[str, BlockOfModel],
        attention: Attention,
        dtype: torch.dtype,
        results: dict[tuple[str, str], Any],
        streams: dict[str, set[int]],
        batching: Batching,
    ):
        self.title = title
        self.shadow = shadow
        self.attention = attention
        self.dtype = dtype
        self.batching = batching
        self._compute_dtype = dtype  # another dtype during a check
        cores = {name: shadow.diffusion_model.get_submodule(block.name) for name, block in blocks.items()}
        by_kind: dict[str, list[str]] = {}
        for name, block in blocks.items():
            by_kind.setdefault(block.kind, []).append(name)
        varying = {
            name: text
            for names in by_kind.values()
            for name, text in zip(names, varying_attributes([cores[n] for n in names]), strict=True)
        }
        self._blocks: dict[str, NativeBlock] = {}
        for name, block in blocks.items():
            tensors = [t for path, t in shadow.tensors.items() if f"{path}.".startswith(f"{block.name}.")]
            inner = hook_block(cores[name], partial(self._enter, name))
            self._blocks[name] = NativeBlock(block, inner, tensors, varying[name], results)
        lists: dict[str, set[str]] = {}
        for name, native_block in self._blocks.items():
            lists.setdefault(native_block.structure(), set()).add(list_of(blocks[name]))
        for native_block in self._blocks.values():
            # Lists of one kind of block, such as refiners and layers, may see different lengths; each method is a
            # graph.
            entries = entries_of(type(native_block.core), shadow.diffusion_model)
            native_block.shapes = len(lists[native_block.structure()]) * len(entries)
        self._run: Callable[[NativeBlock, list[Tensor], Any], Any] | None = None
        self._samples, self._ran = 1, False
        self._mode: OutOfPlace | None = None
        self._running: str | None = None  # name of the block that the model has called
        self._streams = streams
        self._previous_ids: dict[str, tuple[int, ...]] = {}
        self._clean = shadow.state()

    def blocks(self) -> list[tuple[str, NativeBlock]]:
        return list(self._blocks.items())

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
            block.call = tensors, call
            try:
                out = run(block, *tensors, call)
            finally:
                block.call = None  # else it would hold the step's graph until the next call
            if not block.has_run(call.method):  # a measured step gets another block's output
                alike, ran = block.structure(), (b for b in self._blocks.values() if b.has_run(call.method))
                block.take_result(next(b for b in ran if b.structure() == alike), call.method)
            return block.result(out, call.method)

        with self.training():
            raw = self._forward(run_block, inputs, outer=True)
        return _tokens(raw, self._groups(inputs), inputs.tokens.shape[1])

    def difference(self, on_device: OnDevice, inputs: ModelInputs) -> float:
        """Compute the relative difference between this forward and ComfyUI's own with its own kernels, both without
        gradients.

        on_device: calls a function on a block and its arguments with the block's weights on the device. Raises
        ValueError for a block with an operation that has no gradient, or whose tensors are read outside of it while it
        is swapped.
        """

        def run_block(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            return block.result(on_device(_run_with_backward, block, *tensors, call, {}), call.method)

        with torch.no_grad():
            with self.training():
                actual = self._forward(run_block, inputs, outer=True)
            return relative(actual, self._core_output(on_device, inputs))

    def precise_difference(self, on_device: OnDevice, inputs: ModelInputs) -> tuple[float, float]:
        """Compute `difference` in fp32 on the stored weights, and that of ComfyUI's own forward in the run's dtype: its
        rounding error."""

        def run_block(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            return block.result(on_device(partial(run_in, torch.float32, _run), block, *tensors, call, {}), call.method)

        with torch.no_grad():
            rounded = self._core_output(on_device, inputs)
            with self.in_fp32():
                with self.training():
                    actual = self._forward(run_block, inputs, outer=True)
                expected = self._core_output(on_device, inputs)
            return relative(actual, expected), relative(rounded, expected)

    def check_outside(self, on_device: OnDevice, inputs: ModelInputs) -> None:
        """Run ComfyUI's forward. Raises ValueError if it reads tensors of a swapped block outside of it."""
        with torch.no_grad():
            self._core_output(on_device, inputs)

    def _core_output(self, on_device: OnDevice, inputs: ModelInputs) -> list[Tensor]:
        def core(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            function = _run_core if self._compute_dtype == self.dtype else partial(run_in, torch.float32, _run_core)
            with unloaded.loaded(block):
                return block.result(on_device(function, block, *tensors, call), call.method)

        # Both sides of a comparison would read the same slots.
        with Unloaded([block for block in self._blocks.values() if block.name in self.shadow.swapped]) as unloaded:
            return self._forward(core, inputs, outer=False)

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Run the modules outside the blocks in fp32."""
        inside = [f"{block.name}." for block in self._blocks.values()]
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

    def influence(self, on_device: OnDevice, inputs: ModelInputs) -> float:
        """Compute the relative change that one sample of a batch makes to the output of another; 0 if they are
        independent.

        Two samples of one shape run together, and each with a copy of itself, so that no kernel adds in another order.
        """
        assert isinstance(inputs, NativeInputs)

        def core(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            return block.result(on_device(_run_core, block, *tensors, call), call.method)

        apart, self.batching.apart = self.batching.apart, False
        try:
            with torch.no_grad():
                groups = inputs.groups[0].paired()
                first, mixed, other = self._forward(core, replace(inputs, groups=groups), outer=False)
        finally:
            self.batching.apart = apart
        pairs = (mixed[0].float(), first[0].float()), (mixed[1].float(), other[1].float())
        return max(float((together - alone).norm() / alone.norm()) for together, alone in pairs)

    def _groups(self, inputs: ModelInputs) -> Sequence[NativeGroup]:
        assert isinstance(inputs, NativeInputs)
        if not self.batching.apart:
            return inputs.groups
        return [single for group in inputs.groups for single in group.split()]

    def _forward(self, run: Callable[..., Any], inputs: ModelInputs, outer: bool) -> list[Tensor]:
        """Return the raw output of each group."""
        outputs = []
        self._run = run
        try:
            for group in self._groups(inputs):
                restore(self._clean)
                self._samples = len(group.rows)
                self._previous_ids.clear()
                if self._compute_dtype != self.dtype:
                    group = group.cast(self._compute_dtype)
                outputs.append(self._out_of_place(group) if outer else self._call(group.copied()))
        finally:
            self._run = None
        return outputs

    def _out_of_place(self, group: NativeGroup) -> Tensor:
        self._mode = OutOfPlace(type(self.shadow.diffusion_model).__name__)
        try:
            with self._mode:
                out = self._call(group)
            return self._mode.current(out)
        finally:
            self._mode = None

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
        samples, self._samples = self._samples, 1
        try:
            return torch.cat([refine(row, **options) for row in text.split(1)])
        finally:
            self._samples = samples

    def _enter(self, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a method of a block that the model has called."""
        block, mode = self._blocks[name], self._mode
        tensors, call = flatten(args, kwargs, self._samples, method)
        if block.running.depth or not tensors:  # called from within the block, or no computation
            return getattr(type(block.core), method)(block.core, *args, **kwargs)
        assert self._run is not None, block.name
        if self._running is not None:
            raise ValueError(
                f"model can't be trained: its block {block.name} runs inside its block {self._running}; choose another "
                "model."
            )
        self._running = block.name
        try:
            if mode is None:
                return self._run(block, tensors, call)
            args, kwargs = mode.current(args), mode.current(kwargs)
            mode.__exit__(None, None, None)  # a block has its own mode, which the compiler sees
            try:
                tensors, call = flatten(_steady(args), _steady(kwargs), self._samples, method)
                return self._run(block, self._alike(block, tensors, method), call)
            finally:
                mode.__enter__()
        finally:
            self._running = None

    def _alike(self, block: NativeBlock, tensors: list[Tensor], method: str) -> list[Tensor]:
        """Make the first block of a kind look like the others to the compiler: tensors from the previous block are
        contiguous and require a gradient."""
        structure = f"{method} {block.structure()}"
        ids = tuple(map(id, tensors))
        previous_ids = self._previous_ids.get(structure)
        streams = self._streams.setdefault(structure, set())
        if previous_ids is not None and len(previous_ids) == len(ids):
            streams |= {number for number in range(len(ids)) if ids[number] != previous_ids[number]}
        self._previous_ids[structure] = ids
        tensors = list(tensors)
        for number in streams:
            if number < len(tensors) and tensors[number].is_floating_point():
                tensor = _in_row_order(tensors[number])
                if torch.is_grad_enabled() and not tensor.requires_grad:
                    tensor = tensor.detach().requires_grad_()
                tensors[number] = tensor
        trained = any(linear.adapter is not None for linear in block.linears().values())
        if trained and torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
            # Block swap reloads a block for its backward by the gradient of its inputs.
            floating = [number for number, tensor in enumerate(tensors) if tensor.is_floating_point()]
            for number in floating[:1]:
                tensors[number] = tensors[number].detach().requires_grad_()
        return tensors


def _in_row_order(tensor: Tensor) -> Tensor:
    """Return the tensor with the strides of a new one: torch calls it contiguous even if axes of length 1 have other
    strides, the compiler does not."""
    return tensor.reshape(-1).view(tensor.shape)


def _run_with_backward(block: NativeBlock, *args: Any) -> Any:
    return check_gradients(block.name, block, *args)


def _run(block: NativeBlock, *args: Any) -> Any:
    return block(*args)


def _run_core(block: NativeBlock, *args: Any) -> Any:
    return block.run_core(*args[:-1], call=args[-1])


def _steady(value: Any) -> Any:
    """Drop entries that change from call to call from the options that ComfyUI passes down."""
    if type(value) is tuple:
        return tuple(map(_steady, value))
    if type(value) is dict:
        entries = {name: _steady(inner) if name == "transformer_options" else inner for name, inner in value.items()}
        return steady(entries)
    return value


def relative(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Compute ‖actual − expected‖ / ‖expected‖ over all tensors."""
    difference = sum(((a.float() - b.float()) ** 2).sum() for a, b in zip(actual, expected, strict=True))
    return float((difference / sum((b.float() ** 2).sum() for b in expected)) ** 0.5)


def _tokens(raw: Sequence[Tensor], groups: Sequence[NativeGroup], count: int) -> Tensor:
    rows: dict[int, Tensor] = {}
    for group, out in zip(groups, raw, strict=True):
        for row, sample_out in zip(group.rows, out, strict=True):
            rows[row] = patchify(group.pictures(sample_out), count).tokens
    return torch.stack([rows[row] for row in range(len(rows))])
