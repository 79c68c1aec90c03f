"""Borders of one colour around a picture, such as the bars of a film or the frame of a scan."""

import numpy as np

_TOLERANCE = 8  # levels by which a border's pixels may differ from its colour
_OTHER = 24  # levels from which on a pixel has another colour
_MOST_STRAY = 0.01  # part of a border's row that may have another colour
_LEAST_EDGE = 0.4  # part of the row behind a border that has another colour
_LEAST_PART, _LEAST_PIXELS = 0.01, 3
_BEHIND = 2  # rows behind the border's last, where compression has blurred its edge


def find_borders(pixels: np.ndarray) -> tuple[float, float, float, float]:
    """Find the borders of a picture, (H, W, 3) of uint8: left, top, right, bottom as parts of the side, 0 without one.

    A border ends in a straight line: behind it most of a row has another colour. So the white around a product, or a
    clear sky, is none.
    """
    upright = pixels.astype(np.int16)
    across = upright.swapaxes(0, 1)
    return _border(across), _border(upright), _border(across[::-1]), _border(upright[::-1])


def _border(rows: np.ndarray) -> float:
    """Measure the border before the first row of (rows, W, 3)."""
    count = len(rows)
    colour = np.median(rows[0], axis=0)
    depth = 0
    while depth < count // 2 and _strays(rows[depth], colour, _TOLERANCE) <= _MOST_STRAY:
        depth += 1
    if depth < max(_LEAST_PIXELS, _LEAST_PART * count) or depth >= count // 2:
        return 0.0
    behind = rows[min(depth + _BEHIND, count - 1)]
    return depth / count if _strays(behind, colour, _OTHER) >= _LEAST_EDGE else 0.0


def _strays(row: np.ndarray, colour: np.ndarray, tolerance: int) -> float:
    """Compute the part of a row whose colour differs by more than `tolerance`."""
    return float((np.abs(row - colour).max(axis=-1) > tolerance).mean())
