"""Linears on weights that ComfyUI holds quantised (int8, nvfp4, mxfp8, int4, fp8 with a scale for each row): what
training keeps of them, on the device and for backward, are the stored bytes.

The numbers are ComfyUI's own: the layout's class widens the weight, into the dtype of what it is multiplied with, as
core does where a device cannot multiply in the format itself.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from comfy import quant_ops
from comfy.quant_ops import QuantizedTensor
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# What a layout's parameters say of every weight; the rest are its own tensors and constants.
_OF_ALL = ("orig_dtype", "orig_shape")


class Format(NamedTuple):
    """How a weight is stored, less its tensors. layout: the name of ComfyUI's class; shape: (out, in) of the weight
    that the parts stand for; tensors: the names of the layout's tensors; constants: what else it has to know."""

    layout: str
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    constants: dict[str, bool | int | float | str | None]

    def text(self) -> str:
        """As the ops take it: a constant of the graph, equal for weights that are stored alike."""
        return json.dumps([self.layout, self.shape, self.tensors, self.constants], sort_keys=True)


@functools.cache
def read_format(text: str) -> Format:
    """What `Format.text` gave."""
    layout, shape, tensors, constants = json.loads(text)
    return Format(layout, tuple(shape), tuple(tensors), constants)


def format_of(weight: QuantizedTensor) -> Format | None:
    """How the weight is stored; None for one that cannot be put together again from its parts and constants, or whose
    parts are those of its transpose."""
    params = weight._params
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params) if f.name not in _OF_ALL}
    tensors = tuple(name for name, value in fields.items() if isinstance(value, Tensor))
    constants = {name: value for name, value in fields.items() if name not in tensors}
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in constants.values())
    if not plain or constants.get("transposed") or len(params.orig_shape) != 2:
        return None
    rows, columns = params.orig_shape
    return Format(weight._layout_cls, (int(rows), int(columns)), tensors, constants)


def dequantised(parts: Sequence[Tensor], layout: str, dtype: torch.dtype) -> Tensor:
    """(out, in) in `dtype`, by ComfyUI's class. parts: the stored data, then the layout's tensors; layout: the text of
    its `Format`."""
    stored = read_format(layout)
    tensors = dict(zip(stored.tensors, parts[1:], strict=True))
    kind: Any = quant_ops.get_layout_class(stored.layout)
    params = kind.Params(**tensors, **stored.constants, orig_dtype=dtype, orig_shape=stored.shape)
    return QuantizedTensor(parts[0], stored.layout, params).dequantize()


@torch.library.custom_op("tessera::quantised_linear", mutates_args=())
def quantised_linear(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, layout: str) -> Tensor:
    """x: (…, in) → (…, out). Opaque, as `stored_linear` is and for its reason: what waits for backward are `parts`."""
    return torch.nn.functional.linear(x, dequantised(parts, layout, x.dtype), bias)


@torch.library.custom_op("tessera::quantised_linear_input_grad", mutates_args=())
def quantised_linear_input_grad(grad: Tensor, parts: Sequence[Tensor], layout: str) -> Tensor:
    """grad: (…, out) → (…, in), the gradient of `quantised_linear` with respect to x."""
    return grad @ dequantised(parts, layout, grad.dtype)


@quantised_linear.register_fake
def _(x, parts, bias, layout):
    return x.new_empty(*x.shape[:-1], read_format(layout).shape[0])


@quantised_linear_input_grad.register_fake
def _(grad, parts, layout):
    return grad.new_empty(*grad.shape[:-1], read_format(layout).shape[1])


def _save_parts(ctx, inputs, output) -> None:
    _, parts, _, ctx.layout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*parts)


def _quantised_linear_backward(ctx, grad):
    parts = list(ctx.saved_tensors)
    none = [None] * len(parts), None, None
    if grad is None:  # what comes of it goes nowhere
        return None, *none
    return quantised_linear_input_grad(grad, parts, ctx.layout), *none


def _flops(x_shape, *rest, out_shape=None, **__) -> int:
    """2·rows·in·out, as for a plain matmul."""
    return 2 * math.prod(x_shape[:-1]) * math.prod(read_format(rest[-1]).shape)


register_flop_formula(torch.ops.tessera.quantised_linear)(_flops)
register_flop_formula(torch.ops.tessera.quantised_linear_input_grad)(_flops)

quantised_linear.register_autograd(_quantised_linear_backward, setup_context=_save_parts)
