"""A frozen Linear and the product of an adapter's two small factors, as one result: the second product adds to what the
first has made, in place.

    y  = x·Wᵀ + b        then  y  += hidden·upᵀ
    dx = dy·W            then  dx += dhidden·down

In the open a compiler makes the second `torch.addmm(y, …)`, which copies y before it adds to it; in place nobody may
write to a tensor that others could have seen. So each pair is an op of its own, opaque, without side effects. Their
gradient is that of `linear.py`. They are registered by hand, as `torch.library.custom_op` takes twice the host's time.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ....memory.weights.frozen_linear import FrozenLinear

_LIBRARY = torch.library.Library("tessera", "FRAGMENT")
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""What each op runs: for whoever counts the launches inside."""


def register(
    function: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int],
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Register `function` as the op tessera::<its name>, and return the op.

    fake: makes results of the right shapes. flops: by the op's arguments; the partitioner of a compiled graph weighs by
        it what to keep, and an op without a formula counts as free. save, backward: its gradient, as
        `torch.library.register_autograd` takes them; without them it has none.
    """
    name = function.__name__
    if not hasattr(torch.ops.tessera, name):  # of a pack that is imported twice the first stays
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tessera::{name}", fake, lib=_LIBRARY)
        register_flop_formula(getattr(torch.ops.tessera, name), get_raw=True)(flops)
        if backward is not None:
            torch.library.register_autograd(f"tessera::{name}", backward, setup_context=save, lib=_LIBRARY)
    op = getattr(torch.ops.tessera, name).default
    FUNCTIONS[op] = function
    return op


def stored_tensors(frozen: FrozenLinear) -> tuple[list[Tensor], str]:
    """Return the tensors of a weight, without the bias, and in a line of text how they make it; several weights have
    several lines."""
    scale = () if frozen.scale is None else (frozen.scale,)
    return [frozen.weight, *scale, *frozen.parts], f"{len(scale)} {len(frozen.parts)} {frozen.layout or ''}"


@functools.cache
def _read(storage: str) -> list[tuple[int, int, str | None]]:
    lines = (line.split(" ", 2) for line in storage.splitlines())
    return [(int(scales), int(parts), layout or None) for scales, parts, layout in lines]


def stored_weights(tensors: Sequence[Tensor], storage: str) -> list[FrozenLinear]:
    """Put the weights together again, without their biases."""
    rest, found = iter(tensors), []
    for scales, parts, layout in _read(storage):
        weight = next(rest)
        scale = next(rest) if scales else None
        found.append(FrozenLinear(weight, scale, None, tuple(next(rest) for _ in range(parts)), layout))
    return found


def add_product_(y: Tensor, hidden: Tensor, up: Tensor) -> Tensor:
    """Add hidden·upᵀ to y, in place.

    y: (rows, out), contiguous. hidden: (n, rank), up: (m, rank), n·m = rows·out.
    """
    y.view(-1, len(up)).addmm_(hidden, up.t())
    return y


def adapted_linear(
    x: Tensor, stored: Sequence[Tensor], storage: str, bias: Tensor | None, hidden: Tensor, up: Tensor
) -> Tensor:
    """x (rows, in) → (rows, out): the frozen Linear, and hidden·upᵀ. stored, storage: see `stored_tensors`."""
    (frozen,) = stored_weights(stored, storage)
    return add_product_(frozen._replace(bias=bias).apply(x), hidden, up)


def _fake_linear(x, stored, storage, bias, hidden, up):
    (frozen,) = stored_weights(stored, storage)
    return x.new_empty(x.shape[0], frozen.shape[0])


def _linear_flops(x, stored, storage, bias, hidden, up, **_) -> int:
    (frozen,) = stored_weights(stored, storage)
    return 2 * x.shape[0] * math.prod(frozen.shape) + 2 * hidden.numel() * len(up)


linear_op = register(adapted_linear, _fake_linear, _linear_flops)


def adapted_input_grad(
    grads: Sequence[Tensor], stored: Sequence[Tensor], storage: str, hidden_grad: Tensor, down: Tensor
) -> Tensor:
    """grads, each (rows, out) → (rows, in): the sum of what goes back through the frozen Linears, from the last to the
    first as autograd has it, and hidden_grad (rows, ranks) · down (ranks, in)."""
    total: Tensor | None = None
    for grad, frozen in reversed(list(zip(grads, stored_weights(stored, storage), strict=True))):
        if total is None:
            total = frozen.apply_transposed(grad)
        elif frozen.layout is None and frozen.scale is None and frozen.weight.dtype == grad.dtype:
            total.addmm_(grad, frozen.weight)
        else:
            total += frozen.apply_transposed(grad)
    return hidden_grad @ down if total is None else total.addmm_(hidden_grad, down)


def _fake_input_grad(grads, stored, storage, hidden_grad, down):
    return hidden_grad.new_empty(hidden_grad.shape[0], down.shape[1])


def _input_grad_flops(grads, stored, storage, hidden_grad, down, **_) -> int:
    sides = sum(math.prod(frozen.shape) for frozen in stored_weights(stored, storage))
    return 2 * hidden_grad.shape[0] * (sides + down.numel())


input_grad_op = register(adapted_input_grad, _fake_input_grad, _input_grad_flops)
