"""Frozen Linears with low-rank updates, and their gradients.

Of one input x (rows, in), for n Linears, the downs of all one below the other:

    hidden = x·downᵀ                           (rows, ranks)
    y_i    = x·W_iᵀ + b_i + hidden_i·up_iᵀ     (rows, out_i)

Backward keeps what plain autograd would: x, hidden, the factors, and the weights as they are stored.

Eagerly it is a Function, in a graph an op with the same gradient: dynamo would trace into a Function, which neither
torch's cache of compiled graphs takes nor a mode that follows a model's in-place writes.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ....memory.weights.frozen_linear import FrozenLinear
from ....memory.weights.products import FP8, FULL, Products, low_input_grad, low_linear, to_fp8
from .gradients import thin_grads
from .ops import input_grad_op, linear_op, register, stored_tensors, stored_weights


class Update(NamedTuple):
    """A low-rank update beside a frozen Linear.

    up: (out, rank).
    scale: of hidden.
    mask: (B, tokens or 1, rank or 1), by which hidden is multiplied.
    """

    up: Tensor
    scale: float = 1.0
    mask: Tensor | None = None


class _Spec(NamedTuple):
    """Constants of one Linear and its update.

    mask, bias: whether there is one. stored: number of tensors of the weight; storage: how they make it.
    forward, backward, turned: products in which it multiplies.
    """

    rank: int
    scale: float
    mask: bool
    bias: bool
    stored: int
    forward: str
    backward: str
    turned: int
    storage: str

    def text(self) -> str:
        """Encode in a line, for the op."""
        return " ".join([str(value) for value in self])


@functools.cache
def _read(specs: str) -> list[_Spec]:
    found = []
    for line in specs.split("\n"):
        rank, scale, mask, bias, stored, forward, backward, turned, storage = line.split(" ", 8)
        flags = mask == "True", bias == "True"
        found.append(_Spec(int(rank), float(scale), *flags, int(stored), forward, backward, int(turned), storage))
    return found


class _Layer(NamedTuple):
    """The tensors of one Linear and its update."""

    spec: _Spec
    up: Tensor
    mask: Tensor | None
    bias: Tensor | None
    stored: list[Tensor]

    @property
    def weight(self) -> FrozenLinear:
        return stored_weights(self.stored, self.spec.storage)[0]

    def product(self, x: Tensor, hidden: Tensor, rounded: Sequence[Tensor]) -> Tensor:
        """x·Wᵀ + b + hidden·upᵀ. rounded: x in fp8, where a Linear takes that."""
        spec = self.spec
        if (spec.forward, spec.backward) == (FULL, FULL):
            return linear_op(x, self.stored, spec.storage, self.bias, hidden, self.up)
        weight, scale = _with_scale(self.stored)
        products = Products(spec.forward, spec.backward, spec.turned)
        return low_linear(x, weight, scale, self.bias, self.weight.layout, products, rounded, (hidden, self.up))

    def low_input_grad(self, grad: Tensor) -> Tensor | None:
        """dy·W where that is multiplied in low precision."""
        if self.spec.backward == FULL:
            return None
        return low_input_grad(grad, *_with_scale(self.stored), self.spec.backward, self.spec.turned)


def _multiplied(hidden: Tensor, scale: float, mask: Tensor | None, shape: Sequence[int]) -> Tensor:
    """hidden (rows, rank), or its gradient, times scale and mask. shape: (B, tokens) of the rows."""
    hidden = hidden if scale == 1.0 else hidden * scale
    return hidden if mask is None else (hidden.unflatten(0, shape) * mask).flatten(0, -2)


def _with_scale(stored: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return stored[0], stored[1] if len(stored) > 1 else None


def _layers(specs: Sequence[_Spec], tensors: Sequence[Tensor]) -> Iterator[_Layer]:
    rest = iter(tensors)
    for spec in specs:
        up = next(rest)
        mask, bias = next(rest) if spec.mask else None, next(rest) if spec.bias else None
        yield _Layer(spec, up, mask, bias, [next(rest) for _ in range(spec.stored)])


def adapted_linears(
    x: Tensor,
    down: Tensor | None,
    hiddens: Sequence[Tensor],
    rounded: Sequence[Tensor],
    tensors: Sequence[Tensor],
    specs: str,
    shape: Sequence[int],
) -> list[Tensor]:
    """x (rows, in) → of each Linear (rows, out). Its gradient is that of all of them: of x also through `down`.

    down: (ranks, in), with which hiddens were made of x, (rows, rank) each, without a gradient; None where they have
        one of their own.
    rounded: x in fp8 where a Linear takes that. tensors, specs: of each Linear and its update. shape: of the rows.
    """
    layers = _layers(_read(specs), tensors)
    return [layer.product(x, hidden, rounded) for layer, hidden in zip(layers, hiddens, strict=True)]


def _fake_linears(x, down, hiddens, rounded, tensors, specs, shape):
    return [x.new_empty(len(x), layer.weight.shape[0]) for layer in _layers(_read(specs), tensors)]


def _linears_flops(x, down, hiddens, rounded, tensors, specs, shape, **_) -> int:
    layers = _layers(_read(specs), tensors)
    pairs = zip(layers, hiddens, strict=True)
    return sum(2 * len(x) * math.prod(layer.weight.shape) + 2 * h.numel() * len(layer.up) for layer, h in pairs)


def _keep(ctx: Any, x: Tensor, down: Tensor | None, hiddens: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Save what the gradient needs, of no input that it does not need. ctx.specs is set."""
    ctx.set_materialize_grads(False)
    kept: list[Tensor | None] = []
    for layer in _layers(_read(ctx.specs), tensors):
        beside = [*([layer.mask] * layer.spec.mask), *([None] * layer.spec.bias)]
        kept += [layer.up, *beside, *(layer.stored if ctx.for_x else [None] * len(layer.stored))]
    ctx.save_for_backward(x if ctx.for_down else None, down if ctx.for_x else None, *hiddens, *kept)


