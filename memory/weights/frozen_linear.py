"""Frozen linear: save only the stored (quantised) weight for backward and dequantise it again there.

ComfyUI holds a weight in the compute dtype, in a narrower one (fp8 with or without a scale), or quantised in a layout
of its own (int8, nvfp4, mxfp8, int4, fp8 with a scale for each row). Values of the last are ComfyUI's: the layout's
class dequantises into the dtype of the matmul's input, as core does if a device cannot multiply in the format itself.
Those of a GGUF file are ggml's (see `formats.gguf_blocks`), plus the product of two low-rank factors if LoRAs are
applied.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from comfy import quant_ops
from comfy.quant_ops import QuantizedTensor
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import register_flop_formula

from ..low_bit.dequantize import core_has_kernel, dequantize, dequantize_by_triton
from ..low_bit.error_meter import ErrorMeter
from ..low_bit.matmul import (
    FP8,
    FP8_DTYPES,
    INT8,
    LEAST_ROWS,
    LowBitMatmul,
    low_bit_input_grad,
    low_bit_linear,
)
from .formats.gguf_blocks import FORMATS, dequantize_blocks
from .formats.stored_format import read_format

# Layouts of one-byte codes with separate scales, and the function of comfy-kitchen that dequantises each.
_CODES = {
    "TensorCoreMXFP8Layout": "dequantize_mxfp8",
    "TensorWiseINT8Layout": "dequantize_int8_simple_dtype",
}


def dequantize_parts(parts: Sequence[Tensor], layout: str, dtype: torch.dtype) -> Tensor:
    """Dequantise to (out, in) in `dtype`: GGUF's blocks here, others by ComfyUI's class or, if that takes several
    kernels, by one kernel with the same values.

    parts: the stored data, then the layout's tensors. layout: the text of its `Format`.
    """
    stored = read_format(layout)
    if stored.layout in FORMATS:
        values = dequantize_blocks(parts[0], stored.layout, stored.shape, dtype)
        return values.addmm_(parts[1].to(dtype), parts[2].to(dtype)) if stored.tensors else values
    if stored.layout.startswith("TensorCoreFP8"):  # by rows: core's kernel takes one scale only
        return dequantize(parts[0], parts[1], dtype)
    function = _CODES.get(stored.layout)
    if function is not None and not stored.constants.get("convrot") and not core_has_kernel(function):
        full = dequantize_by_triton(parts[0], parts[1], stored.shape, dtype, mx=function == "dequantize_mxfp8")
        if full is not None:
            return full
    tensors = dict(zip(stored.tensors, parts[1:], strict=True))
    kind: Any = quant_ops.get_layout_class(stored.layout)
    params = kind.Params(**tensors, **stored.constants, orig_dtype=dtype, orig_shape=stored.shape)
    # Layouts with scales in a wider dtype dequantise to that one.
    return QuantizedTensor(parts[0], stored.layout, params).dequantize().to(dtype)


class FrozenLinear(NamedTuple):
    """Weights of one frozen Linear.

    weight: (out, in) as stored or in the compute dtype; with a layout its data, in the layout's shape.
    scale: fp32 scalar of a scaled fp8 weight.
    bias: (out,).
    parts: the layout's tensors.
    layout: the text of a `Format` for weights quantised otherwise.
    pre_quant_scale: (in,) or (1,), by which x is first multiplied (ModelOpt's smoothing).
    low_bit: matmul precisions; None runs full-precision matmuls forward and backward.
    meter: measures the error of `low_bit` while the layer itself runs full-precision matmuls.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None
    parts: tuple[Tensor, ...] = ()
    layout: str | None = None
    pre_quant_scale: Tensor | None = None
    low_bit: LowBitMatmul | None = None
    meter: ErrorMeter | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        if self.layout is not None:
            return read_format(self.layout).shape
        rows, columns = self.weight.shape
        return rows, columns

    def apply(self, x: Tensor) -> Tensor:
        """Multiply x, (…, in) → (…, out); only the stored weight is saved for backward."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if self.low_bit is not None and x.numel() >= LEAST_ROWS * x.shape[-1]:
            if self.meter is not None:
                return self._measured(x, self.low_bit, self.meter)
            return low_bit_linear(x, self.weight, self._scale, self.bias, self.layout, self.low_bit)
        bias = None if self.bias is None else self.bias.to(x.dtype)  # their dtypes differ when a check computes in fp32
        if self.layout is not None:
            return quantised_linear(x, [self.weight, *self.parts], bias, self.layout)
        return frozen_linear(x, self.weight, self.scale, bias)

    @property
    def _scale(self) -> Tensor | None:
        return self.parts[0] if self.layout is not None else self.scale

    def _measured(self, x: Tensor, low_bit: LowBitMatmul, meter: ErrorMeter) -> Tensor:
        """Multiply in full precision, and measure the error of `low_bit` forward and, in a gradient hook, backward."""
        plain = self._replace(bias=None, pre_quant_scale=None, low_bit=None, meter=None)
        y = plain.apply(x)
        with torch.no_grad():
            meter.add(False, low_bit_linear(x, self.weight, self._scale, None, self.layout, low_bit), y)

        def measure_back(dy: Tensor | None) -> None:
            if dy is None:  # nothing downstream contributes to the loss
                return
            low = low_bit_input_grad(dy, self.weight, self._scale, low_bit.backward, low_bit.hadamard_size)
            meter.add(True, low, plain.apply_transposed(dy.reshape(-1, dy.shape[-1])).view(x.shape))

        if y.requires_grad:
            y.register_hook(measure_back)
        return y if self.bias is None else y + self.bias

    @property
    def format_name(self) -> str:
        """Return the name of the storage format, for messages."""
        if self.layout is None:
            return str(self.weight.dtype)[6:]
        return read_format(self.layout).layout.removeprefix("TensorCore").removesuffix("Layout")

    def low_bit_matmul(self, precision: str) -> LowBitMatmul | None:
        """Return the matmuls of `precision`, INT8 or FP8, on the weight as stored; None if its format has none."""
        if precision == INT8:
            return self._int8_matmul()
        return LowBitMatmul(FP8, FP8) if self._is_fp8() else None

    def _int8_matmul(self) -> LowBitMatmul | None:
        """Return the int8 matmuls, which rotate x as the weight has been rotated."""
        if self.layout is None:
            return None
        stored = read_format(self.layout)
        if stored.layout != "TensorWiseINT8Layout":
            return None
        hadamard_size = stored.constants["convrot_groupsize"] if stored.constants["convrot"] else None
        return LowBitMatmul(INT8, INT8, int(hadamard_size or 0))

    def _is_fp8(self) -> bool:
        """Return whether the weight is fp8 with at most one scale."""
        if self.layout is None:
            return self.weight.dtype in FP8_DTYPES
        stored = read_format(self.layout)
        return stored.layout.startswith("TensorCoreFP8") and stored.tensors == ("scale",)

    def apply_transposed(self, rows: Tensor) -> Tensor:
        """Compute rows · W, (n, out) → (n, in), without a gradient."""
        if self.layout is not None:
            columns = quantised_linear_input_grad(rows, [self.weight, *self.parts], self.layout)
        elif self.weight.dtype == rows.dtype and self.scale is None:
            columns = rows @ self.weight
        else:
            columns = stored_linear_input_grad(rows, self.weight, self.scale)
        return columns if self.pre_quant_scale is None else columns * self.pre_quant_scale.to(columns.dtype)

    def full(self) -> Tensor:
        """Return (out, in) in fp32, times `pre_quant_scale`; the weight itself if it is stored so."""
        if self.layout is not None:
            weight = dequantize_parts((self.weight, *self.parts), self.layout, torch.float32)
        else:
            weight = dequantize(self.weight, self.scale, torch.float32)
        return weight if self.pre_quant_scale is None else weight * self.pre_quant_scale.float()

    def to(self, device: torch.device) -> "FrozenLinear":
        """Return the same weights on another device."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return self._replace(
            weight=self.weight.to(device),
            scale=move(self.scale),
            bias=move(self.bias),
            parts=tuple(part.to(device) for part in self.parts),
            pre_quant_scale=move(self.pre_quant_scale),
        )


