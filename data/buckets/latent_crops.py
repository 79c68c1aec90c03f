"""Crops of encoded latents to few token counts: a latent can be cropped, but no longer resized."""

from collections.abc import Sequence
from math import lcm

import numpy as np

from .grids import Grid, Placement

# Latents of different frame counts share a token count only if none of them loses more than this fraction to it:
# a video cropped to the token count of one image would show next to nothing in each frame.
MOST_LOST_TO_OTHER_LENGTHS = 0.5


def place_latents(grids: Sequence[Grid], max_graphs: int) -> list[Placement]:
    """Place latents of the given grids so that at most `max_graphs` token counts remain.

    If there are no more than that already, each latent keeps all its tokens. Otherwise the counts minimise the mean
    fraction of tokens lost. Each latent is center-cropped (never enlarged) to the grid of its placement, with
    less than a row of surplus tokens at the end of each frame. All frames of a video remain, so its count is a multiple
    of its frames. If the frame counts need more token counts than `max_graphs`, the minimum number is used.
    Raises ValueError if max_graphs is below 1.
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
    """Crop a grid to a smaller one that holds the tokens, equally many in each frame, with less than a row to spare.

    Chooses the least sum of log aspect change and log surplus, the cost of the bucket planner; on a tie the one with
    fewer tokens to spare.
    """
    frame_tokens, rest = divmod(tokens, grid.frames)
    assert rest == 0 and 0 < frame_tokens <= grid.height * grid.width, (grid, tokens)
    candidates = []
    for width in range(1, grid.width + 1):
        height = -(-frame_tokens // width)
        if height <= grid.height:
            reshaped = abs(np.log(width * grid.height / (height * grid.width)))
            spare = height * width - frame_tokens
            # Rounded, so that costs which differ only by rounding tie and the fewest spare tokens decide.
            candidates.append(
                (round(reshaped + np.log1p(spare / frame_tokens), 9), spare, Grid(height, width, grid.frames))
            )
    return min(candidates, key=lambda entry: entry[:2])[2]


def _targets(grids: Sequence[Grid], counts: Sequence[int], max_graphs: int) -> dict[int, int]:
    """Choose the target of each count: a run of neighbouring counts is cropped to the largest count that all can hold.

    Exact dynamic programming over the runs. One more run never loses more, so there are `max_graphs` runs, or the
    fewest that work if that is more (one run for each count always works).
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
    """Compute for each run of counts [first, end) the largest common target count and the loss.

    Returns two arrays (counts, counts + 1), indexed by first and end; the loss is infinite if a run can't be cropped
    to one count.
    """
    groups: dict[int, list[Grid]] = {count: [] for count in counts}
    for grid in grids:
        groups[grid.tokens].append(grid)
    tokens = np.zeros((len(counts), len(counts) + 1), dtype=np.int64)
    loss = np.full(tokens.shape, np.inf)
    for first, smallest in enumerate(counts):
        frames = set[int]()
        latents = 0
        inverse_tokens = 0.0
        for end in range(first + 1, len(counts) + 1):
            group = groups[counts[end - 1]]
            frames |= {grid.frames for grid in group}
            latents += len(group)
            inverse_tokens += len(group) / counts[end - 1]
            common = smallest // lcm(*frames) * lcm(*frames)
            mixed = len(frames) > 1 and common < counts[end - 1] * (1 - MOST_LOST_TO_OTHER_LENGTHS)
            if common and not mixed:
                tokens[first, end], loss[first, end] = common, latents - common * inverse_tokens
    return tokens, loss
