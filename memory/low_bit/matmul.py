"""Low-precision matmuls on stored weights: int8 · int8 and fp8 · fp8, forward and backward.

x and dy are quantised per row at each use; the weight is multiplied as stored. In the backward, the scales of its
output channels are folded into dy before quantising it, so that their spread costs no accuracy, and the weight's bytes
are transposed for the single matmul: only the stored weight is saved for backward and kept.

The int8 matmul is comfy-kitchen's op, which rotates and quantises x and scales the result in its own kernels. Its
Python function can't be used: on the CPU its gradients are wrong. The fp8 matmul is torch's, with one scale per tensor.
Quantising x for it, and dy for both, takes plain operations, which a compiler fuses with the preceding ones.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

FULL, INT8, FP8 = "full", "int8", "fp8"
OFF, AUTO = "off", "auto"
LOW_BIT_MATMULS = (OFF, INT8, FP8, AUTO)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Compute dtypes that the low-precision matmuls support."""

# A call with fewer rows runs a full-precision matmul: it is bound by reading the weight, and the int8 and fp8 kernels
# pad their rows to this or more.
LEAST_ROWS = 32
MULTIPLE = 16  # required of both dimensions of a weight

_AT_ONCE = 1 << 22  # elements of a result compared at once, in fp32
_LARGEST_FP8 = 448.0  # of e4m3; casts do not saturate to it
_LEAST_SCALE = 1e-30  # used for a row of zeros


class Products(NamedTuple):
    """Matmul precisions of one frozen Linear.

    forward: of x and the weight, FULL, INT8 or FP8.
    backward: of dy and the weight.
    hadamard_size: size of the Hadamard matrices that the stored weight is rotated by (ConvRot), 0 without rotation.
    """

    forward: str = FULL
    backward: str = FULL
    hadamard_size: int = 0


