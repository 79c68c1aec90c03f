"""Grids of tokens: those of one token count (a bucket), the crop loss of an image on each, and its crop box.

A picture is scaled (never stretched) until it covers its grid and cropped in the middle. With a the picture's
aspect (width / height) and b the grid's, the part that is kept is min(a / b, b / a); a ragged edge also leaves out
the last tokens of the last row, so that tokens / (height · width) of that is seen. In a clip the same tokens are left
out of every frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

WHOLE_GRIDS = "whole grids"
RAGGED_EDGE = "ragged edge"
FITS = (WHOLE_GRIDS, RAGGED_EDGE)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """A grid of tokens, in tokens. Rows run along the width; a clip's frames follow one another."""

    height: int
    width: int
    frames: int = 1

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width


@dataclass(frozen=True)
class Placement:
    """One picture's or clip's place in the plan.

    tokens: how many of the grid's tokens are kept, equally many of each frame, counted from the frame's start; a ragged
        edge keeps up to width - 1 fewer of each.
    crop: the part of the picture's area that is lost, 0 to 1, to the grid's aspect and to the ragged edge together.
    scale: target pixels per source pixel along a side; above 1 the picture is enlarged.
    """

    grid: Grid
    tokens: int
    crop: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        kept, rest = divmod(self.tokens, self.grid.frames)
        whole = self.grid.height * self.grid.width
        assert rest == 0 and whole - self.grid.width < kept <= whole, (self.grid, self.tokens)


@dataclass(frozen=True)
class Bucket:
    """Grids of one frame that hold one token count.

    They are sorted by aspect, without those that never lose less than another one.
    """

    tokens: int
    grids: tuple[Grid, ...]

    @cached_property
    def _log_aspect(self) -> Floats:
        return np.log([g.width / g.height for g in self.grids])

    @cached_property
    def _log_surplus(self) -> Floats:
        """Cost of the ragged edge for every image: log(grid tokens / kept tokens), 0 for whole grids."""
        return np.log([g.tokens / self.tokens for g in self.grids])

    @cached_property
    def _turns(self) -> Floats:
        """Log aspects at which the next grid becomes the better one.

        A grid's loss in logs is |picture - grid| + surplus: cones of one slope, of which none lies inside another, so
        the best cone changes only between neighbours, where their flanks meet.
        """
        rising = self._log_aspect - self._log_surplus
        falling = self._log_aspect + self._log_surplus
        return (rising[:-1] + falling[1:]) / 2

    def best(self, log_aspects: Floats) -> NDArray[np.intp]:
        """Find the index of the grid that loses least, for each image: (images,) → (images,)."""
        return np.searchsorted(self._turns, log_aspects)

    def crop(self, log_aspects: Floats) -> Floats:
        """Compute the part of each image's area that its best grid loses: (images,), 0 to 1."""
        index = self.best(log_aspects)
        return -np.expm1(-np.abs(log_aspects - self._log_aspect[index]) - self._log_surplus[index])


def find_bucket(tokens: int, fit: str, max_aspect: float) -> Bucket | None:
    """Find all grids of a token count between 1 : max_aspect and max_aspect : 1, or None where there is none.

    Whole grids are the factor pairs. A ragged edge takes, for each width, the fewest rows that hold the tokens.
    """
    widest = int(np.sqrt(tokens * max_aspect)) + 1
    width = np.arange(1, min(widest, tokens) + 1)
    if fit == WHOLE_GRIDS:
        width = width[tokens % width == 0]
    height = -(-tokens // width)
    within = np.maximum(width / height, height / width) <= max_aspect * (1 + 1e-9)
    width, height = width[within], height[within]
    aspect, surplus = np.log(width / height), np.log(width * height / tokens)
    # A grid that never loses less than another one goes, even where it never loses more: fewer rows are then ragged.
    beaten = np.abs(aspect[:, None] - aspect) + surplus <= surplus[:, None] + 1e-12
    np.fill_diagonal(beaten, False)
    keep = ~beaten.any(axis=1)
    grids = tuple(Grid(int(h), int(w)) for h, w in zip(height[keep], width[keep], strict=True))
    return Bucket(tokens, grids) if grids else None


def place(size: tuple[int, int], grid: Grid, tokens: int, pixels_per_token: int) -> Placement:
    """Place an image or video of `size` (height, width) in pixels on a grid of which `tokens` are kept."""
    height, width = size
    picture, target = width / height, grid.width / grid.height
    kept = min(picture / target, target / picture) * tokens / grid.tokens
    scale = max(grid.height / height, grid.width / width) * pixels_per_token
    return Placement(grid, tokens, 1 - kept, scale)


def crop_box(
    size: tuple[int, int],
    grid: Grid,
    pixels_per_token: int,
    zoom: float = 1.0,
    at: tuple[float, float] = (0.5, 0.5),
) -> tuple[tuple[float, float, float, float], tuple[int, int]]:
    """Place the crop of an image on its grid.

    size: (height, width) of the picture in pixels.
    zoom: how much narrower the box is along a side than the largest with the grid's aspect, 1 or more.
    at: where it stands in the room that it has, (across, down): 0 at the left and the top, 1 at the right and bottom.
    Returns the box (left, top, right, bottom) in source pixels, as Pillow's `resize(box=…)` takes it: by default the
    largest rectangle in the middle of the picture with the grid's exact aspect. It is fractional, since rounding it to
    whole pixels would stretch the picture a little. And the (height, width) in pixels of the grid.
    """
    height, width = size
    target_height, target_width = grid.height * pixels_per_token, grid.width * pixels_per_token
    scale = max(target_height / height, target_width / width)
    box_height, box_width = min(height, target_height / scale) / zoom, min(width, target_width / scale) / zoom
    left, top = (width - box_width) * at[0], (height - box_height) * at[1]
    return (left, top, left + box_width, top + box_height), (target_height, target_width)


def find_buckets(counts: Sequence[int], fit: str, max_aspect: float) -> list[Bucket]:
    """Find the buckets of those counts that have any grid."""
    found = (find_bucket(n, fit, max_aspect) for n in counts)
    return [bucket for bucket in found if bucket is not None]
