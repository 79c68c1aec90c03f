"""Low-bit matmuls of frozen Linears: int8 · int8 and fp8 · fp8 on the weight as it is stored.

A trained Linear runs three matmuls in a step, with x (rows, in), W (out, in) and dy (rows, out):

    y  = x @ Wᵀ      forward
    dx = dy @ W      backward, for the layers before
    dW = dyᵀ @ x     backward, for the optimizer

W is frozen here, so there is no dW; an adapter has small matmuls of its own, in the compute dtype. The other two
multiply 8-bit codes, which the hardware does at two to four times the rate of 16 bits, and scale the result:

    y  = (codes(x) @ codes(W)ᵀ) · scale(x) · scale(W)
    dx = (codes(dy · scale(W)) @ codes(W)) · scale(dy · scale(W))

Scales, all fp32:

| of | how many | from |
|---|---|---|
| x and dy | one per row, a token | its largest absolute value over 127 (int8) or 448 (fp8 e4m3), at each use |
| W | one, or one per output channel | the file, or `quantize` |

Forward, scale(W) belongs to the columns of y and multiplies the result. In backward, the sum runs over the output
channels, so the scales of these are folded into dy before quantising it: their spread costs no accuracy.

Rotation: a ConvRot weight is stored as W·H, H a Hadamard matrix for each group of inputs, which spreads outliers over
the group. x is rotated likewise before it is quantised, (x·H) @ (W·H)ᵀ = x @ Wᵀ. dy needs no rotation, and dx comes out
rotated and is rotated back.

Layouts: W is stored (out, in), row-major, and forward needs its transpose, which is a view. Backward needs W itself
where kernels take a transposed right side only, so its bytes are transposed for the single matmul, inside an opaque
op: a partitioner would otherwise make that copy in the forward and save it. Only the stored weight is kept.

Kernels: int8 is comfy-kitchen's op, which rotates and quantises x and scales the result in its own kernels. Its Python
function can't be used: on the CPU its gradients are wrong. fp8 is `torch._scaled_mm` with one scale per tensor, which
every card supports. Quantising x for it, and dy for both, takes plain operations, which a compiler fuses with the
preceding ones.

Unlike torchao's `float8` and int8 training, nothing is held in a second precision. There, W is trained: it stays in 16
or 32 bits, is quantised at each step, and all three matmuls run in 8 bits. Here W has been quantised once and for all.
And there, layers are chosen by name or size; here by the error that they show on a run's first micro-batches, for each
direction (`train/blocks/low_bit_policy.py`).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .hadamard import rotate

FULL = "full"
INT8 = "int8"
FP8 = "fp8"
OFF, AUTO = "off", "auto"
LOW_BIT_MATMULS = (OFF, INT8, FP8, AUTO)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Compute dtypes that the low-precision matmuls support."""

# A call with fewer rows runs a full-precision matmul: it is bound by reading the weight, and the int8 and fp8 kernels
# pad their rows to this or more.
LEAST_ROWS = 32
MULTIPLE = 16  # required of both dimensions of a weight

_LARGEST_FP8 = 448.0  # of e4m3; casts do not saturate to it
_LEAST_SCALE = 1e-30  # used for a row of zeros


class LowBitMatmul(NamedTuple):
    """Matmul precisions of one frozen Linear.

    forward: of x and the weight, FULL, INT8 or FP8.
    backward: of dy and the weight.
    hadamard_size: size of the Hadamard matrices that the stored weight is rotated by (ConvRot), 0 without rotation.
    """

    forward: str = FULL
    backward: str = FULL
    hadamard_size: int = 0


# int8

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of comfy-kitchen's op


def _int8_matmul(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, hadamard_size: int, dtype: torch.dtype
) -> Tensor:
    """Rotate and quantise x, (…, k), and multiply it by int8 codes (n, k), → (…, n) in `dtype`.

    scale: fp32, one or one for each of the n. bias: (n,).
    """
    kitchen: Any = torch.ops.comfy_kitchen
    if hasattr(kitchen, "int8_linear"):
        out: Tensor = kitchen.int8_linear(
            x, codes, scale, bias, _DTYPE_CODES[dtype], hadamard_size > 0, hadamard_size or 256
        )
        return out
    return torch_int8_matmul(x, codes, scale, bias, hadamard_size, dtype)


