"""Crop and flip augmentation: the views of an image."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...common.fingerprint import fingerprint
from ...common.rng import generator
from ...common.text import shortlist
from ..buckets.grids import Placement, crop_box
from ..folders.items import Item
from ..folders.options import HORIZONTAL, FolderOptions

_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


@dataclass(frozen=True)
class View:
    """One way to show an image on its grid.

    zoom: how much narrower its window is along a side than the largest that has the grid's aspect.
    at: where the window stands in the room that it has, (0, 0) at the left and the top, (1, 1) at the right and the
        bottom. flip: mirrored left to right.
    """

    zoom: float = 1.0
    at: tuple[float, float] = (0.5, 0.5)
    flip: bool = False


PLAIN_VIEW = View()


def make_views(
    key: Any, size: tuple[int, int], placement: Placement, pixels_per_token: int, options: FolderOptions
) -> tuple[View, ...]:
    """Make the views of an image of `size` (height, width) in pixels; the first is not mirrored.

    key: names its content, which seeds the windows, so that the same image is cropped alike in every run.

    With crop_zoom 1 the windows are the largest of the grid's aspect, spread evenly over what has to be cropped, no two
    nearer than a token, first the one in the middle (of an even number the one before it): a picture that loses nothing
    has one. Above it, the first is the largest in the middle; of each
    other the zoom is drawn evenly from 1 to crop_zoom, but for what would enlarge the picture beyond its own pixels,
    and its place evenly from the room that it has.
    """
    windows = _windows(key, size, placement, pixels_per_token, options)
    if options.flip != HORIZONTAL:
        return windows
    return (*windows, *(replace(window, flip=True) for window in windows))


def _windows(
    key: Any, size: tuple[int, int], placement: Placement, pixels_per_token: int, options: FolderOptions
) -> tuple[View, ...]:
    most = min(options.crop_zoom, 1 / placement.scale)
    if options.crops > 1 and most > 1:
        name = fingerprint(key)
        drawn = (
            torch.rand(3, dtype=torch.float64, generator=generator(0, "crop", name, index)).tolist()
            for index in range(1, options.crops)
        )
        return (PLAIN_VIEW, *(View(1 + (most - 1) * zoom, (x, y)) for zoom, x, y in drawn))
    (left, top, right, bottom), _ = crop_box(size, placement.grid, pixels_per_token)
    room = max(size[1] - (right - left), size[0] - (bottom - top)) * placement.scale / pixels_per_token
    count = min(options.crops, 1 + int(room + 1e-9))
    if count == 1:
        return (PLAIN_VIEW,)
    # Only along one side is there room; along the other the place is of no effect.
    spread = [View(at=(index / (count - 1),) * 2) for index in range(count)]
    first = spread.pop((count - 1) // 2)
    return (first, *spread)


def view_notes(items: Sequence[Item], views: Sequence[Sequence[View]], kept: Sequence[Sequence[View]]) -> Iterator[str]:
    """Note effects of the views that a user may not expect; kept: the views of which a mask leaves something."""
    several = [len(of) for of in kept if len(of) > 1]
    if several:
        yield (f"Encoded mirrored or in several crops: {len(several)} pictures or clips, {sum(several)} forms in all.")
    mirrored = [item for item in items if item.options.flip == HORIZONTAL]
    named = [item.name for item in mirrored if any(map(_SIDES.search, item.caption_variants.texts))]
    if named:
        yield (
            f"Captions that say left or right, of pictures that are shown mirrored too: {shortlist(named)}; set flip "
            f"to off for them, or take the words out."
        )
    wanted = [(item, of) for item, of in zip(items, views, strict=True) if item.options.crops > 1]
    whole = [item for item, of in wanted if len({view.at for view in of}) == 1]
    if unzoomed := [item.name for item in whole if item.options.crop_zoom == 1]:
        yield (
            f"Shown in one crop, as hardly anything of them is cropped: {shortlist(unzoomed)}; set crop_zoom above 1 "
            f"to show parts of them that are smaller."
        )
    if small := [item.name for item, of in wanted if item.options.crop_zoom > 1 and all(v.zoom == 1 for v in of)]:
        yield (
            f"crop_zoom has no effect on {shortlist(small)}, whose files have no pixels to spare at this size; lower "
            f"megapixels, or take larger files."
        )
    lost = [(item.name, len(of) - len(left)) for item, of, left in zip(items, views, kept, strict=True)]
    if masked := [f"{name} ({count})" for name, count in lost if count]:
        yield f"Crops and mirrored pictures left out, as their mask leaves nothing of them: {shortlist(masked)}."
    still = [item.name for item in items if item.options.crop_zoom > 1 and item.options.crops == 1]
    if still:
        yield f"crop_zoom has no effect with crops 1, for: {shortlist(still)}."
