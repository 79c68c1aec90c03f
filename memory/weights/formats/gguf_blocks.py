"""Block formats of GGUF: blocks of 32 or 256 values, stored as small codes with shared scales.

A value is code · scale − offset, in fp32 as ggml computes it. The layouts are those of `ggml-common.h`, the order of
the values in a block that of `dequantize_row_*` in `ggml-quants.c`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# Values per pass over the blocks: only these take fp32 memory besides the result, and they fit into a GPU's cache.
AT_ONCE = 2**22

# The levels of IQ4_NL and IQ4_XS.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Parts(NamedTuple):
    """Unpacked blocks.

    codes: (n, values), or (n, groups, values of a group).
    scale: fp32 that broadcasts against the codes.
    offset: likewise, added to codes · scale; None if there is none.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None = None


class BlockFormat(NamedTuple):
    """One block format.

    number: GGML's type number.
    values: number of values per block.
    size: bytes per block.
    split: blocks (n, size) → Parts.
    """

    number: int
    values: int
    size: int
    split: Callable[[Tensor], Parts]


def _half(stored: Tensor) -> Tensor:
    """Reinterpret bytes (n, 2·k) as fp16 numbers (n, k), in fp32."""
    return stored.contiguous().view(torch.float16).float()


def _shifted(stored: Tensor, step: int) -> Tensor:
    """Shift bytes right by 0, step, … 8 − step, on a new axis before the last: (…, k) → (…, 8 / step, k)."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8, device=stored.device)
    return stored.unsqueeze(-2) >> shifts.unsqueeze(-1)


def _nibbles(stored: Tensor) -> Tensor:
    """Split bytes into their low halves, then their high halves: (…, k) → (…, 2, k)."""
    return torch.stack((stored & 15, stored >> 4), dim=-2)


def _bits(stored: Tensor) -> Tensor:
    """Unpack the bits of the bytes, lowest first: (n, k) → (n, 8·k)."""
    return (_shifted(stored, 1) & 1).transpose(-1, -2).flatten(1)


def _level(codes: Tensor) -> Tensor:
    return torch.tensor(_LEVELS, dtype=torch.float32, device=codes.device)[codes.int()]


def _q4_0(b: Tensor) -> Parts:
    return Parts(_nibbles(b[:, 2:]).flatten(1).char() - 8, _half(b[:, :2]))


def _q4_1(b: Tensor) -> Parts:
    return Parts(_nibbles(b[:, 4:]).flatten(1), _half(b[:, :2]), _half(b[:, 2:4]))


def _q5_0(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 6:]).flatten(1) | _bits(b[:, 2:6]) << 4
    return Parts(codes.char() - 16, _half(b[:, :2]))


def _q5_1(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 8:]).flatten(1) | _bits(b[:, 4:8]) << 4
    return Parts(codes, _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: Tensor) -> Parts:
    return Parts(b[:, 2:].view(torch.int8), _half(b[:, :2]))


def _q2_k(b: Tensor) -> Parts:
    """Unpack 16 bytes of 4-bit scales and 4-bit offsets, 64 bytes of codes, d, dmin."""
    codes = _shifted(b[:, 16:80].unflatten(1, (2, 32)), 2) & 3
    d, dmin = _half(b[:, 80:]).split(1, dim=1)
    scale, offset = d * (b[:, :16] & 15), -dmin * (b[:, :16] >> 4)
    return Parts(codes.reshape(-1, 16, 16), scale.unsqueeze(2), offset.unsqueeze(2))


def _q3_k(b: Tensor) -> Parts:
    """Unpack 32 bytes of the codes' third bits, 64 of their low bits, 12 of 6-bit scales, d."""
    low = _shifted(b[:, 32:96].unflatten(1, (2, 32)), 2) & 3
    codes = low.flatten(1).char() + ((_shifted(b[:, :32], 1) & 1) << 2).flatten(1).char() - 4
    scales = _nibbles(b[:, 96:104]).flatten(1) | (_shifted(b[:, 104:108], 2) & 3).flatten(1) << 4
    return Parts(codes.reshape(-1, 16, 16), (_half(b[:, 108:]) * (scales.char() - 32)).unsqueeze(2))


