"""Learning rate curve: piecewise linear through points written by the user, such as "0:1, 50:1, 100:0.1"."""

import math

from ...common.text import cut, quoted
from ...common.untrusted.budgets import SETTINGS, check_size

LARGEST_FACTOR = 1e6  # much larger factors would overflow the rate in fp32

Curve = tuple[tuple[float, float], ...]


def parse_curve(text: str) -> Curve:
    """Parse `lr_curve`: `0:1, 50%:1, 100:0.1` gives (progress, factor) pairs ((0, 1), (0.5, 1), (1, 0.1)).

    Raises ValueError if a point is malformed, progress does not increase, every factor is 0, or the text is too long.
    """
    check_size(SETTINGS, "lr_curve", characters=len(text))
    points: list[tuple[float, float]] = []
    for part in text.replace("\n", ",").split(","):
        if not part.strip():
            continue
        place, colon, factor = part.partition(":")
        try:
            point = float(place.strip().removesuffix("%")) / 100, float(factor)
        except ValueError:
            point = math.nan, math.nan
        if not (colon and 0 <= point[0] <= 1 and 0 <= point[1] < math.inf):
            raise ValueError(
                f"lr_curve has the point {quoted(part.strip())}; write percent of the steps, a colon and a "
                "factor of 0 or more, such as '0:1, 50:1, 100:0.1'."
            )
        if point[1] > LARGEST_FACTOR:
            raise ValueError(
                f"lr_curve has the factor {cut(factor.strip())}; write one of at most {LARGEST_FACTOR:g}, or raise "
                "learning_rate."
            )
        if points and point[0] <= points[-1][0]:
            raise ValueError(
                f"lr_curve has {quoted(part.strip())} after a point at or past it; write the points in order."
            )
        points.append(point)
    if not any(factor for _, factor in points):
        raise ValueError("lr_curve has no point above 0, so nothing would be learnt; write '0:1, 50:1, 100:0.1'.")
    return tuple(points)


def on_curve(curve: Curve, progress: float) -> float:
    """Interpolate the factor at `progress`: linear between two points, constant outside them."""
    for (low, start), (high, end) in zip(curve, curve[1:], strict=False):
        if low <= progress <= high:
            return start + (end - start) * (progress - low) / (high - low)
    return curve[0][1] if progress < curve[0][0] else curve[-1][1]
