"""Compare blocks as the run computes them, checkpointed, swapped and compiled, with the same blocks run plainly.

A forward of the run's first batch goes through the run's own path. At the first block of each kind, and at the first
swapped block of each kind, and for each method by which the model enters them, the block and its backward are run once
more, plainly: eager, without recompute, its weights read from the MODEL. The error of the run's dtype relative to fp32
in that block is measured too, and sets the bound of each output and gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...memory.swap.training import frozen_modules
from ...memory.weights.check_format import relative_error
from ...models.catalogue.registry import run_in_fp32
from ...models.family import Block, ModelInputs
from ..placement.placed_model import PlacedModel

NOISES = 4.0  # errors of the run's dtype, which a difference may reach
LEAST = 1e-4  # bound of a difference, if that is larger
ROUNDINGS = 2.0  # of the run's dtype, which every bound allows
FLOOR = 0.05  # of the largest norm of its kind: a smaller tensor counts as that large

Results = tuple[list[Tensor], list[Tensor], list[Tensor]]


def check_execution(placed: PlacedModel, inputs: ModelInputs) -> tuple[str | None, float]:
    """Return a sentence on the first block that differs, None if none does; and the largest difference.

    The adapters must have an effect. Compiles the graphs that the run's first step would compile.
    """
    faults: list[str] = []
    largest = 0.0
    names_by_id = {id(block): name for name, block in placed.weights.transformer.blocks()}
    compared: set[tuple[str, bool, str]] = set()
    as_run = placed.execution.run_block(inputs, None)

    def run(block: Block, *args: Any) -> Any:
        nonlocal largest
        kind = block.structure(), _is_swapped(placed, block), _method(block)
        if kind not in compared:
            compared.add(kind)
            difference, bound = _compare(placed, as_run, block, args)
            largest = max(largest, difference)
            if not difference <= bound:
                name = names_by_id[id(block)]
                faults.append(
                    f"{name} is {difference:.1%} different from the plain block, {_execution_text(placed, block)}"
                )
        return as_run(block, *args)

    placed.network.flat.write_casts()
    try:
        with placed.training():
            placed.weights.transformer.forward(run, inputs)
    finally:
        placed.execution.runner.checkpointing.discard_offloaded()
    return (faults[0] if faults else None), largest


def _is_swapped(placed: PlacedModel, block: Block) -> bool:
    return placed.weights.swap is not None and id(block) in placed.weights.swap.number


def _method(block: Block) -> str:
    """Return the name of the block's method that the model has called."""
    call = getattr(block, "call", None)
    return "forward" if call is None else call[1].method


def _execution_text(placed: PlacedModel, block: Block) -> str:
    """Describe the run's execution of a block."""
    words = ["swapped"] * _is_swapped(placed, block) + [f"checkpointing {placed.memory.options.checkpointing}"]
    return " and ".join(words + ["compiled"] * (placed.execution.runner.planned_graphs > 0))


def _compare(placed: PlacedModel, as_run: Any, block: Block, args: tuple[Any, ...]) -> tuple[float, float]:
    """Return the relative difference of the output or gradient that is the most beyond its bound, and this bound, which
    its own rounding sets."""
    attached: Any = block
    call = getattr(attached, "call", None)
    run = _with_backward(as_run, block, args)
    if call is not None:
        attached.begin_call(*call)
    with own_weights(placed, block):
        plain = _with_backward(_plain, block, args)
        wide = [arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        with placed.low_bit.switched_off([("", block)]):  # their rounding counts as noise
            exact = _with_backward(partial(run_in_fp32, _plain), block, tuple(wide))
    least = max(LEAST, ROUNDINGS * torch.finfo(placed.weights.dtype).eps)
    pairs = [(0.0, least)]
    for tensors in zip(run, plain, exact, strict=True):  # outputs, gradients of inputs, gradients of adapters
        smallest = max([1e-12, *(FLOOR * float(tensor.norm()) for tensor in tensors[1])])
        for actual, expected, precise in zip(*tensors, strict=True):
            noise = relative_error(expected, precise, smallest)
            pairs.append((relative_error(actual, expected, smallest), max(NOISES * noise, least)))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _plain(block: Block, *args: Any) -> Any:
    return block(*args, {})


def _with_backward(run: Any, block: Block, args: tuple[Any, ...]) -> Results:
    """Run a block and its backward on detached leaves of its arguments. Returns its outputs, the gradients of these
    leaves, and those of its adapters' weights, zeros if there are none."""
    leaf_args = [arg.detach().requires_grad_() if _requires_grad(arg) else arg for arg in args]
    out = run(block, *leaf_args)
    outputs = (out,) if isinstance(out, Tensor) else out
    leaves = [arg for arg in leaf_args if _requires_grad(arg)]
    sources = _adapter_sources(block)
    weights = [tensor for source in sources for tensor in source if tensor is not None]
    gradients = _gradients(outputs, leaves + weights)
    rest = iter(gradients[len(leaves) :])
    adapter_gradients = []
    for _, cast in sources:
        gradient = next(rest)
        adapter_gradients.append(gradient if cast is None else gradient + next(rest))
    return [output.detach().float() for output in outputs], gradients[: len(leaves)], adapter_gradients


def _requires_grad(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.requires_grad


def _adapter_sources(block: Block) -> list[tuple[Tensor, Tensor | None]]:
    """Return each weight of the block's adapters with its cast, None if it has none: a forward reads the casts, if
    there are any, or in another dtype the weights themselves."""
    adapters = [layer.adapter for layer in block.linears().values() if layer.adapter is not None]
    return [(weight, adapter.casts.get(name)) for adapter in adapters for name, weight in adapter.named_parameters()]


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Compute the gradients of the inputs, fp32, from a fixed random gradient of each output; zeros for unused ones."""
    outs = [output for output in outputs if output.requires_grad]
    if not outs or not inputs:
        return [torch.zeros_like(tensor).float() for tensor in inputs]
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randn(output.shape, generator=generator).to(output.device, output.dtype) for output in outs]
    gradients = torch.autograd.grad(outs, inputs, ends, allow_unused=True)
    return [
        torch.zeros_like(tensor).float() if gradient is None else gradient.float()
        for tensor, gradient in zip(inputs, gradients, strict=True)
    ]


@contextmanager
def own_weights(placed: PlacedModel, block: Block) -> Iterator[None]:
    """Give a swapped block its weights as read from the MODEL, in place of its slot, inside the context."""
    if not _is_swapped(placed, block):
        yield
        return
    modules = list(frozen_modules(block).values())
    saved_buffers = [dict(module._buffers) for module in modules]
    try:
        for module in modules:
            module.take()
            for name, tensor in module._buffers.items():
                module._buffers[name] = None if tensor is None else tensor.to(placed.weights.device)
        yield
    finally:
        for module, buffers in zip(modules, saved_buffers, strict=True):
            module._buffers.update(buffers)