def _gradients(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, Any, list[Tensor | None], list[Tensor | None]]:
    """Gradients of x, down, hiddens and tensors, by those of the outputs."""
    specs = _read(ctx.specs)
    beside = [[None] * (spec.mask + spec.bias + spec.stored) for spec in specs]
    none: list[Tensor | None] = [None] * len(grads)
    if all(grad is None for grad in grads):  # nothing downstream contributes to the loss
        return None, None, none, [None for own in beside for _ in (None, *own)]
    x, down, *rest = ctx.saved_tensors  # asked once: checkpointing gives each tensor once
    hiddens, layers = rest[: len(grads)], list(_layers(specs, rest[len(grads) :]))
    hidden_grads, tensor_grads = [], []
    for layer, hidden, grad, others in zip(layers, hiddens, grads, beside, strict=True):
        # One of several may still have none.
        thin = torch.zeros_like(hidden), None
        if grad is not None:
            thin = thin_grads(grad.reshape(len(hidden), -1), hidden, layer.up)
        hidden_grads.append(thin[0])
        tensor_grads += [thin[1], *others]
    if not ctx.through_down:
        (layer,), (grad,) = layers, grads
        low = layer.low_input_grad(grad) if ctx.for_x else None
        x_grad = layer.weight.apply_transposed(grad) if ctx.for_x and low is None else low
        return x_grad, None, hidden_grads, tensor_grads
    parts = [
        _multiplied(grad, layer.spec.scale, layer.mask, ctx.shape)
        for layer, grad in zip(layers, hidden_grads, strict=True)
    ]
    joint = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    x_grad = _input_grad(layers, grads, joint, down) if ctx.for_x else None
    down_grad = joint.t() @ x if ctx.for_down else None
    return x_grad, down_grad, none, tensor_grads


def _input_grad(layers: Sequence[_Layer], grads: Sequence[Tensor | None], joint: Tensor, down: Tensor) -> Tensor:
    """The gradient of x. joint: of hidden, (rows, ranks)."""
    full, low, stored, storage = [], [], [], []
    for layer, grad in zip(layers, grads, strict=True):
        if grad is None:
            continue
        if (columns := layer.low_input_grad(grad)) is not None:
            low.append(columns)
            continue
        full.append(grad)
        stored += layer.stored
        storage.append(layer.spec.storage)
    total: Tensor = sum(low, input_grad_op(full, stored, "\n".join(storage), joint, down))
    return total


