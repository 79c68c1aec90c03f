"""Bucket planner: token counts for a data set, and the grid of each image or video.

Every image of a bucket becomes exactly N tokens, so one compiled graph and one batch serve all aspect ratios. The
planner knows the images: among all N near the requested size it chooses those whose grids crop these images least. A
video of T latent frames takes T times the tokens of one frame, N = T · n. Videos of different lengths therefore share
an N that is a multiple of both lengths if both n are near the requested size.

The cost, in fractions of an image's area, is the mean crop
+ 0.005 for each further graph (a second N has to save half a percentage point to be worth its compilation)
+ 0.01 · |ln(n / wanted_tokens)| (of counts that crop alike, the one nearest to the requested size wins).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, comb

import numpy as np
from numpy.typing import NDArray

from ...common.text import quoted
from .equal_area import MEGAPIXEL, equal_area_crop
from .grids import FITS, RAGGED_EDGE, WHOLE_GRIDS, Bucket, Floats, Grid, Placement, find_buckets, place

MOST_MEGAPIXELS = 64
LEAST, MOST = 7 / 8, 17 / 16
PRICE_OF_A_GRAPH = 0.005
PRICE_OF_ANOTHER_SIZE = 0.01
# Limits of the search: ragged counts tried, entries of the (images, counts) table for one count and for
# several, and rows of images evaluated over all subsets of counts.
RAGGED_LIMIT = 1500
TABLE_LIMIT = 10_000_000
SUBSET_TABLE_LIMIT = 3_000_000
EXHAUSTIVE_LIMIT = 30_000_000


@dataclass(frozen=True)
class BucketPlan:
    """Result of the planner.

    fit: one of FITS.
    pixels_per_token: along a side.
    token_counts: the N of each bucket in use, sorted.
    placements: one for each size, in the order of the sizes.
    mean_crop: mean fraction of an image's area lost, weighted by showings, 0 to 1.
    worst_crop: largest such fraction.
    wanted_tokens: tokens of one frame at the requested megapixels.
    upscaled: number of images smaller than their grid (`scale` of their placement above 1).
    equal_area_crop: mean crop of the same images in the usual equal-area buckets, in steps of 64 pixels.
    equal_area_counts: token counts of those buckets, each of which is a graph.
    least_graphs: fewest token counts that the frame counts of the data can share; 1 for images alone.
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
    least_graphs: int = 1


@dataclass(frozen=True)
class _Candidate:
    """Token count with the one-frame bucket of each frame count that can have it.

    tokens: N.
    buckets: bucket of n = N / T tokens, by T.
    """

    tokens: int
    buckets: Mapping[int, Bucket]


