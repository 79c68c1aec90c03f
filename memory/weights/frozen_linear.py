"""The linear layer over a frozen weight, which keeps nothing of it for backward but what is stored."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .quantised import dequantised, quantised_linear, quantised_linear_input_grad, read_format


class FrozenLinear(NamedTuple):
    """weight: (out, in) as stored or in the compute dtype; scale: fp32 scalar of a scaled fp8 weight; bias: (out,).

    layout: the text of a `quantised.Format` where ComfyUI holds the weight quantised otherwise; `weight` is then its
    data, of a shape of its own, and `parts` are the layout's tensors. pre_quant_scale: (in,) or (1,), what x is
    multiplied with first (ModelOpt's smoothing, in ComfyUI's own place of it).
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    parts: tuple[Tensor, ...] = ()
    layout: str | None = None
    pre_quant_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        if self.layout is not None:
            return read_format(self.layout).shape
        rows, columns = self.weight.shape
        return rows, columns

    def apply(self, x: Tensor) -> Tensor:
        """x: (…, in) → (…, out); nothing but the stored weight is kept for backward."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if self.layout is not None:
            return quantised_linear(x, [self.weight, *self.parts], self.bias, self.layout)
        return frozen_linear(x, self.weight, self.scale, self.bias)

    def apply_transposed(self, rows: Tensor) -> Tensor:
        """rows: (n, out) → (n, in), rows · W, without a gradient."""
        if self.layout is not None:
            columns = quantised_linear_input_grad(rows, [self.weight, *self.parts], self.layout)
        elif self.weight.dtype == rows.dtype and self.scale is None:
            columns = rows @ self.weight
        else:
            columns = stored_linear_input_grad(rows, self.weight, self.scale)
        return columns if self.pre_quant_scale is None else columns * self.pre_quant_scale.to(columns.dtype)

    def full(self) -> Tensor:
        """(out, in): the weight in fp32, with what x is multiplied by first; shared where it is stored so."""
        if self.layout is not None:
            weight = dequantised((self.weight, *self.parts), self.layout, torch.float32)
        else:
            weight = _dequantise(self.weight, self.scale, torch.float32)
        return weight if self.pre_quant_scale is None else weight * self.pre_quant_scale.float()

    def to(self, device: torch.device) -> "FrozenLinear":
        """The same weights on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return self._replace(
            weight=self.weight.to(device),
            scale=moved(self.scale),
            bias=moved(self.bias),
            parts=tuple(part.to(device) for part in self.parts),
            pre_quant_scale=moved(self.pre_quant_scale),
        )


def _dequantise(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    full = weight.to(dtype)
    return full if scale is None else full * scale.to(dtype)


@torch.library.custom_op("tessera::stored_linear", mutates_args=())
def stored_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """`linear` on a weight stored in another dtype than x.

    Opaque on purpose: a plain cast followed by a matmul makes autograd, and the partitioner of a compiled graph, keep
    the cast weight for backward, which for an fp8 model is a full-size copy of it among the activations. This op saves
    the stored weight and casts again in backward.
    """
    return torch.nn.functional.linear(x, _dequantise(weight, scale, x.dtype), bias)


@torch.library.custom_op("tessera::stored_linear_input_grad", mutates_args=())
def stored_linear_input_grad(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """The gradient of `stored_linear` with respect to x."""
    return grad @ _dequantise(weight, scale, grad.dtype)


@stored_linear.register_fake
def _(x, weight, scale, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@stored_linear_input_grad.register_fake
def _(grad, weight, scale):
    return grad.new_empty(*grad.shape[:-1], weight.shape[1])


def _save_stored(ctx, inputs, output) -> None:
    _, weight, scale, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, scale)


def _stored_linear_backward(ctx, grad):
    if grad is None:  # what comes of it goes nowhere
        return None, None, None, None
    weight, scale = ctx.saved_tensors
    return stored_linear_input_grad(grad, weight, scale), None, None, None


def _flops(x_shape, weight_shape, *_, out_shape=None, **__) -> int:
    """2·rows·in·out, as for a plain matmul. The partitioner weighs by it what to keep and what to compute again; an op
    without a formula counts as free."""
    return 2 * math.prod(x_shape) * (math.prod(weight_shape) // x_shape[-1])


register_flop_formula(torch.ops.tessera.stored_linear)(_flops)
register_flop_formula(torch.ops.tessera.stored_linear_input_grad)(_flops)

stored_linear.register_autograd(_stored_linear_backward, setup_context=_save_stored)


def frozen_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """x: (…, in) → (…, out); nothing but the stored weight is kept for backward."""
    if weight.dtype == x.dtype and scale is None:
        return torch.nn.functional.linear(x, weight, bias)
    return stored_linear(x, weight, scale, bias)
