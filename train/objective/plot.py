"""Plot of an objective's noise levels: a histogram of samples against the density.

Rendered with Pillow, which ComfyUI always installs.
"""

from collections.abc import Sequence

import torch
from PIL import Image

from ...common.canvas import FAINT, SOFT, Canvas, Colour
from ...common.rng import generator
from .loss import sigma_weight
from .options import RESOLUTION_SAMPLINGS, ObjectiveOptions
from .timestep_sampling import MIN_RANGE_PROBABILITY, UNSHIFTED_SAMPLINGS, range_probability, sample_sigma, sigma_cdf

WIDTH, HEIGHT = 1024, 512
SAMPLES = 5000
BARS = 50
POINTS = 400
MEGAPIXEL_TOKENS = 4096  # tokens of a 1024 x 1024 image, for shifts that depend on the resolution
_BAR = (186, 209, 234)
_DENSITY = (23, 92, 163)
_WEIGHTED = (197, 74, 62)
_LEFT = 40
_TOP = 120
_RIGHT = 984
_BOTTOM = 416
_TEXT = 30  # pixels; on a node 400 pixels wide the plot is shown at about a third of its size


def plot_distribution(options: ObjectiveOptions) -> Image.Image:
    """Plot the noise levels of an objective. Returns an RGB image.

    Bars show a histogram of `SAMPLES` samples, drawn as in training. A line shows the density. With a weighting, a
    second line shows density times weight.

    No model is known here: with `shift` 0 the family's shift is omitted, and a shift by resolution is that of
    1024 x 1024.
    """
    canvas = Canvas(WIDTH, HEIGHT)
    canvas.text(_LEFT, 14, ", ".join([options.timestep_sampling, *_facts(options)]), 32, room=_RIGHT - _LEFT)
    for tick in range(0, 11, 2):
        x = _x(tick / 10)
        canvas.line([(x, _TOP), (x, _BOTTOM)], FAINT, 2)
        canvas.text(x, _BOTTOM + 10, f"{tick / 10:g}", _TEXT, SOFT, "ma")
    canvas.text(_LEFT, _BOTTOM + 50, "picture (detail)", _TEXT, SOFT)
    canvas.text(_RIGHT, _BOTTOM + 50, "noise (composition)", _TEXT, SOFT, "ra")
    if range_probability(options, MEGAPIXEL_TOKENS, 1.0) < MIN_RANGE_PROBABILITY:
        canvas.text(WIDTH / 2, 250, "Almost nothing in this range is trained; widen it.", 32, _WEIGHTED, "ma")
    else:
        _curves(canvas, options)
    canvas.line([(_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)], SOFT, 2)
    return canvas.finish()


def sampled_histogram(options: ObjectiveOptions) -> list[float]:
    """Compute the histogram of `SAMPLES` samples as a density, in `BARS` equal bins of [0, 1]."""
    stream, counts = generator(0, "picture"), [0] * BARS
    for _ in range(SAMPLES):
        sigma = sample_sigma(options, stream, MEGAPIXEL_TOKENS)
        counts[min(int(sigma * BARS), BARS - 1)] += 1
    return [count * BARS / SAMPLES for count in counts]


def density(options: ObjectiveOptions) -> list[float]:
    """Compute the mean of the exact density in each of `POINTS` equal bins of [0, 1]."""
    parts = [sigma_cdf(options, MEGAPIXEL_TOKENS, 1.0, i / POINTS) for i in range(POINTS + 1)]
    return [(upper - lower) * POINTS for lower, upper in zip(parts, parts[1:], strict=False)]


def weighted_density(options: ObjectiveOptions) -> list[float]:
    """Compute `density` times the loss weight, normalised to an area of 1."""
    weights = sigma_weight(options, (torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS).tolist()
    products = [height * weight for height, weight in zip(density(options), weights, strict=True)]
    area = sum(products) / POINTS
    return [product / area for product in products] if area > 0 else products


def _curves(canvas: Canvas, options: ObjectiveOptions) -> None:
    bars, exact = sampled_histogram(options), density(options)
    weighted = weighted_density(options) if options.weighting != "none" else []
    # Density and weight may be infinite at an end (beta, sigma_sqrt): the finite bars set the scale.
    ceiling = 1.15 * max(*bars, *_means(exact), min(max(_means(weighted), default=0.0), 2 * max(bars)))
    for i, height in enumerate(bars):
        if height:
            left_edge, right_edge = _x(i / BARS) + 0.5, _x((i + 1) / BARS) - 0.5
            top = _y(height, ceiling)
            canvas.box(canvas.nearest(left_edge), canvas.nearest(top), canvas.nearest(right_edge), _BOTTOM, _BAR)
    entries = [(_BAR, f"{SAMPLES:,} draws"), (_DENSITY, "density")]
    _curve(canvas, exact, ceiling, _DENSITY)
    if weighted:
        _curve(canvas, weighted, ceiling, _WEIGHTED)
        entries.append((_WEIGHTED, f"weighted by {options.weighting}"))
    x = float(_LEFT)
    for colour, text in entries:
        canvas.line([(x, 82), (x + 32, 82)], colour, 8)
        canvas.text(x + 44, 82, text, _TEXT, anchor="lm")
        x += canvas.text_width(text, _TEXT) + 76


def _means(heights: Sequence[float]) -> list[float]:
    """Average the heights over the width of each bar."""
    size = POINTS // BARS
    return [sum(heights[i : i + size]) / size for i in range(0, len(heights), size)]


def _facts(options: ObjectiveOptions) -> list[str]:
    """List the shift, range and stratification of the plot."""
    parts = []
    if options.shift > 0:
        parts.append(f"shift {options.shift:g}")
    elif options.timestep_sampling in RESOLUTION_SAMPLINGS:
        parts.append("shift of a picture of 1024 x 1024")
    elif options.timestep_sampling not in UNSHIFTED_SAMPLINGS:
        parts.append("without the shift that the model adds (shift 0)")
    if (options.min_sigma, options.max_sigma) != (0.0, 1.0):
        parts.append(f"{options.min_sigma:g} to {options.max_sigma:g} ({options.sigma_range})")
    if options.stratified != "off":
        parts.append(f"spread evenly over each {options.stratified}")
    return parts


def _curve(canvas: Canvas, heights: Sequence[float], ceiling: float, colour: Colour) -> None:
    points = [(_x((i + 0.5) / POINTS), _y(min(height, ceiling), ceiling)) for i, height in enumerate(heights)]
    canvas.line(points, colour, 5)


def _x(sigma: float) -> float:
    return _LEFT + sigma * (_RIGHT - _LEFT)


def _y(height: float, ceiling: float) -> float:
    return _BOTTOM - height / ceiling * (_BOTTOM - _TOP)
