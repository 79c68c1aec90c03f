"""Comparison of the training forward over ComfyUI's modules with ComfyUI's own forward, without gradients."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...family import ModelInputs
from ..forward.blocks import NativeBlock
from ..forward.gradients import check_gradients
from ..forward.inputs import NativeInputs
from ..forward.precision import run_in
from ..forward.transformer import NativeTransformer
from .outside import Unloaded

OnDevice = Callable[..., Any]


class ForwardComparison:
    """Comparisons of one transformer with ComfyUI's own forward.

    on_device: calls a function on a block and its arguments with the block's weights on the device.
    """

    def __init__(self, transformer: NativeTransformer, on_device: OnDevice):
        self.transformer, self.on_device = transformer, on_device

    @torch.no_grad()
    def difference(self, inputs: ModelInputs) -> float:
        """Compute the relative difference between the training forward and ComfyUI's own with its own kernels.

        Raises ValueError for a block with an operation that has no gradient, or whose tensors are read outside of it
        while it is swapped.
        """

        def run_block(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            return block.result(self.on_device(_run_with_backward, block, *tensors, call, {}), call.method)

        with self.transformer.training():
            actual = self.transformer.outputs(run_block, inputs, out_of_place=True)
        return relative(actual, self._core_output(inputs))

    @torch.no_grad()
    def precise_difference(self, inputs: ModelInputs) -> tuple[float, float]:
        """Compute `difference` in fp32 on the stored weights, and that of ComfyUI's own forward in the run's dtype: its
        rounding error."""

        def run_block(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            out = self.on_device(partial(run_in, torch.float32, _run), block, *tensors, call, {})
            return block.result(out, call.method)

        rounded = self._core_output(inputs)
        with self.transformer.in_fp32():
            with self.transformer.training():
                actual = self.transformer.outputs(run_block, inputs, out_of_place=True)
            expected = self._core_output(inputs)
        return relative(actual, expected), relative(rounded, expected)

    @torch.no_grad()
    def check_outside(self, inputs: ModelInputs) -> None:
        """Run ComfyUI's forward. Raises ValueError if it reads tensors of a swapped block outside of it."""
        self._core_output(inputs)

    @torch.no_grad()
    def influence(self, inputs: ModelInputs) -> float:
        """Compute the relative change that one sample of a batch makes to the output of another; 0 if they are
        independent.

        Two samples of one shape run together, and each with a copy of itself, so that no kernel adds in another order.
        """
        assert isinstance(inputs, NativeInputs)

        def core(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            return block.result(self.on_device(_run_core, block, *tensors, call), call.method)

        with self.transformer.record.together():
            pairs = replace(inputs, groups=inputs.groups[0].paired())
            first, mixed, other = self.transformer.outputs(core, pairs, out_of_place=False)
        compared = (mixed[0].float(), first[0].float()), (mixed[1].float(), other[1].float())
        return max(float((together - alone).norm() / alone.norm()) for together, alone in compared)

    def _core_output(self, inputs: ModelInputs) -> list[Tensor]:
        def core(block: NativeBlock, tensors: list[Tensor], call: Any) -> Any:
            function = partial(run_in, torch.float32, _run_core) if self.transformer.is_in_fp32 else _run_core
            with unloaded.loaded(block):
                return block.result(self.on_device(function, block, *tensors, call), call.method)

        # Both sides of a comparison would read the same slots.
        swapped = [block for _, block in self.transformer.blocks() if block.name in self.transformer.shadow.swapped]
        with Unloaded(swapped) as unloaded:
            return self.transformer.outputs(core, inputs, out_of_place=False)


def _run_with_backward(block: NativeBlock, *args: Any) -> Any:
    return check_gradients(block.name, block, *args)


def _run(block: NativeBlock, *args: Any) -> Any:
    return block(*args)


def _run_core(block: NativeBlock, *args: Any) -> Any:
    return block.run_core(*args[:-1], call=args[-1])


def relative(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Compute ‖actual − expected‖ / ‖expected‖ over all tensors."""
    difference = sum(((a.float() - b.float()) ** 2).sum() for a, b in zip(actual, expected, strict=True))
    return float((difference / sum((b.float() ** 2).sum() for b in expected)) ** 0.5)