class ErrorMeter:
    """Measures the error of a layer's low-precision matmuls against full precision, over all calls.

    sums: ‖low − full‖² and ‖full‖² of each channel of the outputs, without bias, and of the input's gradients, (2, n)
        each; on the device.
    """

    def __init__(self, device: torch.device):
        self.sums = [torch.zeros(2, 1, device=device), torch.zeros(2, 1, device=device)]

    @torch.no_grad()
    def add(self, back: bool, low: Tensor, full: Tensor) -> None:
        """Add a call, (…, n), unless its full result is not finite, as fp16 gradients may be at first."""
        channels = full.shape[-1]
        rows = max(1, _AT_ONCE // channels)
        squares = self.sums[back].new_zeros(2, channels)
        splits = (tensor.reshape(-1, channels).split(rows) for tensor in (low, full))
        for part, reference in zip(*splits, strict=True):
            wide = reference.float()
            squares += torch.stack(((part.float() - wide).square().sum(0), wide.square().sum(0)))
        self.sums[back] = self.sums[back] + torch.where(squares[1].sum().isfinite(), squares, 0.0)

    def errors(self) -> tuple[float, float]:
        """Return the error of forward and backward; 0 if nothing was measured, NaN if not finite.

        The larger of two: ‖low − full‖ / ‖full‖ over all channels, and the mean of the same per channel, each clamped
        to 1. One channel a thousand times larger would dominate the first, whatever the error of the others.
        """
        forward, backward = (_error(*sums.double().cpu()) for sums in self.sums)
        return forward, backward


def _error(errors: Tensor, sizes: Tensor) -> float:
    """Return the relative error. errors, sizes: squares per channel, (n,)."""
    together = (errors.sum() / sizes.sum().clamp(min=_LEAST_SCALE)).sqrt()
    # A channel of zeros that stays zeros is exact.
    apart = (errors / sizes.clamp(min=_LEAST_SCALE)).sqrt().clamp(max=1.0).mean()
    return float(torch.maximum(together, apart))


@functools.cache
def _hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return ConvRot's rotation, (size, size): the Kronecker power of a regular Hadamard matrix of order 4, over √size.

    It is symmetric and its own inverse.
    """
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], device=device)
    power = functools.reduce(torch.kron, [four] * round(math.log(size, 4)))
    return (power / math.sqrt(size)).to(dtype)


def turn(x: Tensor, size: int) -> Tensor:
    """Rotate groups of `size` elements of the last axis, or rotate them back."""
    return (x.unflatten(-1, (-1, size)) @ _hadamard(size, x.device, x.dtype)).flatten(-2)


# int8

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of comfy-kitchen's op


def _int8_product(
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
    return torch_int8_product(x, codes, scale, bias, hadamard_size, dtype)


def torch_int8_product(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, hadamard_size: int, dtype: torch.dtype
) -> Tensor:
    """Multiply as `comfy_kitchen.int8_linear` does, by torch._int_mm, for a comfy-kitchen without that op."""
    rows = x.reshape(-1, x.shape[-1])
    rows = (turn(rows, hadamard_size) if hadamard_size else rows).float()
    steps = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=_LEAST_SCALE)
    sums = torch._int_mm((rows / steps).round().clamp(-128, 127).to(torch.int8), codes.t())
    y = sums.float() * (steps * scale.reshape(1, -1))
    return (y if bias is None else y + bias.float()).to(dtype).view(*x.shape[:-1], len(codes))


@torch.library.custom_op("tessera::int8_matmul_back", mutates_args=())
def int8_matmul_back(grad: Tensor, codes: Tensor, scale: Tensor, hadamard_size: int, dtype: torch.dtype) -> Tensor:
    """Multiply grad, (…, out), by int8 codes (out, in) → (…, in) in `dtype`. scale: fp32, a scalar."""
    columns = _int8_product(grad, codes.t().contiguous(), scale, None, 0, dtype)
    # The weight is rotated along its input axis: the matmul with dy needs no rotation, and yields a rotated dx.
    return turn(columns, hadamard_size) if hadamard_size else columns


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


def _fp8_product(codes: Tensor, right: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
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
    y = _fp8_product(codes.reshape(-1, codes.shape[-1]).contiguous(), weight.t(), scale if one_scale else None, dtype)
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
    return _fp8_product(codes.contiguous(), weight.t().contiguous().t(), None, dtype)


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


@torch.library.custom_op("tessera::low_linear", mutates_args=())
def _low_linear(
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
        return _int8_product(x, weight, scale, bias, hadamard_size, x.dtype)
    full: Tensor = (
        torch.ops.tessera.stored_linear(x, weight, scale, bias)
        if layout is None
        else torch.ops.tessera.quantised_linear(x, [weight, scale], bias, layout)
    )
    return full


@_low_linear.register_fake
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
        return low_input_grad(grad, weight, scale, ctx.backward, ctx.hadamard_size), *none
    if ctx.layout is None:
        return torch.ops.tessera.stored_linear_input_grad(grad, weight, scale), *none
    return torch.ops.tessera.quantised_linear_input_grad(grad, [weight, scale], ctx.layout), *none


def low_input_grad(grad: Tensor, weight: Tensor, scale: Tensor | None, product: str, hadamard_size: int) -> Tensor:
    """Compute the input gradient, (…, out) → (…, in), by an INT8 or FP8 matmul; other arguments as in `low_linear`."""
    if product == FP8:
        return _fp8_input_grad(grad, weight, scale)
    assert scale is not None
    return _int8_input_grad(grad, weight, scale, hadamard_size)


torch.library.register_autograd("tessera::low_linear", _input_grad, setup_context=_save)


def _flops(weight: Tensor, shape: Any) -> int:
    """Return 2·rows·in·out, as for a plain matmul. The partitioner decides by it which results to save."""
    return 2 * math.prod(shape[:-1]) * weight.numel()


register_flop_formula(torch.ops.tessera.low_linear, get_raw=True)(
    lambda *inputs, **_: _flops(inputs[3], inputs[0].shape)
)
for _op in (torch.ops.tessera.int8_matmul_back, torch.ops.tessera.fp8_matmul_back):
    register_flop_formula(_op, get_raw=True)(lambda grad, weight, *_, **__: _flops(weight, grad.shape))


def low_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, layout: str | None, products: Products
) -> Tensor:
    """Multiply x, (…, in) → (…, out), in the precisions of `products`; only weight and scale are saved for backward.

    A custom op, opaque for the same reason as the full-precision one. scale: fp32, a scalar or (out, 1).
    layout: the text of the weight's `Format` if it has one.
    """
    # Quantised outside the op, and passed in along with x, through which the gradient flows.
    rounded = _to_fp8(x.detach()) if products.forward == FP8 else (None, None)
    return _low_linear(x, *rounded, weight, scale, bias, layout, *products)
