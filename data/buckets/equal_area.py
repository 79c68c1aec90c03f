"""Crop loss of the usual equal-area buckets, as a baseline for the plan."""

from collections.abc import Sequence

import numpy as np

MEGAPIXEL = 1024 * 1024


def equal_area_crop(
    sizes: Sequence[tuple[int, int]],
    megapixels: float,
    pixels_per_token: int,
    step: int = 64,
    weights: Sequence[float] | None = None,
    frames: Sequence[int] | None = None,
) -> tuple[float, int]:
    """Compute the mean crop (0 to 1) and the number of token counts of the usual equal-area buckets.

    Bucket sides are multiples of `step` pixels. Widths run from a quarter of to twice the side of a square of the
    requested area; each has the largest height within the area. Each grid exists in both orientations. An image goes to
    the bucket of the nearest aspect; a video of `frames` latent frames takes that many times its tokens.

    sizes: (height, width) in pixels.
    pixels_per_token: along a side.
    weights: showings of each image per epoch.
    frames: latent frames of each; 1 for all by default.
    """
    area = megapixels * MEGAPIXEL
    side = area**0.5
    widths = range(max(step, round(side / 4) // step * step), max(step, int(2 * side)) + 1, step)
    upright = {(max(step, int(area / width) // step * step), width) for width in widths}
    buckets = sorted(upright | {(width, height) for height, width in upright})
    bucket_aspects = np.log([width / height for height, width in buckets])
    counts = np.array([round(height * width / pixels_per_token**2) for height, width in buckets])
    by_aspect = np.argsort(bucket_aspects, kind="stable")
    bucket_aspects, counts = bucket_aspects[by_aspect], counts[by_aspect]
    log_aspects = np.log([width / height for height, width in sizes])
    nearest = np.searchsorted((bucket_aspects[:-1] + bucket_aspects[1:]) / 2, log_aspects)
    crops = -np.expm1(-np.abs(log_aspects - bucket_aspects[nearest]))
    used = counts[nearest] * (1 if frames is None else np.asarray(frames))
    return float(np.average(crops, weights=weights)), len(set(used.tolist()))
