"""Latents that are encoded already: cut to few token counts, since they can no longer be resized."""

from collections.abc import Sequence
from math import lcm

import numpy as np

from .grids import Grid, Placement

# Latents of different frame counts share a token count only where none of them loses more than this part to it:
# a clip cut to the tokens of a picture would be no clip of anything.
MOST_LOST_TO_OTHER_LENGTHS = 0.5


def place_latents(grids: Sequence[Grid], max_graphs: int) -> list[Placement]:
    """Place each latent, which has the given grid, so that at most `max_graphs` token counts remain.

    Where there are no more than that already, every latent keeps all its tokens. Else the counts are those that lose
    the least part of the latents' tokens in the mean, and each latent is cut (never enlarged) to the sub-grid that its
    placement names, to be taken from the middle of the picture, with less than a row of surplus tokens at the end of
    each frame. All frames of a clip stay, so a count is a multiple of its frames; where the frame counts at hand need
    more token counts than `max_graphs`, there are as few as they need.
    """
    if max_graphs < 1:
        raise ValueError(f"max_graphs is {max_graphs}; set it to 1 or more.")
    counts = sorted({grid.tokens for grid in grids})
    if len(counts) <= max_graphs:
        return [Placement(grid, grid.tokens, 0.0) for grid in grids]

    targets = _targets(grids, counts, max_graphs)
    placements = {}
    for grid in set(grids):
        tokens = targets[grid.tokens]
        placements[grid] = Placement(crop_grid(grid, tokens), tokens, 1 - tokens / grid.tokens)
    return [placements[grid] for grid in grids]


def crop_grid(grid: Grid, tokens: int) -> Grid:
    """Crop a grid to a part that holds the tokens, equally many in each frame, with less than a row of each to spare.

    Of several, the one that is nearest in aspect and has few tokens to spare, both in logs, as the planner weighs
    them; of equals the one with the fewest to spare.
    """
    kept, rest = divmod(tokens, grid.frames)
    assert rest == 0 and 0 < kept <= grid.height * grid.width, (grid, tokens)
    found = []
    for width in range(1, grid.width + 1):
        height = -(-kept // width)
        if height <= grid.height:
            reshaped = abs(np.log(width * grid.height / (height * grid.width)))
            spare = height * width - kept
            found.append((round(reshaped + np.log1p(spare / kept), 9), spare, Grid(height, width, grid.frames)))
    return min(found, key=lambda entry: entry[:2])[2]


def _targets(grids: Sequence[Grid], counts: Sequence[int], max_graphs: int) -> dict[int, int]:
    """Choose the count that each is cut to: runs of neighbouring counts, each run cut to what all of it can take.

    Exact by dynamic programming over the runs. One more run never loses more, so there are `max_graphs` runs, or as
    many more as it takes (a run for each count always works).
    """
    tokens, loss = _runs(grids, counts)
    best = np.append(0.0, np.full(len(counts), np.inf))
    starts: list[np.ndarray] = []
    while len(starts) < max_graphs or not np.isfinite(best[-1]):
        total = best[:-1, None] + loss
        starts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    targets: dict[int, int] = {}
    end = len(counts)
    for start in reversed(starts):
        first = int(start[end])
        targets |= {counts[index]: int(tokens[first, end]) for index in range(first, end)}
        end = first
    return targets


def _runs(grids: Sequence[Grid], counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each run of counts [first, end): the largest count to which all of its latents can be cut, and the loss."""
    groups: dict[int, list[Grid]] = {count: [] for count in counts}
    for grid in grids:
        groups[grid.tokens].append(grid)
    tokens = np.zeros((len(counts), len(counts) + 1), dtype=np.int64)
    loss = np.full(tokens.shape, np.inf)
    for first, smallest in enumerate(counts):
        frames, latents, kept = set[int](), 0, 0.0
        for end in range(first + 1, len(counts) + 1):
            group = groups[counts[end - 1]]
            frames |= {grid.frames for grid in group}
            latents += len(group)
            kept += len(group) / counts[end - 1]
            common = smallest // lcm(*frames) * lcm(*frames)
            mixed = len(frames) > 1 and common < counts[end - 1] * (1 - MOST_LOST_TO_OTHER_LENGTHS)
            if common and not mixed:
                tokens[first, end], loss[first, end] = common, latents - common * kept
    return tokens, loss
