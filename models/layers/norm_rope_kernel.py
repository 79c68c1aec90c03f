"""Triton kernels of RMS norm and rotary embedding: heads are read in order, once, and written once.

A program takes one token and HEADS of its heads; the token's cosines and sines are read once for all of them. Pairs are
taken apart in registers. Everything is fp32 between reading and writing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8
WARPS = 4


@triton.jit
def _add(one, other):
    return one + other


@triton.jit
def _halves(rows, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Take the pairs of (HEADS, DIM) apart: two tensors (HEADS, DIM/2)."""
    return tl.split(tl.reshape(rows, (HEADS, DIM // 2, 2)))


@triton.jit
def _norm_rope(
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
def _norm_rope_backward(
    grad, x, weight, table, out, length, heads, grad_batch, grad_token, grad_head, x_batch, x_token, x_head,
    table_batch, table_token, eps, NORM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The gradient of x, contiguous. x is read where there is a norm."""
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
        given = tl.load(x + place, mask=inside, other=0).to(tl.float32)
        scale = tl.rsqrt(tl.reduce(given * given, 1, _add) / DIM + eps)[:, None]
        rows = rows * tl.load(weight + column).to(tl.float32)
        normal = given * scale
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
        own = table[:, start : start + length]
        _norm_rope[batch * length, triton.cdiv(heads, HEADS)](
            x, weights[index] if weights else x, own, out[:, start:], length, heads, *x.stride()[:3],
            own.stride(0) if len(own) > 1 else 0, own.stride(1), out.stride(0), eps,
            NORM=bool(weights), HEADS=HEADS, DIM=dim, num_warps=WARPS,
        )  # fmt: skip
        start += length
    return out


def norm_rope_backward(
    grad: Tensor, parts: Sequence[Tensor], weights: Sequence[Tensor], table: Tensor, eps: float
) -> list[Tensor]:
    """Give the gradients of `parts`, each contiguous. grad: (B, T, H, D)."""
    found, start = [], 0
    for index, x in enumerate(parts):
        batch, length, heads, dim = x.shape
        mine, own = grad[:, start : start + length], table[:, start : start + length]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm_rope_backward[batch * length, triton.cdiv(heads, HEADS)](
            mine, x, weights[index] if weights else x, own, out, length, heads, *mine.stride()[:3], *x.stride()[:3],
            own.stride(0) if len(own) > 1 else 0, own.stride(1), eps,
            NORM=bool(weights), HEADS=HEADS, DIM=dim, num_warps=WARPS,
        )  # fmt: skip
        found.append(out)
        start += length
    return found