def _register_opaque_linear(name: str, bias: int, shape: Callable[..., tuple[int, int]]) -> None:
    """Register the fake kernels, the gradient and the FLOPs of an opaque frozen linear and of its input gradient.

    Opaque on purpose: a plain cast followed by a matmul makes autograd, and the partitioner of a compiled graph, save
    the cast weight for backward, which for an fp8 model is a full-size copy of it among the activations. These ops
    save the stored weight and dequantise again in backward.

    name: of the op (x, *stored including the bias) -> (…, out), of which only x has a gradient. The name of the input
        gradient's op, (grad, *stored) -> (…, in), ends in _input_grad.
    bias: index of the bias among the inputs.
    shape: (*stored) -> (out, in) of the weight.
    """
    linear, input_grad = (getattr(torch.ops.tessera, op) for op in (name, f"{name}_input_grad"))

    def stored(inputs: Sequence[Any]) -> list[Any]:
        return [value for index, value in enumerate(inputs) if index not in (0, bias)]

    def fake(*inputs):
        return inputs[0].new_empty(*inputs[0].shape[:-1], shape(*stored(inputs))[0])

    def fake_input_grad(grad, *weights):
        return grad.new_empty(*grad.shape[:-1], shape(*weights)[1])

    def save(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.no_grads = [[None] * len(value) if isinstance(value, list | tuple) else None for value in inputs[1:]]
        leaves, ctx.spec = tree_flatten(stored(inputs))
        # save_for_backward, needed for autograd's hooks and checks, accepts only tensors and None.
        ctx.constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in leaves))

    def backward(ctx, grad):
        if grad is None:  # nothing downstream contributes to the loss
            return None, *ctx.no_grads
        leaves = [c if tensor is None else tensor for tensor, c in zip(ctx.saved_tensors, ctx.constants, strict=True)]
        return input_grad(grad, *tree_unflatten(leaves, ctx.spec)), *ctx.no_grads

    def flops(x, *weights, **_) -> int:
        """Return 2·rows·in·out, as for a plain matmul. The partitioner decides by it which results to save and which to
        recompute; an op without a formula counts as free."""
        rows, columns = shape(*weights)
        return 2 * math.prod(x.shape[:-1]) * rows * columns

    torch.library.register_fake(f"tessera::{name}", fake)
    torch.library.register_fake(f"tessera::{name}_input_grad", fake_input_grad)
    torch.library.register_autograd(f"tessera::{name}", backward, setup_context=save)
    register_flop_formula(linear, get_raw=True)(lambda *inputs, **_: flops(inputs[0], *stored(inputs)))
    register_flop_formula(input_grad, get_raw=True)(flops)


