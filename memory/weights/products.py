"""Products in low precision over stored bytes: int8 · int8 and fp8 · fp8, forward and back.

x and dy are rounded by rows at each use; the weight is multiplied as it is stored. Going back, the scales of its output
channels are folded into dy before that is rounded, so that no spread of them costs accuracy, and the bytes are laid the
other way round for the one product: what is saved for backward, and kept at all, is the stored weight.

The int8 product is comfy-kitchen's op, which turns and rounds x and scales the result in its own kernels. Its Python
function is no way to it: on the CPU that gives wrong gradients. fp8's is torch's, with one scale for each tensor. To
round x for it, and dy for both, are plain operations, which a compiler joins with what comes before.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

FULL, INT8, FP8, AUTO = "full", "int8", "fp8", "auto"
PRODUCTS = (FULL, INT8, FP8, AUTO)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Compute dtypes that the products take."""

# A call with fewer rows multiplies in full: it takes as long as its weight takes to read, and the int8 and fp8 kernels
# pad their rows to this or more.
LEAST_ROWS = 32
MULTIPLE = 16  # of both sides of a weight

_AT_ONCE = 1 << 22  # numbers of a result that are compared at once, in fp32
_LARGEST_FP8 = 448.0  # of e4m3, to which casts do not saturate
_LEAST_SCALE = 1e-30  # of a row of zeros


class Products(NamedTuple):
    """The products of one frozen Linear.

    forward: of x and the weight, FULL, INT8 or FP8.
    backward: of dy and the weight.
    turned: size of the Hadamard matrices that the stored weight is turned by (ConvRot), 0 where it is not.
    """

    forward: str = FULL
    backward: str = FULL
    turned: int = 0


