"""Colours of a picture file that carries no ICC profile: the numbers of ITU-T H.273 in PNG (cICP) and AVIF (nclx), and
the gamma of PNG (gAMA); and their conversion to sRGB.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

# H.273: primaries of BT.709 and sRGB, and 2 for unspecified ones.
_SRGB_PRIMARIES = frozenset({1, 2})
# Those of BT.709, BT.601, BT.2020 in 10 and 12 bits, and sRGB, all shown as sRGB, and 2 for an unspecified one.
_SRGB_CURVES = frozenset({1, 2, 6, 13, 14, 15})
_HDR_CURVES = frozenset({16, 18})  # PQ and HLG
_GAMMA_CURVES = {4: 2.2, 5: 2.8, 8: 1.0}
# Matrices from linear RGB of other primaries, all with the white point D65, to linear sRGB (IEC 61966-2-1).
_TO_SRGB = {
    9: ((1.660491, -0.587641, -0.072850), (-0.124550, 1.132900, -0.008349), (-0.018151, -0.100579, 1.118730)),
    12: ((1.224940, -0.224940, 0.0), (-0.042057, 1.042057, 0.0), (-0.019638, -0.078636, 1.098274)),
}
_USUAL_GAMMA = (2.1, 2.3)  # within, gAMA describes sRGB itself
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Colours:
    """Colours of a picture that are not sRGB.

    gamma: exponent from its numbers to linear light; None for sRGB's curve.
    primaries: H.273 number of the primaries.
    hdr: the curve is that of HDR, and read as sRGB's.
    known: False if it is of another kind, and read as sRGB.
    """

    gamma: float | None = None
    primaries: int = 1
    hdr: bool = False
    known: bool = True

    @property
    def changes_pixels(self) -> bool:
        """Return whether the pixels are converted."""
        return self.known and not self.hdr

    def to_srgb(self, planes: list[np.ndarray]) -> list[np.ndarray]:
        """Convert the channels, each (H, W) from 0 to 1, to sRGB."""
        linear = [_srgb_to_linear(p) if self.gamma is None else np.power(p, np.float32(self.gamma)) for p in planes]
        if self.primaries in _TO_SRGB and len(linear) == 3:
            matrix = np.array(_TO_SRGB[self.primaries], np.float32)
            linear = [sum(factor * p for factor, p in zip(row, linear, strict=True)) for row in matrix]  # type: ignore[misc]
        return [_linear_to_srgb(np.clip(p, 0.0, 1.0)) for p in linear]


def colours_of(data: bytes) -> Colours | None:
    """Read the colours of a PNG or AVIF file from its bytes; None for sRGB, and for a file with an ICC profile in
    their place. Other formats have none."""
    if data.startswith(_PNG_SIGNATURE):
        return _png_colours(dict(_png_chunks(data)))
    if data[4:8] == b"ftyp":
        header = data.partition(b"mdat")[0]
        box = header.find(b"colrnclx")
        if box >= 0 and b"colrprof" not in header and len(header) >= box + 12:
            return _by_numbers(*struct.unpack(">HH", header[box + 8 : box + 12]))
    return None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks before the pixels."""
    start = len(_PNG_SIGNATURE)
    while start + 8 <= len(data):
        size, kind = struct.unpack(">I4s", data[start : start + 8])
        if kind == b"IDAT":
            return
        yield kind, data[start + 8 : start + 8 + size]
        start += 12 + size


def _png_colours(chunks: dict[bytes, bytes]) -> Colours | None:
    """Choose by rank, as the third edition of the PNG specification asks: cICP, iCCP, sRGB, gAMA."""
    if len(numbers := chunks.get(b"cICP", b"")) == 4:
        return _by_numbers(numbers[0], numbers[1])
    gamma = chunks.get(b"gAMA", b"")
    if b"iCCP" in chunks or b"sRGB" in chunks or len(gamma) != 4 or not (number := int.from_bytes(gamma, "big")):
        return None
    exponent = 100_000 / number
    return None if _USUAL_GAMMA[0] <= exponent <= _USUAL_GAMMA[1] else Colours(gamma=exponent)


def _by_numbers(primaries: int, curve: int) -> Colours | None:
    if curve in _HDR_CURVES:
        return Colours(hdr=True)
    if primaries in _SRGB_PRIMARIES and curve in _SRGB_CURVES:
        return None
    known = curve in _SRGB_CURVES or curve in _GAMMA_CURVES
    return Colours(
        _GAMMA_CURVES.get(curve), primaries, known=known and (primaries in _SRGB_PRIMARIES or primaries in _TO_SRGB)
    )


def _srgb_to_linear(plane: np.ndarray) -> np.ndarray:
    return np.where(plane <= 0.04045, plane / 12.92, ((plane + 0.055) / 1.055) ** 2.4).astype(np.float32)


def _linear_to_srgb(plane: np.ndarray) -> np.ndarray:
    return np.where(plane <= 0.0031308, plane * 12.92, 1.055 * plane ** (1 / 2.4) - 0.055).astype(np.float32)