class _AdaptedLinears(torch.autograd.Function):
    """`adapted_linears` with its gradient, where nothing is compiled."""

    @staticmethod
    def forward(ctx, specs, shape, counts, x, down, *rest):
        ctx.specs, ctx.shape, ctx.through_down, ctx.size = specs, shape, down is not None, len(rest)
        ctx.for_x, ctx.for_down = ctx.needs_input_grad[3:5]
        hiddens, rounded, tensors = rest[: counts[0]], rest[counts[0] : sum(counts)], rest[sum(counts) :]
        _keep(ctx, x, down, hiddens, tensors)
        return tuple(adapted_linears(x, down, hiddens, rounded, tensors, specs, shape))

    @staticmethod
    def backward(ctx, *grads):
        x_grad, down_grad, hidden_grads, tensor_grads = _gradients(ctx, grads)
        rounded = [None] * (ctx.size - len(hidden_grads) - len(tensor_grads))
        return None, None, None, x_grad, down_grad, *hidden_grads, *rounded, *tensor_grads


def _save(ctx, inputs, output) -> None:
    x, down, hiddens, rounded, tensors, ctx.specs, ctx.shape = inputs
    ctx.through_down, ctx.size = down is not None, len(rounded)
    ctx.for_x, ctx.for_down = ctx.needs_input_grad[:2]
    _keep(ctx, x, down, hiddens, tensors)


def _backward(ctx, grads):
    x_grad, down_grad, hidden_grads, tensor_grads = _gradients(ctx, grads)
    return x_grad, down_grad, hidden_grads, [None] * ctx.size, tensor_grads, None, None


linears_op = register(adapted_linears, _fake_linears, _linears_flops, _save, _backward)


def lora_linears(
    x: Tensor, frozen: Sequence[FrozenLinear], down: Tensor, updates: Sequence[Update], shape: torch.Size
) -> Sequence[Tensor]:
    """x (rows, in) → of each Linear (rows, out).

    down: (ranks, in), of all updates. shape: (B, tokens) of the rows.
    """
    whole = all(one.meter is None and one.pre_quant_scale is None for one in frozen)
    joint = linear(x.detach(), down.detach()) if whole else linear(x, down)
    parts = [joint] if len(updates) == 1 else joint.split([update.up.shape[1] for update in updates], dim=1)
    hiddens = [_multiplied(part, u.scale, u.mask, shape) for part, u in zip(parts, updates, strict=True)]
    if not whole:
        return [added_product(one, x, hidden, u.up) for one, hidden, u in zip(frozen, hiddens, updates, strict=True)]
    return _run(x, down, hiddens, frozen, updates, shape)


def added_product(frozen: FrozenLinear, x: Tensor, hidden: Tensor, up: Tensor) -> Tensor:
    """x (rows, in) → (rows, out): the frozen Linear, and hidden·upᵀ.

    hidden: (n, rank), up: (m, rank), n·m = rows·out: the update may be of the output cut into shorter rows.
    """
    if frozen.products is not None and frozen.meter is not None:
        y = frozen.apply(x)  # which others keep, to measure it
        return torch.addmm(y.view(-1, len(up)), hidden, up.t()).view(y.shape)
    if frozen.pre_quant_scale is not None:
        x = x * frozen.pre_quant_scale.to(x.dtype)
    return _run(x, None, [hidden], [frozen], [Update(up)], x.shape[:1])[0]


def _run(
    x: Tensor,
    down: Tensor | None,
    hiddens: Sequence[Tensor],
    frozen: Sequence[FrozenLinear],
    updates: Sequence[Update],
    shape: torch.Size,
) -> Sequence[Tensor]:
    lines: list[str] = []
    tensors: list[Tensor] = []
    fp8 = False
    for one, update in zip(frozen, updates, strict=True):
        products = one.products_for(x) or Products()
        stored, storage = stored_tensors(one)
        beside = [tensor for tensor in (update.mask, one.bias) if tensor is not None]
        flags = update.mask is not None, one.bias is not None
        spec = _Spec(update.up.shape[1], update.scale, *flags, len(stored), *products, storage)
        lines.append(spec.text())
        tensors += [update.up, *beside, *stored]
        fp8 = fp8 or products.forward == FP8
    # In the open, where a compiler joins it with what comes before.
    rounded = list(to_fp8(x.detach())) if fp8 else []
    if torch.compiler.is_compiling():
        return linears_op(x, down, hiddens, rounded, tensors, "\n".join(lines), list(shape))
    counts = len(hiddens), len(rounded)
    rest = *hiddens, *rounded, *tensors
    return _AdaptedLinears.apply("\n".join(lines), tuple(shape), counts, x, down, *rest)
