"""Frozen Linears with low-rank updates, and their gradients.

Of one input x (rows, in), for n Linears, the downs of all one below the other:

    hidden = x·downᵀ                           (rows, ranks)
    y_i    = x·W_iᵀ + b_i + hidden_i·up_iᵀ     (rows, out_i)

Backward keeps what plain autograd would: x, hidden, the factors, and the weights as they are stored.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ....memory.weights.frozen_linear import FrozenLinear
from ....memory.weights.products import FULL, LEAST_ROWS, Products, low_input_grad, low_linear
from .gradients import thin_grads
from .ops import input_grad_op, linear_op, stored_tensors, stored_weights


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

    stored: number of tensors of the weight; storage, layout: how they make it.
    products: in which it multiplies, None in full.
    """

    rank: int
    scale: float
    stored: int
    storage: str
    layout: str | None
    products: Products | None


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

    def saved(self, weight: bool) -> list[Tensor | None]:
        """The tensors that backward needs, in the places of all. weight: False where x has no gradient."""
        return [self.up, self.mask, None, *(self.stored if weight else [None] * len(self.stored))]

    def product(self, x: Tensor, hidden: Tensor) -> Tensor:
        """x·Wᵀ + b + hidden·upᵀ"""
        spec = self.spec
        if spec.products is None:
            return linear_op(x, self.stored, spec.storage, self.bias, hidden, self.up)
        weight, scale = _with_scale(self.stored)
        return low_linear(x, weight, scale, self.bias, spec.layout, spec.products, (hidden, self.up))

    def low_input_grad(self, grad: Tensor) -> Tensor | None:
        """dy·W where that is multiplied in low precision."""
        products = self.spec.products
        if products is None or products.backward == FULL:
            return None
        return low_input_grad(grad, *_with_scale(self.stored), products.backward, products.turned)


def _multiplied(hidden: Tensor, scale: float, mask: Tensor | None, shape: Sequence[int]) -> Tensor:
    """hidden (rows, rank), or its gradient, times scale and mask. shape: (B, tokens) of the rows."""
    hidden = hidden if scale == 1.0 else hidden * scale
    return hidden if mask is None else (hidden.unflatten(0, shape) * mask).flatten(0, -2)


