"""Custom distribution of noise levels: a piecewise linear density through points such as "0:1, 0.5:3, 1:0"."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

from ...common.text import quoted

MOST_POINTS = 1000
EXAMPLE = "0:1, 0.5:3, 1:0"


@dataclass(frozen=True)
class SigmaCurve:
    """Density that is linear between its points and 0 outside them.

    sigmas: positions of the points, increasing.
    weights: height of the density at each point, scaled to a maximum of 1.
    parts: cumulative probability at each point.
    """

    sigmas: tuple[float, ...]
    weights: tuple[float, ...]
    parts: tuple[float, ...]

    def cdf(self, sigma: float) -> float:
        """Return the cumulative probability at `sigma`: the area of the trapezoids up to it."""
        if not self.sigmas[0] < sigma < self.sigmas[-1]:
            return float(sigma >= self.sigmas[-1])
        i = bisect_right(self.sigmas, sigma) - 1
        start, width = self.sigmas[i], self.sigmas[i + 1] - self.sigmas[i]
        low, high = self.weights[i], self.weights[i + 1]
        step = sigma - start
        covered = step * (low + 0.5 * (high - low) * step / width)
        whole = 0.5 * (low + high) * width
        return self.parts[i] + (self.parts[i + 1] - self.parts[i]) * (covered / whole if whole else 0.0)

    def quantile(self, probability: float) -> float:
        """Return the sigma with cumulative probability `probability`: the root of a quadratic between two points."""
        if probability <= 0.0:
            return self.sigmas[max(bisect_right(self.parts, 0.0) - 1, 0)]
        i = min(max(bisect_left(self.parts, probability) - 1, 0), len(self.sigmas) - 2)
        width = self.sigmas[i + 1] - self.sigmas[i]
        low = self.weights[i]
        high = self.weights[i + 1]
        share = min((probability - self.parts[i]) / (self.parts[i + 1] - self.parts[i]), 1.0)
        # Solve low·t + (high − low)·t²/2 = share·(low + high)/2 for t in widths, in the form valid for high = low too.
        area = share * 0.5 * (low + high)
        root = math.sqrt(max(low * low + 2 * (high - low) * area, 0.0))
        return self.sigmas[i] + width * min(2 * area / (low + root), 1.0)


@lru_cache(maxsize=8)
def parse_curve(text: str) -> SigmaCurve:
    """Parse `sigma:weight` points, separated by commas, semicolons, spaces or lines.

    Raises ValueError for a malformed point, fewer than two points or more than MOST_POINTS, sigmas that do not increase
    or are outside 0 to 1, a negative weight, or weights that are all 0.
    """
    points: list[tuple[float, float]] = []
    entries = text.replace(",", " ").replace(";", " ").split()
    if len(entries) > MOST_POINTS:
        raise ValueError(f"sigma_curve has {len(entries)} points; give at most {MOST_POINTS}.")
    for entry in entries:
        try:
            sigma_text, weight_text = entry.split(":")
            points.append((float(sigma_text), float(weight_text)))
        except ValueError:
            message = f"sigma_curve has {quoted(entry)}; write points as sigma:weight, such as {EXAMPLE}."
            raise ValueError(message) from None
        sigma, weight = points[-1]
        if not 0 <= sigma <= 1:
            raise ValueError(f"sigma_curve has {quoted(entry)}; sigmas lie between 0 (the picture) and 1 (noise).")
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"sigma_curve has {quoted(entry)}; give a weight of 0 or more.")
        if len(points) > 1 and sigma <= points[-2][0]:
            raise ValueError(
                f"sigma_curve has {quoted(entry)} after sigma {points[-2][0]:g}; put the points in rising order."
            )
    if len(points) < 2:
        raise ValueError(f"sigma_curve is {quoted(text)}; give at least two points, such as {EXAMPLE}.")
    if not (highest := max(weight for _, weight in points)):
        raise ValueError(f"sigma_curve is {quoted(text)}; give at least one weight above 0.")
    points = [(sigma, weight / highest) for sigma, weight in points]
    sigmas, weights = zip(*points, strict=True)
    areas = [0.5 * (a[1] + b[1]) * (b[0] - a[0]) for a, b in zip(points, points[1:], strict=False)]
    whole = math.fsum(areas)
    parts = [math.fsum(areas[:i]) / whole for i in range(len(points))]
    return SigmaCurve(sigmas, weights, (*parts[:-1], 1.0))
