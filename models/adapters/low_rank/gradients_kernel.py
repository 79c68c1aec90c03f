"""Triton kernels for both gradients of a thin product in one pass over the gradient of its result.

    dhidden = dy·up         (rows, rank)
    dup     = dyᵀ·hidden    (columns, rank)

Each program takes COLUMNS columns of dy and some tiles of ROWS rows; a tile is read once and multiplied twice. It gives
a sum over its columns for each of its rows, and over its rows for each of its columns. A second launch adds up these
parts, always in the same order: nothing is added atomically, so that a run repeats bit for bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 256
PROGRAMS = 128  # about one for each multiprocessor of a large card; the same everywhere, as sums depend on it
BLOCK = 1024


@triton.jit
def _parts(
    grad, hidden, up, hidden_parts, up_parts, rows, columns, rank, grad_stride, hidden_stride, tiles,
    RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Multiply `tiles` tiles of ROWS rows by COLUMNS columns. rank: how many of a row's RANK numbers there are."""
    group, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.arange(0, RANK)
    known = number[None, :] < rank
    up_tile = tl.load(
        up + column[:, None] * rank + number[None, :], mask=(column[:, None] < columns) & known, other=0.0
    )
    total = tl.full((COLUMNS, RANK), 0.0, tl.float32)
    for tile in range(tiles):
        row = (group * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = row[:, None] < rows
        values = tl.load(
            grad + row[:, None] * grad_stride + column[None, :], mask=inside & (column[None, :] < columns), other=0.0
        )
        thin = tl.load(hidden + row[:, None] * hidden_stride + number[None, :], mask=inside & known, other=0.0)
        part = tl.dot(values, up_tile)
        tl.store(hidden_parts + (block * rows + row[:, None]) * RANK + number[None, :], part, mask=inside)
        total = tl.dot(tl.trans(values), thin, total)
    place = (group * columns + column[:, None]) * RANK + number[None, :]
    tl.store(up_parts + place, total, mask=column[:, None] < columns)


@triton.jit
def _sum(parts, out, count, size, first, rank, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Add up `count` parts of `size` numbers each, RANK a row, and write `rank` of each row."""
    index = first + tl.arange(0, BLOCK)
    inside = index < size
    total = tl.full((BLOCK,), 0.0, tl.float32)
    place = parts + index  # moved on by parts: their number times their size may not fit 32 bits
    for _ in range(count):
        total += tl.load(place, mask=inside, other=0.0)
        place += size
    number = index % RANK
    tl.store(out + index // RANK * rank + number, total.to(out.dtype.element_ty), mask=inside & (number < rank))


@triton.jit
def _sums(
    hidden_parts, up_parts, hidden_grad, up_grad, blocks, groups, hidden_size, up_size, programs, rank,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first `programs` programs add up the parts of hidden's gradient, the others those of up's."""
    program = tl.program_id(0)
    if program < programs:
        _sum(hidden_parts, hidden_grad, blocks, hidden_size, program * BLOCK, rank, RANK, BLOCK)
    else:
        _sum(up_parts, up_grad, groups, up_size, (program - programs) * BLOCK, rank, RANK, BLOCK)


def padded(rank: int) -> int:
    """The numbers of a row in the kernels: cards multiply 16 or more of them at once."""
    return max(16, triton.next_power_of_2(rank))


def tiling(rows: int, columns: int) -> tuple[int, int, int]:
    """Return the groups of rows, the tiles of each, and the blocks of columns."""
    row_tiles, blocks = -(-rows // ROWS), -(-columns // COLUMNS)
    tiles = max(1, row_tiles * blocks // PROGRAMS)
    return -(-row_tiles // tiles), tiles, blocks


def part_shapes(rows: int, columns: int, rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes of the parts of both gradients, fp32."""
    groups, _, blocks = tiling(rows, columns)
    return (blocks, rows, padded(rank)), (groups, columns, padded(rank))


def thin_grads(grad: Tensor, hidden: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """grad (rows, columns), hidden (rows, rank), up (columns, rank) → the gradients of hidden and of up.

    In 16 bits, of rows that are contiguous each.
    """
    (rows, columns), rank = grad.shape, hidden.shape[1]
    wide, (groups, tiles, blocks) = padded(rank), tiling(rows, columns)
    up = up.contiguous()
    shapes = part_shapes(rows, columns, rank)
    hidden_parts, up_parts = (grad.new_empty(shape, dtype=torch.float32) for shape in shapes)
    _parts[(groups, blocks)](
        grad, hidden, up, hidden_parts, up_parts, rows, columns, rank, grad.stride(0), hidden.stride(0), tiles,
        RANK=wide, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=8, num_stages=2,
    )  # fmt: skip
    hidden_grad, up_grad = hidden.new_empty(rows, rank), up.new_empty(columns, rank)
    programs, others = triton.cdiv(rows * wide, BLOCK), triton.cdiv(columns * wide, BLOCK)
    _sums[(programs + others,)](
        hidden_parts, up_parts, hidden_grad, up_grad, blocks, groups, rows * wide, columns * wide, programs, rank,
        RANK=wide, BLOCK=BLOCK,
    )  # fmt: skip
    return hidden_grad, up_grad