def _with_scale(stored: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    return stored[0], stored[1] if len(stored) > 1 else None


def _layers(specs: Sequence[_Spec], tensors: Sequence[Tensor | None]) -> Iterator[_Layer]:
    rest: Any = iter(tensors)
    for spec in specs:
        up, mask, bias = next(rest), next(rest), next(rest)
        yield _Layer(spec, up, mask, bias, [next(rest) for _ in range(spec.stored)])


class _LoraLinears(torch.autograd.Function):
    """y of each Linear, for x and the joint down."""

    @staticmethod
    def forward(ctx, specs, shape, x, down, *tensors):
        ctx.set_materialize_grads(False)
        ctx.specs, ctx.shape = specs, shape
        layers, outs, kept = list(_layers(specs, tensors)), [], []
        joint = linear(x, down)
        parts = [joint] if len(specs) == 1 else joint.split([spec.rank for spec in specs], dim=1)
        for layer, part in zip(layers, parts, strict=True):
            hidden = _multiplied(part, layer.spec.scale, layer.mask, shape)
            outs.append(layer.product(x, hidden))
            kept.append(hidden)
        for_x, for_down = ctx.needs_input_grad[2:4]
        saved = [tensor for layer in layers for tensor in layer.saved(for_x)]
        ctx.save_for_backward(x if for_down else None, down if for_x else None, *kept, *saved)
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        x, down, *tensors = ctx.saved_tensors  # asked once: checkpointing gives each tensor once
        hiddens, layers = tensors[: len(grads)], list(_layers(ctx.specs, tensors[len(grads) :]))
        hidden_grads, others = [], []
        full, low, stored, storage = [], [], [], []
        for layer, hidden, grad in zip(layers, hiddens, grads, strict=True):
            up_grad = None
            if grad is None:  # nothing downstream contributes to the loss
                hidden_grads.append(torch.zeros_like(hidden))
            else:
                hidden_grad, up_grad = thin_grads(grad, hidden, layer.up)
                hidden_grads.append(_multiplied(hidden_grad, layer.spec.scale, layer.mask, ctx.shape))
            others += [up_grad, *[None] * (2 + len(layer.stored))]
            if grad is None or down is None:
                continue
            if (columns := layer.low_input_grad(grad)) is not None:
                low.append(columns)
                continue
            full.append(grad)
            stored += layer.stored
            storage.append(layer.spec.storage)
        hidden_grad = hidden_grads[0] if len(layers) == 1 else torch.cat(hidden_grads, dim=1)
        x_grad = None
        if down is not None:
            x_grad = sum(low, input_grad_op(full, stored, "\n".join(storage), hidden_grad, down))
        down_grad = None if x is None else hidden_grad.t() @ x
        return None, None, x_grad, down_grad, *others


def lora_linears(
    x: Tensor, frozen: Sequence[FrozenLinear], down: Tensor, updates: Sequence[Update], shape: torch.Size
) -> tuple[Tensor, ...]:
    """x (rows, in) → of each Linear (rows, out).

    down: (ranks, in), of all updates. shape: (B, tokens) of the rows.
    """
    if any(one.meter is not None or one.pre_quant_scale is not None for one in frozen):
        parts = linear(x, down).split([update.up.shape[1] for update in updates], dim=1)
        hiddens = [_multiplied(part, u.scale, u.mask, shape) for part, u in zip(parts, updates, strict=True)]
        return tuple(
            added_product(one, x, hidden, u.up) for one, hidden, u in zip(frozen, hiddens, updates, strict=True)
        )
    specs, tensors = [], []
    for one, update in zip(frozen, updates, strict=True):
        spec, own = _spec(one, update, x)
        specs.append(spec)
        tensors += own
    return _LoraLinears.apply(tuple(specs), tuple(shape), x, down, *tensors)


def _spec(frozen: FrozenLinear, update: Update, x: Tensor) -> tuple[_Spec, list[Tensor | None]]:
    products = frozen.products if len(x) >= LEAST_ROWS else None
    stored, storage = stored_tensors(frozen)
    spec = _Spec(update.up.shape[1], update.scale, len(stored), storage, frozen.layout, products)
    return spec, [update.up, update.mask, frozen.bias, *stored]


class _AddedProduct(torch.autograd.Function):
    """y of one Linear, for x and hidden."""

    @staticmethod
    def forward(ctx, spec, x, hidden, *tensors):
        ctx.spec = spec
        (layer,) = _layers([spec], tensors)
        out = layer.product(x, hidden)
        ctx.save_for_backward(hidden, *layer.saved(ctx.needs_input_grad[1]))
        return out

    @staticmethod
    def backward(ctx, grad):
        hidden, *tensors = ctx.saved_tensors
        (layer,) = _layers([ctx.spec], tensors)
        nothing = [None] * (2 + len(layer.stored))
        hidden_grad, up_grad = thin_grads(grad.reshape(len(hidden), -1), hidden, layer.up)
        if not ctx.needs_input_grad[1]:
            return None, None, hidden_grad, up_grad, *nothing
        columns = layer.low_input_grad(grad)
        return None, layer.weight.apply_transposed(grad) if columns is None else columns, hidden_grad, up_grad, *nothing


def added_product(frozen: FrozenLinear, x: Tensor, hidden: Tensor, up: Tensor) -> Tensor:
    """x (rows, in) → (rows, out): the frozen Linear, and hidden·upᵀ.

    hidden: (n, rank), up: (m, rank), n·m = rows·out: the update may be of the output cut into shorter rows.
    """
    if frozen.products is not None and frozen.meter is not None:
        y = frozen.apply(x)  # which others keep, to measure it
        return torch.addmm(y.view(-1, len(up)), hidden, up.t()).view(y.shape)
    if frozen.pre_quant_scale is not None:
        x = x * frozen.pre_quant_scale.to(x.dtype)
    spec, tensors = _spec(frozen, Update(up), x)
    return _AddedProduct.apply(spec, x, hidden, *tensors)
