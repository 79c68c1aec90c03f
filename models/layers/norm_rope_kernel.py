"""Triton kernels for RMS norm and rotary embedding: heads are read in order, once, and written once.

A program processes one token and HEADS of its heads; the token's cosines and sines are read once for all of them. Pairs
are split in registers. Everything is fp32 between loads and stores.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8
WARPS = 4


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _halves(rows, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Split the pairs of (HEADS, DIM) into two tensors (HEADS, DIM/2)."""
    return tl.split(tl.reshape(rows, (HEADS, DIM // 2, 2)))


@triton.jit
def _norm_rope(  # noqa: PLR0913
    x, weight, table, out, length, heads, x_batch, x_token, x_head, table_batch, table_token, out_batch, eps,
    NORM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate. x: rows of DIM; table: cosine and sine of each pair; out: (…, heads, DIM)."""
    batch, token = tl.program_id(0).to(tl.int64) // length, tl.program_id(0).to(tl.int64) % length
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (column < DIM)
    rows = tl.load(x + batch * x_batch + token * x_token + head * x_head + column, mask=inside, other=0).to(tl.float32)
    if NORM:
        rows = rows * tl.rsqrt(tl.reduce(rows * rows, 1, _add) / DIM + eps)[:, None]
        rows = rows * tl.load(weight + column).to(tl.float32)
    turn = tl.load(table + batch * table_batch + token * table_token + column)
    cos, sin = tl.split(tl.reshape(turn, (1, DIM // 2, 2)))
    first, second = _halves(rows, HEADS, DIM)
    rotated = tl.join(first * cos - second * sin, first * sin + second * cos)
    place = out + batch * out_batch + (token * heads + head) * DIM + column
    tl.store(place, tl.reshape(rotated, (HEADS, DIM)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope_backward(  # noqa: PLR0913
    grad, x, weight, table, out, length, heads, grad_batch, grad_token, grad_head, x_batch, x_token, x_head,
    table_batch, table_token, eps, NORM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x, contiguous. x is read only if there is a norm."""
    batch, token = tl.program_id(0).to(tl.int64) // length, tl.program_id(0).to(tl.int64) % length
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (column < DIM)
    place = batch * grad_batch + token * grad_token + head * grad_head + column
    rows = tl.load(grad + place, mask=inside, other=0).to(tl.float32)
    turn = tl.load(table + batch * table_batch + token * table_token + column)
    cos, sin = tl.split(tl.reshape(turn, (1, DIM // 2, 2)))
    first, second = _halves(rows, HEADS, DIM)
    rows = tl.reshape(tl.join(first * cos + second * sin, second * cos - first * sin), (HEADS, DIM))
    if NORM:
        place = batch * x_batch + token * x_token + head * x_head + column
        x_fp32 = tl.load(x + place, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.reduce(x_fp32 * x_fp32, 1, _add) / DIM + eps)[:, None]
        rows = rows * tl.load(weight + column).to(tl.float32)
        normal = x_fp32 * scale
        rows = (rows - normal * (tl.reduce(rows * normal, 1, _add) / DIM)[:, None]) * scale
    place = out + ((batch * length + token) * heads + head) * DIM + column
    tl.store(place, rows.to(out.dtype.element_ty), mask=inside)


def norm_rope(parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float) -> Tensor:
    """Normalise by `weights`, if there are any, rotate, and join. parts: (B, T_i, H, D), table: (B or 1, T, 1, D/2, 2)
    → (B, T, H, D)."""
    batch, _, heads, dim = parts[0].shape
    out = parts[0].new_empty(batch, sum(x.shape[1] for x in parts), heads, dim)
    start = 0
    for index, x in enumerate(parts):
        length = x.shape[1]
        part_table = table[:, start : start + length]
        _norm_rope[batch * length, triton.cdiv(heads, HEADS)](
            x, weights[index] if weights else x, part_table, out[:, start:], length, heads, *x.stride()[:3],
            part_table.stride(0) if len(part_table) > 1 else 0, part_table.stride(1), out.stride(0), eps,
            NORM=bool(weights), HEADS=HEADS, DIM=dim, num_warps=WARPS,
        )  # fmt: skip
        start += length
    return out


def norm_rope_backward(
    grad: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float
) -> list[Tensor]:
    """Compute the gradients of `parts`, each contiguous. grad: (B, T, H, D)."""
    grads, start = [], 0
    for index, x in enumerate(parts):
        batch, length, heads, dim = x.shape
        part_grad, part_table = grad[:, start : start + length], table[:, start : start + length]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm_rope_backward[batch * length, triton.cdiv(heads, HEADS)](
            part_grad, x, weights[index] if weights else x, part_table, out, length, heads,
            *part_grad.stride()[:3], *x.stride()[:3],
            part_table.stride(0) if len(part_table) > 1 else 0, part_table.stride(1), eps,
            NORM=bool(weights), HEADS=HEADS, DIM=dim, num_warps=WARPS,
        )  # fmt: skip
        grads.append(out)
        start += length
    return grads
