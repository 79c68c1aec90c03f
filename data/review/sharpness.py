"""Sharpness of a picture: how much smaller it could be without losing detail, and whether it was enlarged."""

from dataclasses import dataclass

import numpy as np
from scipy import fft

TILE = 64  # pixels of a side; a spectrum has half as many frequencies
_SHARPEST = 10  # a tenth of the tiles counts: the background of a portrait may be out of focus
_FIRST = 3  # the lowest frequency that counts, in waves per tile; the window blurs those below
_REFERENCE = slice(_FIRST, 7)
_LEAST_POWER = 0.02  # part of the power expected at a frequency, above which there is detail
_NOISE = 4 / 12  # power of rounding to 8 bits, and of compression: four times that of the rounding alone
# Frequencies, in waves per pixel, of interpolation with a factor of 1.16 to 7.
_PERIODIC = np.linspace(0.14, 0.49, 351)
_GRID = 8  # pixels of a JPEG's blocks, whose edges are periodic too
_LEAST_PEAK = 8.0  # times the median
_ROLL_OFF = 1.35  # an interpolated picture keeps some power above the end of its detail

_WINDOW = np.outer(np.hanning(TILE + 2)[1:-1], np.hanning(TILE + 2)[1:-1]).astype(np.float32)
_RADIUS = np.rint(np.hypot(fft.fftfreq(TILE)[:, None], fft.rfftfreq(TILE)[None]) * TILE).astype(int)
_COUNTS = np.bincount(_RADIUS.ravel())
_HALF = TILE // 2


@dataclass(frozen=True)
class Sharpness:
    """Sharpness of a picture.

    factor: its sides could be divided by this without losing detail; 1 for a sharp one.
    enlarged: whether interpolation left its trace; without one the picture is blurred, or was enlarged and then saved
        otherwise.
    """

    factor: float = 1.0
    enlarged: bool = False


def measure_sharpness(grey: np.ndarray) -> Sharpness:
    """Measure the sharpness of a picture, (H, W) in levels from 0 to 255.

    Natural pictures have a power that falls with the square of the frequency (Field 1987, Relations between the
    statistics of natural images and the response properties of cortical cells). The highest frequency at which the
    sharpest tiles still have a fiftieth of that is the end of their detail. The second derivative of an interpolated
    picture is periodic (Gallagher 2005, Detection of linear and cubic interpolation in JPEG compressed images), unless
    it was enlarged exactly twice.
    """
    power = _spectrum(grey)
    if power is None:
        return Sharpness()
    end = _last_detail(power)
    factor = _HALF / end if end else 1.0
    peak = _interpolation(grey)
    if peak:
        factors = (1 / peak, 1 / (1 - peak))
        return Sharpness(min(factors, key=lambda other: abs(np.log(other / factor / _ROLL_OFF))), True)
    return Sharpness(factor)


def _spectrum(grey: np.ndarray) -> np.ndarray | None:
    """Compute the power of the sharpest tiles by frequency, as part of the expected one; None if all are flat."""
    rows, columns = grey.shape[0] // TILE, grey.shape[1] // TILE
    if not rows or not columns:
        return None
    tiles = grey[: rows * TILE, : columns * TILE].reshape(rows, TILE, columns, TILE).swapaxes(1, 2)
    tiles = tiles.reshape(-1, TILE, TILE)
    steps = np.square(tiles[:, :, 1:] - tiles[:, :, :-1]).mean((1, 2))
    count = min(len(tiles), max(4, len(tiles) // _SHARPEST))
    sharpest = tiles[np.argpartition(steps, -count)[-count:]]
    waves = fft.rfft2((sharpest - sharpest.mean((1, 2), keepdims=True)) * _WINDOW)
    power = np.square(np.abs(waves)).mean(0)
    rings = (np.bincount(_RADIUS.ravel(), power.ravel()) / _COUNTS)[: _HALF + 1]
    rings = np.maximum(rings - _NOISE * np.square(_WINDOW).sum(), 0.0)
    expected = rings * np.square(np.arange(_HALF + 1))
    reference = np.median(expected[_REFERENCE])
    return expected / reference if reference > 0 else None


def _last_detail(power: np.ndarray) -> float:
    """Find the frequency, in waves per tile, above which there is no detail; 0 if there is none at all."""
    above = np.nonzero(power >= _LEAST_POWER)[0]
    above = above[above >= _FIRST]
    if not above.size:
        return 0.0
    last = int(above[-1])
    if last == _HALF:
        return float(last)
    high, low, least = np.log((power[last], max(power[last + 1], 1e-9), _LEAST_POWER))
    return last + float((high - least) / (high - low))


def _interpolation(grey: np.ndarray) -> float:
    """Find the frequency of interpolation, in waves per pixel, the same along both axes; 0 if there is none."""
    strengths = [_periods(grey, axis) for axis in (0, 1)]
    both = np.minimum(*strengths)
    on_grid = np.abs(_PERIODIC * _GRID - np.rint(_PERIODIC * _GRID)) < 0.1
    both[on_grid] = 0.0
    strongest = int(both.argmax())
    return float(_PERIODIC[strongest]) if both[strongest] >= _LEAST_PEAK else 0.0


def _periods(grey: np.ndarray, axis: int) -> np.ndarray:
    """Compute how periodic the second derivative along an axis is at each of _PERIODIC, as times the median."""
    bends = np.log(np.abs(np.diff(grey, 2, axis=axis)).mean(1 - axis) + 1e-3)
    mean = np.convolve(np.pad(bends, 8, "edge"), np.full(17, 1 / 17), "valid")
    strength = np.abs(fft.rfft((bends - mean) * np.hanning(len(bends))))
    frequencies = np.arange(len(strength)) / len(bends)
    median = np.median(strength[frequencies > 0.05]) if len(bends) > TILE else 0.0
    if not median:
        return np.zeros_like(_PERIODIC)
    wide = np.maximum(strength, np.maximum(np.roll(strength, 1), np.roll(strength, -1)))
    return np.interp(_PERIODIC, frequencies, wide / median)