def torch_int8_matmul(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, hadamard_size: int, dtype: torch.dtype
) -> Tensor:
    """Multiply as `comfy_kitchen.int8_linear` does, by torch._int_mm, for a comfy-kitchen without that op.

    x: (…, k), codes: (n, k) int8, bias: (n,) or None → (…, n) in `dtype`.
    scale: fp32, one or one for each of the n.
    """
    rows = x.reshape(-1, x.shape[-1])
    rows = (rotate(rows, hadamard_size) if hadamard_size else rows).float()
    steps = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=_LEAST_SCALE)
    sums = torch._int_mm((rows / steps).round().clamp(-128, 127).to(torch.int8), codes.t())
    y = sums.float() * (steps * scale.reshape(1, -1))
    return (y if bias is None else y + bias.float()).to(dtype).view(*x.shape[:-1], len(codes))


@torch.library.custom_op("tessera::int8_matmul_back", mutates_args=())
def int8_matmul_back(grad: Tensor, codes: Tensor, scale: Tensor, hadamard_size: int, dtype: torch.dtype) -> Tensor:
    """Multiply grad, (…, out), by int8 codes (out, in) → (…, in) in `dtype`. scale: fp32, a scalar."""
    columns = _int8_matmul(grad, codes.t().contiguous(), scale, None, 0, dtype)
    # The weight is rotated along its input axis: the matmul with dy needs no rotation, and yields a rotated dx.
    return rotate(columns, hadamard_size) if hadamard_size else columns


@int8_matmul_back.register_fake
def _(grad, codes, scale, hadamard_size, dtype):
    return grad.new_empty(*grad.shape[:-1], codes.shape[1], dtype=dtype)


def _int8_input_grad(grad: Tensor, codes: Tensor, scale: Tensor, hadamard_size: int) -> Tensor:
    """Compute the input gradient. grad: (…, out) → (…, in). scale: fp32, a scalar or (out, 1)."""
    if scale.numel() == 1:
        return int8_matmul_back(grad, codes, scale, hadamard_size, grad.dtype)
    folded = grad.float() * scale.view(-1)
    # bf16 has fp32's range, and its rounding is a tenth of an int8 step: half the bytes to write.
    folded = folded.to(grad.dtype) if grad.dtype == torch.bfloat16 else folded
    return int8_matmul_back(folded, codes, torch.ones((), device=grad.device), hadamard_size, grad.dtype)


# fp8


def _to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row of (…, k) to e4m3 codes, with fp32 scales (…, 1)."""
    scales = (rows.abs().amax(-1, keepdim=True).float() / _LARGEST_FP8).clamp(min=_LEAST_SCALE)
    codes = (rows.float() / scales).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return codes.to(torch.float8_e4m3fn), scales


def _fp8_matmul(codes: Tensor, right: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply fp8 codes (m, k) by fp8 right (k, n), column-major → (m, n) for a result in `dtype`. scale: a scalar."""
    # One scale per tensor is supported everywhere by torch and cards. Unscaled sums of the codes exceed fp16's range.
    unit_scale = torch.ones((), device=codes.device)
    out_dtype = dtype if dtype == torch.bfloat16 else torch.float32
    return torch._scaled_mm(codes, right, unit_scale, unit_scale if scale is None else scale, out_dtype=out_dtype)


