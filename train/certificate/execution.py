"""Compare blocks as the run computes them, checkpointed, swapped and compiled, with the same blocks run plainly.

A forward of the run's first batch goes through the run's own path. At the first block of each kind, and at the first
swapped block of each kind, the block and its backward are run once more, plainly: eager, without recompute, its weights
read from the MODEL. The error of the run's dtype relative to fp32 in that block is measured too, and sets the bound.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...memory.swap.training import frozen_modules
from ...models.family import Block, ModelInputs
from ...models.registry import run_in_fp32
from ..placement.placed_model import PlacedModel

NOISES, LEAST = 4.0, 1e-4


def check_execution(placed: PlacedModel, inputs: ModelInputs) -> tuple[str | None, float]:
    """Return a sentence on the first block that differs, None if none does; and the largest difference.

    The adapters must have an effect. Compiles the graphs that the run's first step would compile.
    """
    faults: list[str] = []
    largest = [0.0]
    names_by_id = _first_blocks(placed)
    as_run = placed.run_block(inputs, None)

    def run(block: Block, *args: Any) -> Any:
        name = names_by_id.pop(id(block), None)
        if name is not None:
            difference, bound = _compare(placed, as_run, block, args)
            largest[0] = max(largest[0], difference)
            if not difference <= bound:
                faults.append(
                    f"{name} is {difference:.1%} different from the plain block, {_execution_text(placed, block)}"
                )
        return as_run(block, *args)

    placed.network.write_casts()
    with placed.training():
        placed.transformer.forward(run, inputs)
    placed.runner.discard_offloaded()
    return (faults[0] if faults else None), largest[0]


def _execution_text(placed: PlacedModel, block: Block) -> str:
    """Describe the run's execution of a block."""
    swapped = placed.swap is not None and id(block) in placed.swap.number
    words = ["swapped"] * swapped + [f"checkpointing {placed.memory.checkpointing}"]
    return " and ".join(words + ["compiled"] * (placed.runner.planned_graphs > 0))


def _first_blocks(placed: PlacedModel) -> dict[int, str]:
    """Return the names of the first block of each structure, resident and swapped, by block id."""
    structures_seen, names_by_id = set(), {}
    for name, block in placed.transformer.blocks():
        swapped = placed.swap is not None and id(block) in placed.swap.number
        if (block.structure(), swapped) not in structures_seen:
            structures_seen.add((block.structure(), swapped))
            names_by_id[id(block)] = name
    return names_by_id


def _compare(placed: PlacedModel, as_run: Any, block: Block, args: tuple[Any, ...]) -> tuple[float, float]:
    """Return the difference of outputs and gradients, and the bound that the dtype's rounding sets."""
    call = getattr(block, "call", None)
    run = _with_backward(as_run, block, args)
    attached: Any = block
    if call is not None:
        attached.call = call
    with own_weights(placed, block):
        plain = _with_backward(_plain, block, args)
        wide = [arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
        with placed.products.switched_off([("", block)]):  # their rounding counts as noise
            exact = _with_backward(partial(run_in_fp32, _plain), block, tuple(wide))
    noise = max(_relative(a, b) for a, b in zip(plain, exact, strict=True))
    return max(_relative(a, b) for a, b in zip(run, plain, strict=True)), max(NOISES * noise, LEAST)


def _plain(block: Block, *args: Any) -> Any:
    return block(*args, {})


def _with_backward(run: Any, block: Block, args: tuple[Any, ...]) -> list[Tensor]:
    """Run a block and its backward on detached leaves of its arguments. Returns its outputs, and the gradients of these
    leaves and of its adapters' weights, zeros if there are none."""
    leaf_args = [a.detach().requires_grad_() if isinstance(a, Tensor) and a.requires_grad else a for a in args]
    out = run(block, *leaf_args)
    outputs = (out,) if isinstance(out, Tensor) else out
    outs = [output for output in outputs if output.requires_grad]
    generator = torch.Generator().manual_seed(0)
    ends = [torch.randn(output.shape, generator=generator).to(output.device, output.dtype) for output in outs]
    leaves = [a for a in leaf_args if isinstance(a, Tensor) and a.requires_grad]
    adapters = [layer.adapter for layer in block.linears().values() if layer.adapter is not None]
    parameters = [(adapter, name, weight) for adapter in adapters for name, weight in adapter.named_parameters()]
    # A forward reads the casts, if there are any, or in another dtype the weights themselves.
    sources = [(weight, adapter.casts.get(name)) for adapter, name, weight in parameters]
    inputs = [*leaves, *(tensor for pair in sources for tensor in pair if tensor is not None)]
    partials = torch.autograd.grad(outs, inputs, ends, allow_unused=True) if outs and inputs else [None] * len(inputs)
    gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(inputs, partials, strict=True)]
    results = [output.detach().float() for output in outputs] + [g.float() for g in gradients[: len(leaves)]]
    rest = iter(gradients[len(leaves) :])
    for _, cast in sources:
        results.append(next(rest).float() + (0.0 if cast is None else next(rest).float()))
    return results


@contextmanager
def own_weights(placed: PlacedModel, block: Block) -> Iterator[None]:
    """Give a swapped block its weights as read from the MODEL, in place of its slot, inside the context."""
    if placed.swap is None or id(block) not in placed.swap.number:
        yield
        return
    modules = list(frozen_modules(block).values())
    saved_buffers = [dict(module._buffers) for module in modules]
    try:
        for module in modules:
            module.take()
            for name, tensor in module._buffers.items():
                module._buffers[name] = None if tensor is None else tensor.to(placed.device)
        yield
    finally:
        for module, buffers in zip(modules, saved_buffers, strict=True):
            module._buffers.update(buffers)


def _relative(actual: Tensor, expected: Tensor) -> float:
    size = max(float(expected.norm()), 1e-12)
    error = float((actual - expected).norm()) / size
    return error if error >= 0 else float("inf")