def plan_buckets(
    sizes: Sequence[tuple[int, int]],
    *,
    megapixels: float,
    pixels_per_token: int,
    max_graphs: int = 1,
    fit: str = WHOLE_GRIDS,
    weights: Sequence[float] | None = None,
    max_aspect: float = 4.0,
    frames: Sequence[int] | None = None,
) -> BucketPlan:
    """Choose the token counts of a data set and place each image or video on a grid.

    sizes: (height, width) in pixels, after EXIF orientation.
    megapixels: requested area of one frame; 1 is 1024 · 1024 pixels. The n of a frame are between 7/8 and 17/16 of it.
    pixels_per_token: along a side (16 for FLUX: 8 by the VAE, 2 by the patches).
    max_graphs: at most that many token counts, or `least_graphs` if that is more. A ragged edge serves every aspect
        with one count, and uses as few as the frame counts allow.
    fit: one of FITS.
    weights: mean showings of each image per epoch; equal by default.
    max_aspect: grids are between 1 : max_aspect and max_aspect : 1; a more extreme image is cropped to it.
    frames: latent frames of each; 1 for all by default.
    Raises ValueError for values out of range, and if sizes is empty or holds an empty image.
    """
    if fit not in FITS:
        raise ValueError(f"fit is {quoted(fit)}; choose one of {', '.join(FITS)}.")
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
    frames = [1] * len(sizes) if frames is None else frames
    assert pixels_per_token >= 1 and max_aspect >= 1
    assert weights is None or (len(weights) == len(sizes) and min(weights) > 0)
    assert len(frames) == len(sizes) and min(frames) >= 1

    tokens = wanted_tokens(megapixels, pixels_per_token)
    keys = np.array([(count, np.log(width / height)) for count, (height, width) in zip(frames, sizes, strict=True)])
    kinds, kind_of = np.unique(keys, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    frames_of, log_aspects = kinds[:, 0].astype(int), kinds[:, 1]
    shares = np.bincount(kind_of, weights)
    shares = shares / shares.sum()

    counts = sorted(set(frames_of.tolist()))
    candidates = _candidates(tokens, fit, max_aspect, counts, len(kinds))
    cover = _least_cover(candidates, counts)
    table = _table(candidates, frames_of, log_aspects, tokens, unserved=2 / float(shares.min()))
    graph_limit = 1 if fit == RAGGED_EDGE else max_graphs
    columns = _choose(table, shares, _start(table, shares, candidates, frames_of, cover), frames_of, graph_limit)

    column_of = np.asarray(columns)[table[:, columns].argmin(axis=1)]
    grid_of: list[Grid] = [
        replace(bucket.grids[int(bucket.best(log_aspects[kind : kind + 1])[0])], frames=int(frames_of[kind]))
        for kind, column in enumerate(column_of.tolist())
        for bucket in (candidates[column].buckets[int(frames_of[kind])],)
    ]
    placements = tuple(
        place(size, grid_of[kind], candidates[int(column_of[kind])].tokens, pixels_per_token)
        for size, kind in zip(sizes, kind_of.tolist(), strict=True)
    )
    crops = np.array([placement.crop for placement in placements])
    other_crop, other_counts = equal_area_crop(sizes, megapixels, pixels_per_token, weights=weights, frames=frames)
    return BucketPlan(
        fit=fit,
        pixels_per_token=pixels_per_token,
        token_counts=tuple(sorted({placement.tokens for placement in placements})),
        placements=placements,
        mean_crop=float(np.average(crops, weights=weights)),
        worst_crop=float(crops.max()),
        wanted_tokens=tokens,
        upscaled=sum(placement.scale > 1 for placement in placements),
        equal_area_crop=other_crop,
        equal_area_counts=other_counts,
        least_graphs=len(cover),
    )


def wanted_tokens(megapixels: float, pixels_per_token: int) -> int:
    """Compute the tokens of one frame at the requested megapixels, at least 1."""
    return max(1, round(megapixels * MEGAPIXEL / pixels_per_token**2))


def _candidates(wanted_tokens: int, fit: str, max_aspect: float, counts: Sequence[int], kinds: int) -> list[_Candidate]:
    """List the token counts whose frames are in the window around the requested size, for these frame counts.

    If the table of kinds and counts would grow too large, the counts with the most grids are kept. Ragged counts of
    a large window all have about as many grids, so they are tried at even steps.
    """
    smallest, largest = max(1, ceil(wanted_tokens * LEAST)), max(wanted_tokens, int(wanted_tokens * MOST))
    step = (
        ceil((largest - smallest) / RAGGED_LIMIT)
        if fit == RAGGED_EDGE and largest > smallest and len(counts) == 1
        else 1
    )
    frame_buckets = find_buckets(range(smallest, largest + 1, step), fit, max_aspect)
    while not frame_buckets:
        smallest -= 1
        frame_buckets = find_buckets([smallest], fit, max_aspect)
    by_tokens: dict[int, dict[int, Bucket]] = {}
    for frames in counts:
        for bucket in frame_buckets:
            by_tokens.setdefault(frames * bucket.tokens, {})[frames] = bucket
    candidates = [_Candidate(tokens, buckets) for tokens, buckets in by_tokens.items()]
    limit = max(64, TABLE_LIMIT // kinds)
    if len(candidates) > limit:
        selection: dict[int, _Candidate] = {}
        for frames in counts:
            serving = [
                (candidate, candidate.buckets[frames]) for candidate in candidates if frames in candidate.buckets
            ]
            serving.sort(key=lambda c: (-len(c[0].buckets), -len(c[1].grids), abs(c[1].tokens - wanted_tokens)))
            selection |= {candidate.tokens: candidate for candidate, _ in serving[: max(64, limit // len(counts))]}
        candidates = list(selection.values())
    return sorted(candidates, key=lambda c: c.tokens)


def _least_cover(candidates: Sequence[_Candidate], counts: Sequence[int]) -> list[frozenset[int]]:
    """Find the fewest groups of frame counts such that the counts of each group share a token count."""
    groups = {frozenset(candidate.buckets) for candidate in candidates}
    groups = {group for group in groups if not any(group < other for other in groups)}

    @cache
    def cover(uncovered: frozenset[int]) -> tuple[frozenset[int], ...]:
        if not uncovered:
            return ()
        first = min(uncovered)
        ways = [
            (group & uncovered, *cover(uncovered - group)) for group in sorted(groups, key=sorted) if first in group
        ]
        return min(ways, key=len)

    return list(cover(frozenset(counts)))


def _table(
    candidates: Sequence[_Candidate],
    frames_of: NDArray[np.int_],
    log_aspects: Floats,
    wanted_tokens: int,
    unserved: float,
) -> Floats:
    """Compute the cost of each kind of image with each count, price of the size included: (kinds, counts).

    unserved: cost of a count that can't hold the frames of the kind.
    """
    table = np.full((len(log_aspects), len(candidates)), unserved)
    for frames in np.unique(frames_of).tolist():
        rows = np.flatnonzero(frames_of == frames)
        for column, candidate in enumerate(candidates):
            if frames in candidate.buckets:
                bucket = candidate.buckets[frames]
                table[rows, column] = bucket.crop(log_aspects[rows]) + _price_of_size(bucket, wanted_tokens)
    return table


def _price_of_size(bucket: Bucket, wanted_tokens: int) -> float:
    """Compute the price of a token count that differs from the requested one."""
    return PRICE_OF_ANOTHER_SIZE * abs(np.log(bucket.tokens / wanted_tokens))


def _start(
    table: Floats,
    shares: Floats,
    candidates: Sequence[_Candidate],
    frames_of: NDArray[np.int_],
    cover: Sequence[frozenset[int]],
) -> list[int]:
    """Choose the best column for each group of frame counts by itself."""
    start = []
    for group in cover:
        rows = np.isin(frames_of, list(group))
        serving = [column for column, candidate in enumerate(candidates) if group <= candidate.buckets.keys()]
        start.append(serving[int((shares[rows] @ table[rows][:, serving]).argmin())])
    return start


def _choose(table: Floats, shares: Floats, start: list[int], frames_of: NDArray[np.int_], max_graphs: int) -> list[int]:
    """Choose the columns of the (kinds, counts) table with the least mean cost, price of further graphs included.

    start: the fewest columns that serve all kinds.
    """
    counts = np.unique(frames_of)
    room = max(64, SUBSET_TABLE_LIMIT // len(table) // len(counts))
    pool = np.array(start, dtype=np.intp)
    for frames in counts:
        rows = frames_of == frames
        pool = np.union1d(pool, np.argsort(shares[rows] @ table[rows], kind="stable")[:room])
    small = table[:, pool]
    subset = np.searchsorted(pool, start).tolist()
    if len(start) > 1:
        subset = _best_subset(small, shares, subset, len(start))
    least = _cost(small, shares, subset)
    best = subset
    for graphs in range(len(start) + 1, min(max_graphs, len(pool)) + 1):
        # The price of the graphs alone exceeds the best cost: no subset of this size or above can win.
        if PRICE_OF_A_GRAPH * (graphs - 1) >= least:
            break
        subset = _best_subset(small, shares, subset, graphs)
        if (cost := _cost(small, shares, subset)) < least:
            least, best = cost, subset
    return sorted(pool[best].tolist())


def _cost(table: Floats, shares: Floats, columns: list[int]) -> float:
    """Compute the mean cost of a choice of columns, price of further graphs included."""
    return float(shares @ table[:, columns].min(axis=1)) + PRICE_OF_A_GRAPH * (len(columns) - 1)


def _best_subset(table: Floats, shares: Floats, start: list[int], size: int) -> list[int]:
    """Choose the `size` columns whose row minimum has the least mean.

    Exact if there are few subsets. Otherwise a local search: it begins with `start` (and the best addition if that is
    one short) and swaps single columns while the cost falls.
    """
    pictures, counts = table.shape
    if comb(counts, size - 1) <= 3000 and comb(counts, size) * pictures <= EXHAUSTIVE_LIMIT:
        return _try_all(table, shares, np.full(pictures, np.inf), 0, size)[1]
    subset = start if len(start) == size else [*start, _best_addition(table, shares, start)[1]]
    cost = float(shares @ table[:, subset].min(axis=1))
    improved = True
    while improved:
        improved = False
        for position in range(size):
            remaining = subset[:position] + subset[position + 1 :]
            other_cost, column = _best_addition(table, shares, remaining)
            # The margin keeps rounding from swapping equal columns forever.
            if other_cost < cost - 1e-9:
                subset = [*remaining, column]
                cost = other_cost
                improved = True
    return subset


def _best_addition(table: Floats, shares: Floats, columns: list[int]) -> tuple[float, int]:
    """Find the column that lowers the mean cost of `columns` most; returns the cost and the column."""
    costs = shares @ np.minimum(table, table[:, columns].min(axis=1, keepdims=True))
    return float(costs.min()), int(costs.argmin())


def _try_all(
    table: Floats, shares: Floats, row_minima: NDArray[np.float64], first: int, size: int
) -> tuple[float, list[int]]:
    """Find the best `size` columns from `first` on by trying all; returns the cost and the columns.

    row_minima: (rows,), row minimum of the columns chosen already.
    """
    if size == 1:
        costs = shares @ np.minimum(table[:, first:], row_minima[:, None])
        return float(costs.min()), [first + int(costs.argmin())]
    best: tuple[float, list[int]] = (float("inf"), [])
    for column in range(first, table.shape[1] - size + 1):
        cost, rest = _try_all(table, shares, np.minimum(row_minima, table[:, column]), column + 1, size - 1)
        if cost < best[0]:
            best = (cost, [column, *rest])
    return best
