"""Triton kernel that dequantises stored weights: read each code once, write code · scale once.

The bits are decoded by integer arithmetic, as Triton converts fp8 only on cards with instructions for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3, E5M2, INT8 = (tl.constexpr(number) for number in range(3))
ONE, ROWS, MX = (tl.constexpr(number) for number in range(3))
FORMATS = {torch.float8_e4m3fn: E4M3.value, torch.float8_e5m2: E5M2.value, torch.int8: INT8.value}
BLOCK = 1024


@triton.jit
def _decode(code, FORMAT: tl.constexpr):
    """Decode bytes to fp32 exactly."""
    if FORMAT == INT8:
        return code.to(tl.int8, bitcast=True).to(tl.float32)
    if FORMAT == E5M2:  # the upper half of an fp16
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    # Shift exponent and mantissa to fp16's positions, and multiply by 2^(15 - 7) for the bias; exact for subnormals.
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _dequantize(
    codes, scales, out, columns, stride, tiles, FORMAT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Dequantise BLOCK columns of one row. stride: of the codes' rows; tiles: number of MX scale tiles per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    value = _decode(tl.load(codes + row * stride + column, mask=inside, other=0), FORMAT)
    if SCALE == MX:
        # A byte for 32 columns, 2^(byte - 127), in tiles of 128 rows and 4 bytes as cuBLAS takes them: "1D Block
        # Scaling Factors Layout" in its documentation.
        byte = column // 32
        within = row % 32 * 16 + row % 128 // 32 * 4 + byte % 4
        exponent = tl.load(scales + (row // 128 * tiles + byte // 4) * 512 + within, mask=inside, other=0)
        scale = (exponent.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + (row if SCALE == ROWS else 0))
    tl.store(out + row * columns + column, (value * scale).to(out.dtype.element_ty), mask=inside)


def dequantize_codes(
    codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype, mx: bool = False
) -> Tensor:
    """Dequantise codes (rows, columns or more) of FORMATS to `shape`, (out, in), in `dtype`.

    scale: fp32, one or one for each row; with `mx` the bytes of mxfp8's block scales.
    """
    rows, columns = shape
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    kind = MX if mx else ROWS if scale.numel() == rows and rows > 1 else ONE
    tiles = -(-columns // 128)
    bytes_of_scale = scale.view(torch.uint8) if mx else scale
    grid = (rows, triton.cdiv(columns, BLOCK))
    _dequantize[grid](
        codes.view(torch.uint8), bytes_of_scale, out, columns, codes.stride(0), tiles,
        FORMAT=FORMATS[codes.dtype], SCALE=kind.value, BLOCK=BLOCK,
    )  # fmt: skip
    return out
