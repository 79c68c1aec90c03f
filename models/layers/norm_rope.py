"""RMS norm and rotation of queries and keys, joined over parts of the sequence, as one op on a GPU.

Inductor's kernel for this has uncoalesced reads: on an H100 it took 0.53 ms, against 0.04 ms for its bytes. The op runs
a Triton kernel that reads in order, or torch's ops if Triton does not run. On other devices than `DEVICES` the plain
form runs, visible to autograd and the compiler.
"""

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .math import rotate

_LOG = logging.getLogger(__name__)
DEVICES: tuple[str, ...] = ("cuda",)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def norm_rope(parts: Sequence[Tensor], weights: Sequence[Tensor | None], table: Tensor, eps: float | None) -> Tensor:
    """Normalise each part of a sequence by its own weight, rotate it, and join them.

    parts: (B, T_i, H, D) each, table: (B or 1, T, 1, D/2, 2) of `rope`, eps: None for torch's own → (B, T, H, D).
    """
    norm_weights = [weight for weight in weights if weight is not None]
    if len(norm_weights) == len(parts) and _fits(parts, norm_weights, table):
        return torch.ops.tessera.norm_rope(
            parts, norm_weights, table, torch.finfo(parts[0].dtype).eps if eps is None else eps
        )
    start, rotated = 0, []
    for x, weight in zip(parts, weights, strict=True):
        rotated.append(rotate(F.rms_norm(x, x.shape[-1:], weight, eps), table[:, start : start + x.shape[1]]))
        start += x.shape[1]
    return torch.cat(rotated, dim=1) if len(rotated) > 1 else rotated[0]


def rope_heads(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x (B, T, H, D) by `table` (B or 1, T, 1, D/2, 2). A compiler fuses this with preceding ops."""
    if not torch.compiler.is_compiling() and _fits([x], [], table):
        return torch.ops.tessera.norm_rope([x], [], table, 0.0)
    return rotate(x, table)


def _fits(parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor) -> bool:
    """Return whether the kernel supports these, by properties that a graph is guarded on."""
    dim = parts[0].shape[-1]
    return (
        parts[0].device.type in DEVICES
        and 16 <= dim <= 256
        and dim & (dim - 1) == 0
        and table.dtype == torch.float32
        and all(x.dtype == parts[0].dtype and x.dtype in DTYPES and x.stride(-1) == 1 for x in parts)
        and not any(weight.requires_grad or not weight.is_contiguous() for weight in weights)
    )


@torch.library.custom_op("tessera::norm_rope", mutates_args=())
def _norm_rope(parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float) -> Tensor:
    table = _in_rows(table)
    kernel = _kernel(parts[0].device, parts[0].dtype)
    if kernel is not None:
        return kernel.norm_rope(parts, weights, table, eps)
    return _plain(parts, weights, table, eps)


@_norm_rope.register_fake
def _(parts, weights, table, eps):
    batch, _, heads, dim = parts[0].shape
    return parts[0].new_empty(batch, sum(x.shape[1] for x in parts), heads, dim)


@torch.library.custom_op("tessera::norm_rope_backward", mutates_args=())
def _norm_rope_backward(
    grad: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float
) -> list[Tensor]:
    table = _in_rows(table)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # attention's math kernel returns that of k transposed
    kernel = _kernel(grad.device, grad.dtype)
    if kernel is not None:
        return kernel.norm_rope_backward(grad, parts, weights, table, eps)
    return _plain_backward(grad, parts, weights, table, eps)


@_norm_rope_backward.register_fake
def _(grad, parts, weights, table, eps):
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parts]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    parts, weights, table, ctx.eps = inputs
    ctx.counts = len(parts), len(weights)
    ctx.save_for_backward(*parts, *weights, table)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    count, weighted = ctx.counts
    *tensors, table = ctx.saved_tensors
    parts, weights = tensors[:count], tensors[count:]
    return torch.ops.tessera.norm_rope_backward(grad, parts, weights, table, ctx.eps), [None] * weighted, None, None


torch.library.register_autograd("tessera::norm_rope", _differentiate, setup_context=_save)


def _in_rows(table: Tensor) -> Tensor:
    """Return the table with contiguous entries per token."""
    return table if table.stride()[-2:] == (2, 1) else table.contiguous()


def _plain(parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float) -> Tensor:
    """Compute the kernel's result with torch's ops."""
    start, rotated = 0, []
    for index, x in enumerate(parts):
        rows = x.float()
        if weights:
            rows = F.rms_norm(rows, rows.shape[-1:], weights[index].float(), eps)
        rotated.append(rotate(rows, table[:, start : start + x.shape[1]]).to(x.dtype))
        start += x.shape[1]
    return torch.cat(rotated, dim=1)


def _plain_backward(
    grad: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float
) -> list[Tensor]:
    start, grads = 0, []
    back = table * table.new_tensor([1.0, -1.0])  # the inverse rotation
    for index, x in enumerate(parts):
        piece = slice(start, start + x.shape[1])
        rows = rotate(grad[:, piece].float(), back[:, piece])
        if weights:
            x_fp32 = x.float()
            scale = torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + eps)
            rows, normal = rows * weights[index].float(), x_fp32 * scale
            rows = (rows - normal * (rows * normal).mean(-1, keepdim=True)) * scale
        grads.append(rows.to(x.dtype).contiguous())
        start += x.shape[1]
    return grads


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the Triton kernels if Triton is installed and they compute correct values here."""
    try:
        from . import norm_rope_kernel as kernel

        generator = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(1, 3, 9, 32, generator=generator).to(device, dtype) for _ in range(2))
        weight = torch.linspace(0.5, 1.5, 32).to(device, dtype)
        angle = torch.linspace(0, 3, 48).view(1, 3, 1, 16)
        table = torch.stack((angle.cos(), angle.sin()), dim=-1).to(device)
        eps = 1e-6
        parts, weights = [x[:, :1], x[:, 1:]], [weight, weight]
        gradients = kernel.norm_rope_backward(grad, parts, weights, table, eps)
        plain_gradients = _plain_backward(grad, parts, weights, table, eps)
        pairs = [(kernel.norm_rope(parts, weights, table, eps), _plain(parts, weights, table, eps))]
        pairs += zip(gradients, plain_gradients, strict=True)
        bound = 4 * torch.finfo(dtype).eps
        if all(
            (actual.float() - expected.float()).norm() <= bound * expected.float().norm() for actual, expected in pairs
        ):
            return kernel
        _LOG.warning("Triton rotates wrong on this GPU; torch does it in several steps.")
    except ImportError:
        pass
    except Exception as error:  # any error: no C compiler, a GPU unknown to this Triton
        _LOG.info("Triton does not run here (%s); torch normalises and rotates in several steps.", error)
    return None
