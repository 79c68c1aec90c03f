"""The bucket planner: which token counts a data set is trained at, and which grid each picture takes.

Every picture of a family becomes exactly N tokens, so that one compiled graph and one batch serve all aspect ratios.
The planner knows the pictures: it takes the N near the wanted size whose grids lose least of these pictures.

What it minimises, in parts of a picture's area: the mean crop, plus 0.005 for each further graph (a second N has to
save half a percentage point to be worth its compilation), plus 0.01 · |ln(N / wanted)| (among counts that crop alike
the nearest to the wanted size wins).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, comb

import numpy as np
from numpy.typing import NDArray

from .cut_latents import place_latents
from .grids import FITS, RAGGED_EDGE, WHOLE_GRIDS, Family, Floats, Grid, Placement, crop_box, families, place

__all__ = [
    "FITS",
    "RAGGED_EDGE",
    "WHOLE_GRIDS",
    "BucketPlan",
    "Grid",
    "Placement",
    "crop_box",
    "equal_area_crop",
    "place_latents",
    "plan_buckets",
]

MEGAPIXEL = 1024 * 1024
MOST_MEGAPIXELS = 64
LEAST, MOST = 7 / 8, 17 / 16
PRICE_OF_A_GRAPH = 0.005
PRICE_OF_ANOTHER_SIZE = 0.01
# What a search may cost: ragged counts that are tried, entries of the (pictures, counts) table for one count and for
# several, and pictures weighed over all subsets of counts.
RAGGED_LIMIT = 1500
TABLE_LIMIT = 10_000_000
SUBSET_TABLE_LIMIT = 3_000_000
EXHAUSTIVE_LIMIT = 30_000_000


@dataclass(frozen=True)
class BucketPlan:
    """What the planner decided.

    token_counts: the N of each family that is used, sorted.
    placements: one for each size, in the order given.
    mean_crop, worst_crop: parts of a picture's area, 0 to 1; the mean counts repeats.
    wanted_tokens: what the megapixels asked for.
    upscaled: how many pictures are smaller than their grid and get enlarged (their placement's `scale` is above 1).
    equal_area_crop, equal_area_counts: what the usual buckets of equal area in steps of 64 pixels would lose on the
        same pictures, and how many token counts, so graphs, they would take.
    """

    fit: str
    pixels_per_token: int
    token_counts: tuple[int, ...]
    placements: tuple[Placement, ...]
    mean_crop: float
    worst_crop: float
    wanted_tokens: int
    upscaled: int
    equal_area_crop: float
    equal_area_counts: int


def plan_buckets(
    sizes: Sequence[tuple[int, int]],
    *,
    megapixels: float,
    pixels_per_token: int,
    max_graphs: int = 1,
    fit: str = WHOLE_GRIDS,
    weights: Sequence[float] | None = None,
    max_aspect: float = 4.0,
) -> BucketPlan:
    """Choose the token counts for a data set and place each picture on a grid.

    sizes: (height, width) in pixels, after EXIF orientation.
    megapixels: the wanted area; 1 is 1024 · 1024 pixels. The counts lie between 7/8 and 17/16 of it.
    pixels_per_token: along a side (16 for FLUX: 8 by the VAE, 2 by the patches).
    max_graphs: at most that many token counts. A ragged edge serves every aspect with one, and uses one.
    weights: how often each picture is seen per epoch (its repeats); all alike without it.
    max_aspect: grids lie between 1 : max_aspect and max_aspect : 1; a picture beyond that is cropped to it.
    """
    if fit not in FITS:
        raise ValueError(f"fit is {fit!r}; choose one of {', '.join(FITS)}.")
    if not 0 < megapixels <= MOST_MEGAPIXELS:
        raise ValueError(
            f"megapixels is {megapixels}; set it above 0 and to at most {MOST_MEGAPIXELS} (1 is 1024 x 1024 pixels)."
        )
    if max_graphs < 1:
        raise ValueError(f"max_graphs is {max_graphs}; set it to 1 or more.")
    if not sizes:
        raise ValueError("sizes is empty; give the planner at least one picture.")
    if (empty := next((size for size in sizes if min(size) < 1), None)) is not None:
        raise ValueError(f"sizes holds {empty[1]} x {empty[0]} pixels; leave that picture out, it has no area.")
    assert pixels_per_token >= 1 and max_aspect >= 1
    assert weights is None or (len(weights) == len(sizes) and min(weights) > 0)

    wanted = max(1, round(megapixels * MEGAPIXEL / pixels_per_token**2))
    log_aspects, aspect_of = np.unique([np.log(width / height) for height, width in sizes], return_inverse=True)
    shares = np.bincount(aspect_of, weights)
    shares = shares / shares.sum()

    candidates = _candidates(wanted, fit, max_aspect, len(log_aspects))
    table = np.stack([family.crop(log_aspects) + _price_of_size(family, wanted) for family in candidates], axis=1)
    chosen = _choose(table, shares, 1 if fit == RAGGED_EDGE else max_graphs)

    family_of = np.asarray(chosen)[table[:, chosen].argmin(axis=1)]
    grid_of = np.zeros(len(log_aspects), dtype=np.intp)
    for index in chosen:
        grid_of[family_of == index] = candidates[index].best(log_aspects[family_of == index])
    placements = tuple(
        place(size, family.grids[grid_of[aspect]], family.tokens, pixels_per_token)
        for size, aspect in zip(sizes, aspect_of, strict=True)
        for family in (candidates[family_of[aspect]],)
    )
    crops = np.array([placement.crop for placement in placements])
    other_crop, other_counts = equal_area_crop(sizes, megapixels, pixels_per_token, weights=weights)
    return BucketPlan(
        fit=fit,
        pixels_per_token=pixels_per_token,
        token_counts=tuple(sorted({placement.tokens for placement in placements})),
        placements=placements,
        mean_crop=float(np.average(crops, weights=weights)),
        worst_crop=float(crops.max()),
        wanted_tokens=wanted,
        upscaled=sum(placement.scale > 1 for placement in placements),
        equal_area_crop=other_crop,
        equal_area_counts=other_counts,
    )


def equal_area_crop(
    sizes: Sequence[tuple[int, int]],
    megapixels: float,
    pixels_per_token: int,
    step: int = 64,
    weights: Sequence[float] | None = None,
) -> tuple[float, int]:
    """Mean crop and number of token counts of the usual buckets: sides in steps of `step` pixels, area near the wanted.

    Widths run from a quarter to twice the side of the square of that area, each with the largest height that keeps
    within the area; each grid also turned. A picture takes the one nearest to its aspect.
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
    return float(np.average(crops, weights=weights)), len(set(counts[nearest].tolist()))


def _price_of_size(family: Family, wanted: int) -> float:
    return PRICE_OF_ANOTHER_SIZE * abs(np.log(family.tokens / wanted))


def _candidates(wanted: int, fit: str, max_aspect: float, pictures: int) -> list[Family]:
    """The families of the window around the wanted count; where pictures and counts are many, those of most grids.

    Ragged counts of a large window, which all have about as many grids, are tried at even steps.
    """
    least, most = max(1, ceil(wanted * LEAST)), max(wanted, int(wanted * MOST))
    step = ceil((most - least) / RAGGED_LIMIT) if fit == RAGGED_EDGE and most > least else 1
    found = families(range(least, most + 1, step), fit, max_aspect)
    while not found:
        least -= 1
        found = families([least], fit, max_aspect)
    limit = max(64, TABLE_LIMIT // pictures)
    if len(found) > limit:
        found = sorted(found, key=lambda f: (-len(f.grids), abs(f.tokens - wanted)))[:limit]
    return sorted(found, key=lambda f: f.tokens)


def _choose(table: Floats, shares: Floats, max_graphs: int) -> list[int]:
    """The columns of the (pictures, counts) table to use: the least mean cost, with the price of each further one."""
    alone = shares @ table
    best = [int(alone.argmin())]
    least = float(alone.min())
    pool = np.sort(np.argsort(alone, kind="stable")[: max(64, SUBSET_TABLE_LIMIT // len(table))])
    small = table[:, pool]
    subset = [int(np.flatnonzero(pool == best[0])[0])]
    for graphs in range(2, min(max_graphs, len(pool)) + 1):
        # No subset of this size or above can pay any more, not even one that loses nothing.
        if PRICE_OF_A_GRAPH * (graphs - 1) >= least:
            break
        subset = _best_subset(small, shares, subset, graphs)
        cost = float(shares @ small[:, subset].min(axis=1)) + PRICE_OF_A_GRAPH * (graphs - 1)
        if cost < least:
            least, best = cost, pool[subset].tolist()
    return sorted(best)


def _best_subset(table: Floats, shares: Floats, start: list[int], size: int) -> list[int]:
    """The `size` columns whose minimum over each row has the least mean.

    Exact where there are few subsets; else `start` (size - 1 columns) and the best one added, then single columns
    exchanged as long as that helps.
    """
    pictures, counts = table.shape
    if comb(counts, size - 1) <= 3000 and comb(counts, size) * pictures <= EXHAUSTIVE_LIMIT:
        return _try_all(table, shares, np.full(pictures, np.inf), 0, size)[1]
    subset = [*start, _best_addition(table, shares, start)[1]]
    cost = float(shares @ table[:, subset].min(axis=1))
    improved = True
    while improved:
        improved = False
        for position in range(size):
            others = subset[:position] + subset[position + 1 :]
            other_cost, column = _best_addition(table, shares, others)
            if other_cost < cost - 1e-9:
                subset, cost, improved = [*others, column], other_cost, True
    return subset


def _best_addition(table: Floats, shares: Floats, columns: list[int]) -> tuple[float, int]:
    costs = shares @ np.minimum(table, table[:, columns].min(axis=1, keepdims=True))
    return float(costs.min()), int(costs.argmin())


def _try_all(
    table: Floats, shares: Floats, so_far: NDArray[np.float64], first: int, size: int
) -> tuple[float, list[int]]:
    """The best `size` columns from `first` on, added to what earlier columns give each row (`so_far`)."""
    if size == 1:
        costs = shares @ np.minimum(table[:, first:], so_far[:, None])
        return float(costs.min()), [first + int(costs.argmin())]
    best: tuple[float, list[int]] = (float("inf"), [])
    for column in range(first, table.shape[1] - size + 1):
        cost, rest = _try_all(table, shares, np.minimum(so_far, table[:, column]), column + 1, size - 1)
        if cost < best[0]:
            best = (cost, [column, *rest])
    return best