def _fp8_linear(
    codes: Tensor, steps: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply codes (…, in) with steps (…, 1) by the weight → (…, out) in `dtype`."""
    one_scale = scale is None or scale.numel() == 1
    y = _fp8_matmul(codes.reshape(-1, codes.shape[-1]).contiguous(), weight.t(), scale if one_scale else None, dtype)
    # Each line is one kernel, computed in fp32: its result is written in-place to y, or allocated in `dtype`.
    y = y if one_scale or scale is None else y.mul_(scale.view(1, -1))
    out, by_row = y if y.dtype == dtype else torch.empty_like(y, dtype=dtype), steps.view(-1, 1)
    if bias is None:
        torch.mul(y, by_row, out=out)
    else:
        torch.addcmul(bias, y, by_row, out=out)
    return out.view(*codes.shape[:-1], len(weight))


@torch.library.custom_op("tessera::fp8_matmul_back", mutates_args=())
def fp8_matmul_back(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply fp8 codes (m, out) by fp8 weight (out, in) → (m, in) for a result in `dtype`."""
    # Cards require a column-major right side. Outside an opaque op, a partitioner would make the transposed copy in the
    # forward and save it.
    return _fp8_matmul(codes.contiguous(), weight.t().contiguous().t(), None, dtype)


@fp8_matmul_back.register_fake
def _(codes, weight, dtype):
    out_dtype = dtype if dtype == torch.bfloat16 else torch.float32
    return codes.new_empty(codes.shape[0], weight.shape[1], dtype=out_dtype)


def _fp8_input_grad(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Compute the input gradient. grad: (…, out) → (…, in). scale: fp32, a scalar or (out, 1)."""
    rows = grad.reshape(-1, grad.shape[-1])
    codes, steps = _to_fp8(rows if scale is None else rows.float() * scale.view(1, -1))
    columns = fp8_matmul_back(codes, weight, grad.dtype) * steps
    return columns.to(grad.dtype).view(*grad.shape[:-1], weight.shape[1])


# Both


@torch.library.custom_op("tessera::low_bit_linear", mutates_args=())
def _low_bit_linear(
    x: Tensor,
    codes: Tensor | None,
    steps: Tensor | None,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    layout: str | None,
    forward: str,
    backward: str,
    hadamard_size: int,
) -> Tensor:
    """Multiply x, (…, in) → (…, out). codes, steps: x quantised by `_to_fp8` if `forward` is FP8."""
    if codes is not None and steps is not None:
        return _fp8_linear(codes, steps, weight, scale, bias, x.dtype)
    if forward == INT8 and scale is not None:
        return _int8_matmul(x, weight, scale, bias, hadamard_size, x.dtype)
    full: Tensor = (
        torch.ops.tessera.stored_linear(x, weight, scale, bias)
        if layout is None
        else torch.ops.tessera.quantised_linear(x, [weight, scale], bias, layout)
    )
    return full


@_low_bit_linear.register_fake
def _(x, codes, steps, weight, *_):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    weight, scale = inputs[3:5]
    ctx.layout, _, ctx.backward, ctx.hadamard_size = inputs[6:]
    ctx.save_for_backward(weight, scale)


def _input_grad(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 9
    if grad is None:  # nothing downstream contributes to the loss
        return None, *none
    weight, scale = ctx.saved_tensors
    if ctx.backward != FULL:
        return low_bit_input_grad(grad, weight, scale, ctx.backward, ctx.hadamard_size), *none
    if ctx.layout is None:
        return torch.ops.tessera.stored_linear_input_grad(grad, weight, scale), *none
    return torch.ops.tessera.quantised_linear_input_grad(grad, [weight, scale], ctx.layout), *none


def low_bit_input_grad(
    grad: Tensor, weight: Tensor, scale: Tensor | None, precision: str, hadamard_size: int
) -> Tensor:
    """Compute the input gradient, (…, out) → (…, in), by an INT8 or FP8 matmul; see `low_bit_linear`."""
    if precision == FP8:
        return _fp8_input_grad(grad, weight, scale)
    assert scale is not None
    return _int8_input_grad(grad, weight, scale, hadamard_size)


torch.library.register_autograd("tessera::low_bit_linear", _input_grad, setup_context=_save)


def _flops(weight: Tensor, shape: Any) -> int:
    """Return 2·rows·in·out, as for a plain matmul. The partitioner decides by it which results to save."""
    return 2 * math.prod(shape[:-1]) * weight.numel()


register_flop_formula(torch.ops.tessera.low_bit_linear, get_raw=True)(
    lambda *inputs, **_: _flops(inputs[3], inputs[0].shape)
)
for _op in (torch.ops.tessera.int8_matmul_back, torch.ops.tessera.fp8_matmul_back):
    register_flop_formula(_op, get_raw=True)(lambda grad, weight, *_, **__: _flops(weight, grad.shape))


def low_bit_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, layout: str | None, low_bit: LowBitMatmul
) -> Tensor:
    """Multiply x, (…, in) → (…, out), in the precisions of `low_bit`; only weight and scale are saved for backward.

    A custom op, opaque for the same reason as the full-precision one. scale: fp32, a scalar or (out, 1).
    layout: the text of the weight's `Format` if it has one.
    """
    # Quantised outside the op, and passed in along with x, through which the gradient flows.
    rounded = _to_fp8(x.detach()) if low_bit.forward == FP8 else (None, None)
    return _low_bit_linear(x, *rounded, weight, scale, bias, layout, *low_bit)