def _scales_of_k(b: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack scales and offsets (n, 8, 1) of Q4_K and Q5_K: d, dmin, 12 bytes of 6 bits each (`get_scale_min_k4`)."""
    d, dmin = _half(b[:, :4]).split(1, dim=1)
    first, second, rest = b[:, 4:16].split(4, dim=1)
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=1)
    offsets = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=1)
    return (d * scales).unsqueeze(2), (-dmin * offsets).unsqueeze(2)


def _q4_k(b: Tensor) -> Parts:
    codes = _nibbles(b[:, 16:].unflatten(1, (4, 32)))
    return Parts(codes.reshape(-1, 8, 32), *_scales_of_k(b))


def _q5_k(b: Tensor) -> Parts:
    low = _nibbles(b[:, 48:].unflatten(1, (4, 32))).reshape(-1, 8, 32)
    return Parts(low | (_shifted(b[:, 16:48], 1) & 1) << 4, *_scales_of_k(b))


def _q6_k(b: Tensor) -> Parts:
    """Unpack 128 bytes of the codes' low halves, 64 of their two high bits, 16 int8 scales, d."""
    low = _nibbles(b[:, :128].unflatten(1, (2, 64))).reshape(-1, 2, 4, 32)
    high = _shifted(b[:, 128:192].unflatten(1, (2, 32)), 2) & 3
    scale = _half(b[:, 208:]) * b[:, 192:208].view(torch.int8)
    return Parts((low | high << 4).char().reshape(-1, 16, 16) - 32, scale.unsqueeze(2))


def _iq4_nl(b: Tensor) -> Parts:
    return Parts(_level(_nibbles(b[:, 2:]).flatten(1)), _half(b[:, :2]))


def _iq4_xs(b: Tensor) -> Parts:
    """Unpack d, 2 bytes of the two high bits of 8 scales, 4 of their low halves, 128 of codes."""
    high = (_shifted(b[:, 2:4], 2) & 3).transpose(1, 2).flatten(1)
    low = _nibbles(b[:, 4:8]).transpose(1, 2).flatten(1)
    scale = _half(b[:, :2]) * ((low | high << 4).char() - 32)
    return Parts(_level(_nibbles(b[:, 8:].unflatten(1, (8, 16))).flatten(2)), scale.unsqueeze(2))


FORMATS = {
    "Q4_0": BlockFormat(2, 32, 18, _q4_0),
    "Q4_1": BlockFormat(3, 32, 20, _q4_1),
    "Q5_0": BlockFormat(6, 32, 22, _q5_0),
    "Q5_1": BlockFormat(7, 32, 24, _q5_1),
    "Q8_0": BlockFormat(8, 32, 34, _q8_0),
    "Q2_K": BlockFormat(10, 256, 84, _q2_k),
    "Q3_K": BlockFormat(11, 256, 110, _q3_k),
    "Q4_K": BlockFormat(12, 256, 144, _q4_k),
    "Q5_K": BlockFormat(13, 256, 176, _q5_k),
    "Q6_K": BlockFormat(14, 256, 210, _q6_k),
    "IQ4_NL": BlockFormat(20, 32, 18, _iq4_nl),
    "IQ4_XS": BlockFormat(23, 256, 136, _iq4_xs),
}
NAMES = {kind.number: name for name, kind in FORMATS.items()}


def dequantize_blocks(stored: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Dequantise a weight to `shape` in `dtype`, some blocks at a time.

    stored: uint8, the blocks in the order of the values, in any shape. name: one of FORMATS.
    """
    kind = FORMATS[name]
    blocks = stored.reshape(-1, kind.size)
    full = torch.empty(shape, dtype=dtype, device=stored.device)
    step = AT_ONCE // kind.values
    for target, chunk in zip(full.view(-1, kind.values).split(step), blocks.split(step), strict=True):
        codes, scale, offset = kind.split(chunk)
        values = codes * scale if offset is None else torch.addcmul(offset, codes.float(), scale)
        target.copy_(values.reshape(target.shape))
    return full
