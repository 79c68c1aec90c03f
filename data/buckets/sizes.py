"""Training sizes: which of several sizes each image or video is trained at, and the buckets of each size."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...common.text import quoted
from .equal_area import MEGAPIXEL
from .planner import LEAST, MOST_MEGAPIXELS, BucketPlan, plan_buckets, wanted_tokens

MOST_SIZES = 8


@dataclass(frozen=True)
class SizePlan:
    """Buckets of one training size.

    megapixels: the requested size.
    members: indices of the images and videos that are trained at it.
    sizes: (height, width) of each of them in pixels.
    plan: their buckets.
    """

    megapixels: float
    members: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    plan: BucketPlan


def parse_sizes(text: str) -> tuple[float, ...]:
    """Parse a list of megapixels such as "0.25, 0.5", each once and in its order; nothing for an empty text.

    Raises ValueError for anything but numbers above 0 and up to MOST_MEGAPIXELS, and for more than MOST_SIZES.
    """
    sizes = [_size(entry, text) for entry in re.split(r"[,;\s]+", text.strip().strip("[]")) if entry]
    if len(sizes) > MOST_SIZES:
        raise ValueError(f"more_megapixels has {len(sizes)} sizes; give at most {MOST_SIZES}.")
    return tuple(dict.fromkeys(sizes))


def _size(entry: str, text: str) -> float:
    try:
        size = float(entry)
    except ValueError:
        size = 0.0
    if not 0 < size <= MOST_MEGAPIXELS:
        raise ValueError(
            f"more_megapixels is {quoted(text)}; write sizes above 0 and up to {MOST_MEGAPIXELS} with commas between "
            "them, such as 0.25, 0.5."
        )
    return size


def choose_sizes(size: tuple[int, int], megapixels: Sequence[float]) -> list[float]:
    """Return those of the sizes that an image of (height, width) pixels is trained at, in their order.

    An image that is smaller than a size is trained at the nearest size below its own instead, and at the smallest one
    if there is none below. As bucket plans may be that much smaller than asked for, 7/8 of a size are enough for it.
    """
    area = size[0] * size[1] / MEGAPIXEL
    return [number for number in megapixels if number * LEAST <= area] or [min(megapixels)]


def plan_sizes(
    sizes: Sequence[tuple[int, int]],
    megapixels: Sequence[float],
    *,
    pixels_per_token: int,
    max_graphs: int,
    fit: str,
    weights: Sequence[float],
    frames: Sequence[int],
) -> tuple[SizePlan, ...]:
    """Plan the buckets of each size for the images and videos that are trained at it, see `plan_buckets`.

    Each size has token counts of its own. An image or video that would get the grid of an earlier size again is left
    out of the later one. A size that nothing is trained at has no plan.

    megapixels: the sizes; those of as many tokens count once. With a single size everything is trained at it.
    """
    by_tokens: dict[int, float] = {}
    for number in megapixels:
        by_tokens.setdefault(wanted_tokens(number, pixels_per_token), number)
    distinct = list(by_tokens.values())
    sizes_by_item = [choose_sizes(size, distinct) if len(distinct) > 1 else distinct for size in sizes]
    planned: set[tuple[int, object, int]] = set()
    plans: list[SizePlan] = []
    for number in distinct:
        members = tuple(index for index, item_sizes in enumerate(sizes_by_item) if number in item_sizes)
        if not members:
            continue
        plan = plan_buckets(
            [sizes[index] for index in members],
            megapixels=number,
            pixels_per_token=pixels_per_token,
            max_graphs=max_graphs,
            fit=fit,
            weights=[weights[index] for index in members],
            frames=[frames[index] for index in members],
        )
        keys = [(index, p.grid, p.tokens) for index, p in zip(members, plan.placements, strict=True)]
        new = [number for number, key in enumerate(keys) if key not in planned]
        planned |= set(keys)
        if len(new) < len(members):
            members = tuple(members[number] for number in new)
            plan = _narrowed(plan, new, [weights[index] for index in members])
        if members:
            plans.append(SizePlan(number, members, tuple(sizes[index] for index in members), plan))
    return tuple(plans)


def _narrowed(plan: BucketPlan, numbers: Sequence[int], weights: Sequence[float]) -> BucketPlan:
    """Return the plan with these of its placements only."""
    placements = tuple(plan.placements[number] for number in numbers)
    if not placements:
        return plan
    crops = [placement.crop for placement in placements]
    return replace(
        plan,
        token_counts=tuple(sorted({placement.tokens for placement in placements})),
        placements=placements,
        mean_crop=float(np.average(crops, weights=weights)),
        worst_crop=max(crops),
        upscaled=sum(placement.scale > 1 for placement in placements),
    )
