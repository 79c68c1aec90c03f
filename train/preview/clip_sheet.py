"""What a sheet shows of clips: their middle frame, some of their frames under each other, or all of them in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from PIL import Image

from .contact_sheet import MOST_PIXELS, Cell, middle, spread, stacked, to_picture

if TYPE_CHECKING:
    from torch import Tensor

_PICTURE, _MOVING = 1024, 512  # pixels a side of a picture, and of one on a sheet that moves
_MOST_MOVING = 2048  # of such a sheet, as all its frames are in memory at once


def shown(clips: Mapping[Cell, Tensor], frames: int) -> Iterator[tuple[dict[Cell, Image.Image], int]]:
    """(what stands in each cell, its most pixels a side), for each sheet. clips: (frames, H, W, 3), a picture has one.

    frames: 1 is the middle one; more stand under each other, evenly from the first to the last; 0 is a sheet for each
    moment, where shorter clips stay at their end.
    """
    if frames == 1:
        yield {at: to_picture(middle(clip)) for at, clip in clips.items()}, _PICTURE
    elif frames > 1:
        yield {at: _in_a_column(clip, frames) for at, clip in clips.items()}, MOST_PIXELS
    else:
        across = max(max(row, column) for row, column in clips) + 1
        for moment in range(max(map(len, clips.values()))):
            cells = {at: to_picture(clip[min(moment, len(clip) - 1)]) for at, clip in clips.items()}
            yield cells, min(_MOVING, _MOST_MOVING // across)


def _in_a_column(clip: Tensor, frames: int) -> Image.Image:
    pictures = [to_picture(clip[number]) for number in spread(range(len(clip)), frames)]
    for picture in pictures:
        picture.thumbnail((_PICTURE, _PICTURE), Image.Resampling.LANCZOS)
    return stacked(pictures)
