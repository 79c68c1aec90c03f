"""Crop and flip augmentation: the views of an image."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...common.fingerprint import fingerprint
from ...common.rng import generator
from ...common.text import quantity, shortlist
from ..buckets.grids import Placement, crop_box
from ..folders.items import Item
from ..folders.options import HORIZONTAL, FolderOptions

_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


@dataclass(frozen=True)
class View:
    """Crop window and flip of an image on its grid.

    zoom: ratio of the side of the largest window with the grid's aspect to the side of this window.
    position: of the window within the free space, (across, down): 0 is left or top, 1 is right or bottom.
    flip: mirrored left to right.
    """

    zoom: float = 1.0
    position: tuple[float, float] = (0.5, 0.5)
    flip: bool = False


PLAIN_VIEW = View()


def make_views(
    key: Any, size: tuple[int, int], placement: Placement, pixels_per_token: int, options: FolderOptions
) -> tuple[View, ...]:
    """Make the views of an image; the first one is not mirrored.

    key: content key, which seeds the windows, so that the same image is cropped alike in every run.
    size: (height, width) in pixels.
    placement: grid of the image.
    pixels_per_token: along a side.

    With crop_zoom 1 the windows are the largest of the grid's aspect. They are spread evenly over the side that is
    cropped, no two nearer than a token, and the middle one (of an even number the one before the middle) comes first.
    An image that loses nothing has one window.
    With crop_zoom above 1 the first window is the largest one in the middle. Each other one has a zoom sampled
    uniformly from 1 to crop_zoom, limited so that the image is not enlarged beyond its own pixels, and a uniformly
    sampled position.
    """
    windows = _windows(key, size, placement, pixels_per_token, options)
    if options.flip != HORIZONTAL:
        return windows
    return (*windows, *(replace(window, flip=True) for window in windows))


def _windows(
    key: Any, size: tuple[int, int], placement: Placement, pixels_per_token: int, options: FolderOptions
) -> tuple[View, ...]:
    """Make the views without flips."""
    max_zoom = min(options.crop_zoom, 1 / placement.scale)
    if options.crops > 1 and max_zoom > 1:
        name = fingerprint(key)
        draws = (
            torch.rand(3, dtype=torch.float64, generator=generator(0, "crop", name, index)).tolist()
            for index in range(1, options.crops)
        )
        return (PLAIN_VIEW, *(View(1 + (max_zoom - 1) * zoom, (x, y)) for zoom, x, y in draws))
    (left, top, right, bottom), _ = crop_box(size, placement.grid, pixels_per_token)
    room = max(size[1] - (right - left), size[0] - (bottom - top)) * placement.scale / pixels_per_token
    # The margin keeps rounding from losing a window if the room is a whole number of tokens.
    count = min(options.crops, 1 + int(room + 1e-9))
    if count == 1:
        return (PLAIN_VIEW,)
    # There is room along one side only; along the other the position has no effect.
    spread = [View(position=(index / (count - 1),) * 2) for index in range(count)]
    first = spread.pop((count - 1) // 2)
    return (first, *spread)


def view_notes(
    items: Sequence[Item], views: Sequence[Sequence[View]], remaining_views: Sequence[Sequence[View]]
) -> Iterator[str]:
    """Yield notes on effects of crops and flips that a user may not expect.

    views: requested views of each item.
    remaining_views: those of them that are not entirely masked out.
    """
    several = [len(item_views) for item_views in remaining_views if len(item_views) > 1]
    if several:
        yield (
            f"{quantity(len(several), 'picture or clip is', 'pictures or clips are')} encoded mirrored or in several "
            f"crops, {sum(several)} versions in total."
        )
    mirrored = [item for item in items if item.options.flip == HORIZONTAL]
    names = [item.name for item in mirrored if any(map(_SIDES.search, item.caption_variants.texts))]
    if names:
        yield (
            f"These captions say left or right, but their pictures are also shown mirrored: {shortlist(names)}; set "
            "flip to off for them, or remove the words."
        )
    multi_crop = [(item, item_views) for item, item_views in zip(items, views, strict=True) if item.options.crops > 1]
    whole = [item for item, item_views in multi_crop if len({view.position for view in item_views}) == 1]
    if unzoomed := [item.name for item in whole if item.options.crop_zoom == 1]:
        yield (
            f"These are hardly cropped, so several crops would be the same: {shortlist(unzoomed)}; set crop_zoom "
            "above 1 to show smaller parts of them."
        )
    if small := [
        item.name
        for item, item_views in multi_crop
        if item.options.crop_zoom > 1 and all(v.zoom == 1 for v in item_views)
    ]:
        yield (
            f"crop_zoom has no effect on {shortlist(small)}, which are too small to zoom into at this size; lower "
            "megapixels, or use larger files."
        )
    drop_counts = [
        (item.name, len(requested) - len(remaining))
        for item, requested, remaining in zip(items, views, remaining_views, strict=True)
    ]
    if masked := [f"{name} ({count})" for name, count in drop_counts if count]:
        yield f"Some crops or mirrored versions are left out, because the mask covers all of them: {shortlist(masked)}."