class ErrorMeter:
    """Measures how far a layer's products in low precision are from the full ones, over all calls.

    sums: ‖low − full‖² and ‖full‖² of each channel of the outputs, without bias, and of the input's gradients, (2, n)
        each; on the device.
    """

    def __init__(self, device: torch.device):
        self.sums = [torch.zeros(2, 1, device=device), torch.zeros(2, 1, device=device)]

    @torch.no_grad()
    def add(self, back: bool, low: Tensor, full: Tensor) -> None:
        """Add a call, (…, n). One whose full result is not finite, as fp16's gradients are at first, does not count."""
        channels = full.shape[-1]
        rows = max(1, _AT_ONCE // channels)
        squares = self.sums[back].new_zeros(2, channels)
        both = (tensor.reshape(-1, channels).split(rows) for tensor in (low, full))
        for some, wanted in zip(*both, strict=True):
            wide = wanted.float()
            squares += torch.stack(((some.float() - wide).square().sum(0), wide.square().sum(0)))
        self.sums[back] = self.sums[back] + torch.where(squares[1].sum().isfinite(), squares, 0.0)

    def errors(self) -> tuple[float, float]:
        """Return the error of forward and backward; 0 where nothing was measured, NaN if not finite.

        It is the larger of two: ‖low − full‖ / ‖full‖ of all channels together, and the mean of the same of each
        channel, 1 at most. One channel of a thousandfold size alone makes the first, whatever becomes of the others.
        """
        forward, backward = (_error(*sums.double().cpu()) for sums in self.sums)
        return forward, backward


def _error(errors: Tensor, sizes: Tensor) -> float:
    """errors, sizes: squares of each channel, (n,)."""
    together = (errors.sum() / sizes.sum().clamp(min=_LEAST_SCALE)).sqrt()
    # A channel of zeros that stays zeros is exact.
    apart = (errors / sizes.clamp(min=_LEAST_SCALE)).sqrt().clamp(max=1.0).mean()
    return float(torch.maximum(together, apart))


@functools.cache
def _hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The matrix by which ConvRot turns, (size, size): the Kronecker power of a regular one of order 4, over √size.

    It is symmetric, and its own inverse.
    """
    four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], device=device)
    power = functools.reduce(torch.kron, [four] * round(math.log(size, 4)))
    return (power / math.sqrt(size)).to(dtype)


def turn(x: Tensor, size: int) -> Tensor:
    """Turn groups of `size` numbers of the last axis, or turn them back."""
    return (x.unflatten(-1, (-1, size)) @ _hadamard(size, x.device, x.dtype)).flatten(-2)


# int8

_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of comfy-kitchen's op


def _int8_product(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, turned: int, dtype: torch.dtype
) -> Tensor:
    """x: (…, k) times codes (n, k), both int8 once x is turned and rounded, → (…, n) in `dtype`.

    scale: fp32, one or one for each of the n. bias: (n,).
    """
    kitchen: Any = torch.ops.comfy_kitchen
    if hasattr(kitchen, "int8_linear"):
        out: Tensor = kitchen.int8_linear(x, codes, scale, bias, _DTYPE_CODES[dtype], turned > 0, turned or 256)
        return out
    return torch_int8_product(x, codes, scale, bias, turned, dtype)


def torch_int8_product(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, turned: int, dtype: torch.dtype
) -> Tensor:
    """Multiply as `comfy_kitchen.int8_linear` does, with torch's own product: for a comfy-kitchen without that op."""
    rows = x.reshape(-1, x.shape[-1])
    rows = (turn(rows, turned) if turned else rows).float()
    steps = (rows.abs().amax(-1, keepdim=True) / 127).clamp(min=_LEAST_SCALE)
    sums = torch._int_mm((rows / steps).round().clamp(-128, 127).to(torch.int8), codes.t())
    y = sums.float() * (steps * scale.reshape(1, -1))
    return (y if bias is None else y + bias.float()).to(dtype).view(*x.shape[:-1], len(codes))


@torch.library.custom_op("tessera::int8_matmul_back", mutates_args=())
def int8_matmul_back(grad: Tensor, codes: Tensor, scale: Tensor, turned: int, dtype: torch.dtype) -> Tensor:
    """grad: (…, out) times int8 codes (out, in) → (…, in) in `dtype`. scale: fp32, a scalar."""
    columns = _int8_product(grad, codes.t().contiguous(), scale, None, 0, dtype)
    # The weight is turned along its input: the product with dy needs no turning, and gives dx turned.
    return turn(columns, turned) if turned else columns


@int8_matmul_back.register_fake
def _(grad, codes, scale, turned, dtype):
    return grad.new_empty(*grad.shape[:-1], codes.shape[1], dtype=dtype)


def _int8_input_grad(grad: Tensor, codes: Tensor, scale: Tensor, turned: int) -> Tensor:
    """grad: (…, out) → (…, in). scale: fp32, a scalar or (out, 1)."""
    if scale.numel() == 1:
        return int8_matmul_back(grad, codes, scale, turned, grad.dtype)
    folded = grad.float() * scale.view(-1)
    # bf16 holds every size that fp32 does, and its rounding is a tenth of a step of int8's: half the bytes to write.
    folded = folded.to(grad.dtype) if grad.dtype == torch.bfloat16 else folded
    return int8_matmul_back(folded, codes, torch.ones((), device=grad.device), turned, grad.dtype)


# fp8


def to_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of (…, k) to e4m3 codes, with fp32 scales (…, 1)."""
    scales = (rows.abs().amax(-1, keepdim=True).float() / _LARGEST_FP8).clamp(min=_LEAST_SCALE)
    codes = (rows.float() / scales).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return codes.to(torch.float8_e4m3fn), scales


def _fp8_product(codes: Tensor, right: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """codes: (m, k) times right (k, n), column-major, both fp8 → (m, n) for a result in `dtype`. scale: a scalar."""
    # One scale for each tensor is what torch and cards take everywhere. The codes' own sums go past fp16's range.
    one = torch.ones((), device=codes.device)
    held = dtype if dtype == torch.bfloat16 else torch.float32
    return torch._scaled_mm(codes, right, one, one if scale is None else scale, out_dtype=held)


def _fp8_linear(
    codes: Tensor, steps: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """codes: (…, in) with steps (…, 1) → (…, out) in `dtype`."""
    one_scale = scale is None or scale.numel() == 1
    y = _fp8_product(codes.reshape(-1, codes.shape[-1]).contiguous(), weight.t(), scale if one_scale else None, dtype)
    # Each line is one kernel, computed in fp32: its result goes where y lies, or is made in the dtype that is wanted.
    y = y if one_scale or scale is None else y.mul_(scale.view(1, -1))
    out, by_row = y if y.dtype == dtype else torch.empty_like(y, dtype=dtype), steps.view(-1, 1)
    if bias is None:
        torch.mul(y, by_row, out=out)
    else:
        torch.addcmul(bias, y, by_row, out=out)
    return out.view(*codes.shape[:-1], len(weight))


@torch.library.custom_op("tessera::fp8_matmul_back", mutates_args=())
def fp8_matmul_back(codes: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """codes: (m, out) times fp8 weight (out, in) → (m, in) for a result in `dtype`."""
    # Cards take the right side column-major only. In the open a partitioner would make the turned copy going forward,
    # and keep it.
    return _fp8_product(codes.contiguous(), weight.t().contiguous().t(), None, dtype)


@fp8_matmul_back.register_fake
def _(codes, weight, dtype):
    held = dtype if dtype == torch.bfloat16 else torch.float32
    return codes.new_empty(codes.shape[0], weight.shape[1], dtype=held)


def _fp8_input_grad(grad: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """grad: (…, out) → (…, in). scale: fp32, a scalar or (out, 1)."""
    rows = grad.reshape(-1, grad.shape[-1])
    codes, steps = to_fp8(rows if scale is None else rows.float() * scale.view(1, -1))
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
    turned: int,
    hidden: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """x: (…, in) → (…, out). codes, steps: x as `to_fp8` rounds it, where `forward` is FP8. hidden, up: see
    `low_linear`."""
    y: Tensor
    if codes is not None and steps is not None:
        y = _fp8_linear(codes, steps, weight, scale, bias, x.dtype)
    elif forward == INT8 and scale is not None:
        y = _int8_product(x, weight, scale, bias, turned, x.dtype)
    elif layout is None:
        y = torch.ops.tessera.stored_linear(x, weight, scale, bias)
    else:
        y = torch.ops.tessera.quantised_linear(x, [weight, scale], bias, layout)
    if hidden is not None and up is not None:
        y.view(-1, len(up)).addmm_(hidden, up.t())
    return y


@_low_linear.register_fake
def _(x, codes, steps, weight, *_):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.set_materialize_grads(False)
    weight, scale = inputs[3:5]
    ctx.layout, _, ctx.backward, ctx.turned, hidden, _ = inputs[6:]
    assert hidden is None, "whoever gives a thin product has its gradient"
    ctx.save_for_backward(weight, scale)


def _input_grad(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * 11
    if grad is None:  # nothing downstream contributes to the loss
        return None, *none
    weight, scale = ctx.saved_tensors
    if ctx.backward != FULL:
        return low_input_grad(grad, weight, scale, ctx.backward, ctx.turned), *none
    if ctx.layout is None:
        return torch.ops.tessera.stored_linear_input_grad(grad, weight, scale), *none
    return torch.ops.tessera.quantised_linear_input_grad(grad, [weight, scale], ctx.layout), *none


def low_input_grad(grad: Tensor, weight: Tensor, scale: Tensor | None, product: str, turned: int) -> Tensor:
    """Multiply grad (…, out) back to (…, in) by an INT8 or FP8 product; the rest is as in `low_linear`."""
    if product == FP8:
        return _fp8_input_grad(grad, weight, scale)
    assert scale is not None
    return _int8_input_grad(grad, weight, scale, turned)


torch.library.register_autograd("tessera::low_linear", _input_grad, setup_context=_save)


def _flops(weight: Tensor, shape: Any) -> int:
    """2·rows·in·out, as for a plain matmul. The partitioner weighs by it which results to save."""
    return 2 * math.prod(shape[:-1]) * weight.numel()


@register_flop_formula(torch.ops.tessera.low_linear, get_raw=True)
def _low_linear_flops(x: Tensor, codes: Any, steps: Any, weight: Tensor, *rest: Any, **_: Any) -> int:
    hidden, up = rest[6:8] if len(rest) > 6 else (None, None)
    return _flops(weight, x.shape) + (0 if hidden is None else 2 * hidden.numel() * len(up))


for _op in (torch.ops.tessera.int8_matmul_back, torch.ops.tessera.fp8_matmul_back):
    register_flop_formula(_op, get_raw=True)(lambda grad, weight, *_, **__: _flops(weight, grad.shape))


def low_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    layout: str | None,
    products: Products,
    rounded: Sequence[Tensor] = (),
    added: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Multiply x, (…, in) → (…, out), by `products`; only weight and scale are saved for backward.

    An op of its own, opaque as that of a full product is, and for the same reason. scale: fp32, a scalar or (out, 1).
    layout: the text of the weight's `Format` where it has one.
    rounded: x by `to_fp8`, if it is known. added: hidden (n, rank) and up (m, rank), whose product is added to the
    result in place; without a gradient, for the forward of a function that has one.
    """
    # Rounded in the open, and handed to the op beside x, through which the gradient goes.
    codes, steps = (rounded or to_fp8(x.detach())) if products.forward == FP8 else (None, None)
    return _low_linear(x, codes, steps, weight, scale, bias, layout, *products, *added)
