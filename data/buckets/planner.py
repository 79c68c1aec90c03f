"""Bucket planner: the token counts at which a data set is trained, and the grid of each image or video.

Every picture of a bucket becomes exactly N tokens, so that one compiled graph and one batch serve all aspect ratios.
The planner knows the pictures: it takes the N near the wanted size whose grids lose least of these pictures. A clip of
T latent frames takes T times the tokens of one frame, N = T · n, so clips of different length share an N where it is a
multiple of both lengths and both n are near the wanted size.

What it minimises, in parts of a picture's area: the mean crop, plus 0.005 for each further graph (a second N has to
save half a percentage point to be worth its compilation), plus 0.01 · |ln(n / wanted)| (among counts that crop alike
the nearest to the wanted size wins).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, comb

import numpy as np
from numpy.typing import NDArray

from .equal_area import MEGAPIXEL, equal_area_crop
from .grids import FITS, RAGGED_EDGE, WHOLE_GRIDS, Bucket, Floats, Grid, Placement, find_buckets, place

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
    """Result of the planner.

    token_counts: the N of each bucket that is used, sorted.
    placements: one for each size, in the order given.
    mean_crop, worst_crop: parts of a picture's area, 0 to 1; the mean counts repeats.
    wanted_tokens: what the megapixels asked for, in one frame.
    upscaled: how many pictures are smaller than their grid and get enlarged (their placement's `scale` is above 1).
    equal_area_crop, equal_area_counts: what the usual buckets of equal area in steps of 64 pixels would lose on the
        same pictures, and how many token counts, so graphs, they would take.
    least_graphs: the fewest token counts that the frame counts at hand can do with; 1 for pictures alone.
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
    """A token count, and for each frame count that can have it the grids of one frame."""

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
    """Choose the token counts for a data set and place each picture or clip on a grid.

    sizes: (height, width) in pixels, after EXIF orientation.
    megapixels: the wanted area of one frame; 1 is 1024 · 1024 pixels. A frame's counts lie between 7/8 and 17/16 of it.
    pixels_per_token: along a side (16 for FLUX: 8 by the VAE, 2 by the patches).
    max_graphs: at most that many token counts, or `least_graphs` if that is more. A ragged edge serves every aspect
        with one, and uses as few as the frame counts allow.
    weights: how often each picture is seen per epoch (its repeats); all alike without it.
    max_aspect: grids lie between 1 : max_aspect and max_aspect : 1; a picture beyond that is cropped to it.
    frames: the latent frames of each; 1 for all without it.
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
    frames = [1] * len(sizes) if frames is None else frames
    assert pixels_per_token >= 1 and max_aspect >= 1
    assert weights is None or (len(weights) == len(sizes) and min(weights) > 0)
    assert len(frames) == len(sizes) and min(frames) >= 1

    wanted = max(1, round(megapixels * MEGAPIXEL / pixels_per_token**2))
    keys = np.array([(count, np.log(width / height)) for count, (height, width) in zip(frames, sizes, strict=True)])
    kinds, kind_of = np.unique(keys, axis=0, return_inverse=True)
    kind_of = kind_of.reshape(-1)
    frames_of, log_aspects = kinds[:, 0].astype(int), kinds[:, 1]
    shares = np.bincount(kind_of, weights)
    shares = shares / shares.sum()

    counts = sorted(set(frames_of.tolist()))
    candidates = _candidates(wanted, fit, max_aspect, counts, len(kinds))
    cover = _least_cover(candidates, counts)
    table = _table(candidates, frames_of, log_aspects, wanted, unserved=2 / float(shares.min()))
    most = 1 if fit == RAGGED_EDGE else max_graphs
    chosen = _choose(table, shares, _start(table, shares, candidates, frames_of, cover), frames_of, most)

    column_of = np.asarray(chosen)[table[:, chosen].argmin(axis=1)]
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
        wanted_tokens=wanted,
        upscaled=sum(placement.scale > 1 for placement in placements),
        equal_area_crop=other_crop,
        equal_area_counts=other_counts,
        least_graphs=len(cover),
    )


def _candidates(wanted: int, fit: str, max_aspect: float, counts: Sequence[int], kinds: int) -> list[_Candidate]:
    """The token counts whose frames lie in the window around the wanted size, for clips of these frame counts.

    Where kinds of pictures and counts are many, those of most grids. Ragged counts of a large window, which all have
    about as many grids, are tried at even steps.
    """
    least, most = max(1, ceil(wanted * LEAST)), max(wanted, int(wanted * MOST))
    step = ceil((most - least) / RAGGED_LIMIT) if fit == RAGGED_EDGE and most > least and len(counts) == 1 else 1
    found = find_buckets(range(least, most + 1, step), fit, max_aspect)
    while not found:
        least -= 1
        found = find_buckets([least], fit, max_aspect)
    by_tokens: dict[int, dict[int, Bucket]] = {}
    for frames in counts:
        for bucket in found:
            by_tokens.setdefault(frames * bucket.tokens, {})[frames] = bucket
    candidates = [_Candidate(tokens, of) for tokens, of in by_tokens.items()]
    limit = max(64, TABLE_LIMIT // kinds)
    if len(candidates) > limit:
        kept: dict[int, _Candidate] = {}
        for frames in counts:
            serving = [
                (candidate, candidate.buckets[frames]) for candidate in candidates if frames in candidate.buckets
            ]
            serving.sort(key=lambda c: (-len(c[0].buckets), -len(c[1].grids), abs(c[1].tokens - wanted)))
            kept |= {candidate.tokens: candidate for candidate, _ in serving[: max(64, limit // len(counts))]}
        candidates = list(kept.values())
    return sorted(candidates, key=lambda c: c.tokens)


def _least_cover(candidates: Sequence[_Candidate], counts: Sequence[int]) -> list[frozenset[int]]:
    """The fewest groups of frame counts such that each group has a token count in common."""
    groups = {frozenset(candidate.buckets) for candidate in candidates}
    groups = {group for group in groups if not any(group < other for other in groups)}

    @cache
    def cover(left: frozenset[int]) -> tuple[frozenset[int], ...]:
        if not left:
            return ()
        first = min(left)
        ways = [(group & left, *cover(left - group)) for group in sorted(groups, key=sorted) if first in group]
        return min(ways, key=len)

    return list(cover(frozenset(counts)))


def _table(
    candidates: Sequence[_Candidate], frames_of: NDArray[np.int_], log_aspects: Floats, wanted: int, unserved: float
) -> Floats:
    """(kinds of pictures, counts): what each loses with each, with the price of the size; `unserved` where it can't."""
    table = np.full((len(log_aspects), len(candidates)), unserved)
    for frames in np.unique(frames_of).tolist():
        rows = np.flatnonzero(frames_of == frames)
        for column, candidate in enumerate(candidates):
            if frames in candidate.buckets:
                bucket = candidate.buckets[frames]
                table[rows, column] = bucket.crop(log_aspects[rows]) + _price_of_size(bucket, wanted)
    return table


def _price_of_size(bucket: Bucket, wanted: int) -> float:
    return PRICE_OF_ANOTHER_SIZE * abs(np.log(bucket.tokens / wanted))


def _start(
    table: Floats,
    shares: Floats,
    candidates: Sequence[_Candidate],
    frames_of: NDArray[np.int_],
    cover: Sequence[frozenset[int]],
) -> list[int]:
    """The best column for each group of frame counts by itself."""
    start = []
    for group in cover:
        rows = np.isin(frames_of, list(group))
        serving = [column for column, candidate in enumerate(candidates) if group <= candidate.buckets.keys()]
        start.append(serving[int((shares[rows] @ table[rows][:, serving]).argmin())])
    return start


def _choose(table: Floats, shares: Floats, start: list[int], frames_of: NDArray[np.int_], max_graphs: int) -> list[int]:
    """The columns of the (pictures, counts) table to use: the least mean cost, with the price of each further one.

    start: as few columns as can serve all.
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
        # No subset of this size or above can pay any more, not even one that loses nothing.
        if PRICE_OF_A_GRAPH * (graphs - 1) >= least:
            break
        subset = _best_subset(small, shares, subset, graphs)
        if (cost := _cost(small, shares, subset)) < least:
            least, best = cost, subset
    return sorted(pool[best].tolist())


def _cost(table: Floats, shares: Floats, columns: list[int]) -> float:
    return float(shares @ table[:, columns].min(axis=1)) + PRICE_OF_A_GRAPH * (len(columns) - 1)


def _best_subset(table: Floats, shares: Floats, start: list[int], size: int) -> list[int]:
    """The `size` columns whose minimum over each row has the least mean.

    Exact where there are few subsets; else `start` (with the best one added where it is one short), then single columns
    exchanged as long as that helps.
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
