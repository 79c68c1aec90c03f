"""Token grids: the grids of one token count (a bucket), the crop loss of an image on each, and its crop box.

An image is scaled uniformly until it covers its grid, then center-cropped. With a the aspect (width / height) of the
image and b that of the grid, the retained part is min(a / b, b / a). A ragged edge also drops the last tokens of the
last row, so that only tokens / (height · width) of it is seen. In a video the same tokens of each frame are dropped.
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
    """Grid of tokens in row-major order, frame after frame.

    height: rows of tokens.
    width: tokens in a row.
    frames: latent frames.
    """

    height: int
    width: int
    frames: int = 1

    @property
    def tokens(self) -> int:
        """Number of tokens in all frames."""
        return self.frames * self.height * self.width


@dataclass(frozen=True)
class Placement:
    """Grid and crop of one image or video in the plan.

    grid: its grid.
    tokens: tokens of the grid that are kept, equally many of each frame, counted from the frame's start; a ragged edge
        keeps up to width - 1 fewer of each frame.
    crop: fraction of the image's area lost to the grid's aspect and the ragged edge together, 0 to 1.
    scale: target pixels per source pixel along a side; above 1 the image is enlarged.
    """

    grid: Grid
    tokens: int
    crop: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        frame_tokens, rest = divmod(self.tokens, self.grid.frames)
        whole = self.grid.height * self.grid.width
        assert rest == 0 and whole - self.grid.width < frame_tokens <= whole, (self.grid, self.tokens)


@dataclass(frozen=True)
class Bucket:
    """Grids of one frame and one token count.

    tokens: token count.
    grids: sorted by aspect, without dominated ones (those that never lose less than another grid).
    """

    tokens: int
    grids: tuple[Grid, ...]

    @cached_property
    def _log_aspect(self) -> Floats:
        return np.log([g.width / g.height for g in self.grids])

    @cached_property
    def _log_surplus(self) -> Floats:
        """Crop cost of the ragged edge in logs, log(grid tokens / kept tokens): (grids,), 0 for whole grids."""
        return np.log([g.tokens / self.tokens for g in self.grids])

    @cached_property
    def _turns(self) -> Floats:
        """Log aspects at which the next grid becomes the better one: (grids - 1,).

        In logs a grid's loss is |image - grid| + surplus: cones of one slope, none of which is inside another. The
        best cone therefore changes only between neighbours, where their flanks meet.
        """
        rising = self._log_aspect - self._log_surplus
        falling = self._log_aspect + self._log_surplus
        return (rising[:-1] + falling[1:]) / 2

    def best(self, log_aspects: Floats) -> NDArray[np.intp]:
        """Find the index of the grid with the least loss for each image: (images,) → (images,)."""
        return np.searchsorted(self._turns, log_aspects)

    def crop(self, log_aspects: Floats) -> Floats:
        """Compute the fraction of each image's area lost on its best grid: (images,), 0 to 1."""
        index = self.best(log_aspects)
        return -np.expm1(-np.abs(log_aspects - self._log_aspect[index]) - self._log_surplus[index])


def find_bucket(tokens: int, fit: str, max_aspect: float) -> Bucket | None:
    """Find all grids of a token count between 1 : max_aspect and max_aspect : 1; None if there is none.

    Whole grids are the factor pairs. With a ragged edge there is one grid for each width, with the fewest rows that
    hold the tokens.
    """
    widest = int(np.sqrt(tokens * max_aspect)) + 1
    width = np.arange(1, min(widest, tokens) + 1)
    if fit == WHOLE_GRIDS:
        width = width[tokens % width == 0]
    height = -(-tokens // width)
    # The tolerances here and below allow for rounding, so that equal aspects and equal losses compare as equal.
    within = np.maximum(width / height, height / width) <= max_aspect * (1 + 1e-9)
    width, height = width[within], height[within]
    aspect, surplus = np.log(width / height), np.log(width * height / tokens)
    # Drop each grid that is never better than another one, ties included: fewer rows are then ragged.
    beaten = np.abs(aspect[:, None] - aspect) + surplus <= surplus[:, None] + 1e-12
    np.fill_diagonal(beaten, False)
    keep = ~beaten.any(axis=1)
    grids = tuple(Grid(int(h), int(w)) for h, w in zip(height[keep], width[keep], strict=True))
    return Bucket(tokens, grids) if grids else None


def place(size: tuple[int, int], grid: Grid, tokens: int, pixels_per_token: int) -> Placement:
    """Place an image or video of `size` (height, width) in pixels on a grid of which `tokens` are kept."""
    height, width = size
    picture, target = width / height, grid.width / grid.height
    retained = min(picture / target, target / picture) * tokens / grid.tokens
    scale = max(grid.height / height, grid.width / width) * pixels_per_token
    return Placement(grid, tokens, 1 - retained, scale)


def crop_box(
    size: tuple[int, int],
    grid: Grid,
    pixels_per_token: int,
    zoom: float = 1.0,
    position: tuple[float, float] = (0.5, 0.5),
) -> tuple[tuple[float, float, float, float], tuple[int, int]]:
    """Compute the crop of an image for its grid.

    size: (height, width) of the image in pixels.
    zoom: ratio, 1 or more, of the side of the largest box with the grid's aspect to the side of this box.
    position: of the box within the free space, (across, down): 0 is left or top, 1 is right or bottom.

    Returns the box and the grid's (height, width) in pixels. The box is (left, top, right, bottom) in source pixels, as
    Pillow's `resize(box=…)` takes it; by default the largest centered rectangle of the grid's exact aspect. It is
    fractional, because rounding it to whole pixels would stretch the image a little.
    """
    height, width = size
    target_height, target_width = grid.height * pixels_per_token, grid.width * pixels_per_token
    scale = max(target_height / height, target_width / width)
    box_height, box_width = min(height, target_height / scale) / zoom, min(width, target_width / scale) / zoom
    left, top = (width - box_width) * position[0], (height - box_height) * position[1]
    return (left, top, left + box_width, top + box_height), (target_height, target_width)


def find_buckets(counts: Sequence[int], fit: str, max_aspect: float) -> list[Bucket]:
    """Find the buckets of these token counts; counts without a grid are skipped."""
    buckets = (find_bucket(n, fit, max_aspect) for n in counts)
    return [bucket for bucket in buckets if bucket is not None]
