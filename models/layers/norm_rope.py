"""RMS norm of queries and keys and their rotation, joined over parts of the sequence: one op on a GPU.

Inductor's kernel of all this reads pairs lane by lane from far apart: on an H100 it took 0.53 ms where its bytes take
0.04. The op runs a Triton kernel that reads in order; where Triton does not run, torch's ops give the same. Elsewhere
than on `DEVICES` the plain form runs and autograd and the compiler see all of it.
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
    given = [weight for weight in weights if weight is not None]
    if len(given) == len(parts) and _fits(parts, given, table):
        return torch.ops.tessera.norm_rope(parts, given, table, torch.finfo(parts[0].dtype).eps if eps is None else eps)
    start, found = 0, []
    for x, weight in zip(parts, weights, strict=True):
        found.append(rotate(F.rms_norm(x, x.shape[-1:], weight, eps), table[:, start : start + x.shape[1]]))
        start += x.shape[1]
    return torch.cat(found, dim=1) if len(found) > 1 else found[0]


def rope_heads(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x (B, T, H, D) by `table` (B or 1, T, 1, D/2, 2). A compiler joins this with what is before it."""
    if not torch.compiler.is_compiling() and _fits([x], [], table):
        return torch.ops.tessera.norm_rope([x], [], table, 0.0)
    return rotate(x, table)


def _fits(parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor) -> bool:
    """True where the kernel can take these, by what a graph is compiled for."""
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
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()  # attention's plain kernel gives that of k transposed
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
    """The table with the numbers of a token behind one another."""
    return table if table.stride()[-2:] == (2, 1) else table.contiguous()


def _plain(parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float) -> Tensor:
    """Compute in torch's ops as the kernel does."""
    start, found = 0, []
    for index, x in enumerate(parts):
        rows = x.float()
        if weights:
            rows = F.rms_norm(rows, rows.shape[-1:], weights[index].float(), eps)
        found.append(rotate(rows, table[:, start : start + x.shape[1]]).to(x.dtype))
        start += x.shape[1]
    return torch.cat(found, dim=1)


def _plain_backward(
    grad: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float
) -> list[Tensor]:
    start, found = 0, []
    back = table * table.new_tensor([1.0, -1.0])  # the inverse rotation
    for index, x in enumerate(parts):
        piece = slice(start, start + x.shape[1])
        rows = rotate(grad[:, piece].float(), back[:, piece])
        if weights:
            given = x.float()
            scale = torch.rsqrt(given.square().mean(-1, keepdim=True) + eps)
            rows, normal = rows * weights[index].float(), given * scale
            rows = (rows - normal * (rows * normal).mean(-1, keepdim=True)) * scale
        found.append(rows.to(x.dtype).contiguous())
        start += x.shape[1]
    return found


@functools.cache
def _kernel(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The Triton kernels if there is Triton and they give the right values here."""
    try:
        from . import norm_rope_kernel as kernel

        generator = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(1, 3, 9, 32, generator=generator).to(device, dtype) for _ in range(2))
        weight = torch.linspace(0.5, 1.5, 32).to(device, dtype)
        angle = torch.linspace(0, 3, 48).view(1, 3, 1, 16)
        table = torch.stack((angle.cos(), angle.sin()), dim=-1).to(device)
        given = [x[:, :1], x[:, 1:]], [weight, weight], table, 1e-6
        pairs = [(kernel.norm_rope(*given), _plain(*given))]
        pairs += zip(kernel.norm_rope_backward(grad, *given), _plain_backward(grad, *given), strict=True)
        bound = 4 * torch.finfo(dtype).eps
        if all((one.float() - other.float()).norm() <= bound * other.float().norm() for one, other in pairs):
            return kernel
        _LOG.warning("Triton rotates wrong on this GPU; torch does it in several steps.")
    except ImportError:
        pass
    except Exception as error:  # no C compiler, a GPU that this Triton does not know: anything
        _LOG.info("Triton does not run here (%s); torch normalises and rotates in several steps.", error)
    return None