@torch.library.custom_op("tessera::stored_linear", mutates_args=())
def stored_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply x, (…, in) → (…, out), by a weight stored in another dtype than x."""
    return torch.nn.functional.linear(x, dequantize(weight, scale, x.dtype), bias)


@torch.library.custom_op("tessera::stored_linear_input_grad", mutates_args=())
def stored_linear_input_grad(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Compute the gradient of `stored_linear` with respect to x. grad: (…, out) → (…, in)."""
    return grad @ dequantize(weight, scale, grad.dtype)


@torch.library.custom_op("tessera::quantised_linear", mutates_args=())
def quantised_linear(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, layout: str) -> Tensor:
    """Multiply x, (…, in) → (…, out), by a weight in one of ComfyUI's quantised layouts or GGUF's formats."""
    return torch.nn.functional.linear(x, dequantize_parts(parts, layout, x.dtype), bias)


@torch.library.custom_op("tessera::quantised_linear_input_grad", mutates_args=())
def quantised_linear_input_grad(grad: Tensor, parts: Sequence[Tensor], layout: str) -> Tensor:
    """Compute the gradient of `quantised_linear` with respect to x. grad: (…, out) → (…, in)."""
    return grad @ dequantize_parts(parts, layout, grad.dtype)


def _stored_shape(weight: Tensor, scale: Tensor | None) -> tuple[int, int]:
    rows, columns = weight.shape
    return rows, columns


def _quantised_shape(parts: Sequence[Tensor], layout: str) -> tuple[int, int]:
    return read_format(layout).shape


_register_opaque_linear("stored_linear", 3, _stored_shape)
_register_opaque_linear("quantised_linear", 2, _quantised_shape)


def frozen_linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply x, (…, in) → (…, out); only the stored weight is saved for backward."""
    if weight.dtype == x.dtype and scale is None:
        return torch.nn.functional.linear(x, weight, bias)
    return stored_linear(x, weight, scale, bias)
