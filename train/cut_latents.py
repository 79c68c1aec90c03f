"""Latents that are encoded already: cut to few token counts, since they can no longer be resized."""

from collections.abc import Sequence

import numpy as np

from .grids import Grid, Placement


def place_latents(grids: Sequence[Grid], max_graphs: int) -> list[Placement]:
    """Place each latent, which has the given grid, so that at most `max_graphs` token counts remain.

    Where there are no more than that already, every latent keeps all its tokens. Else the counts are those that lose
    the least part of the latents' tokens in the mean, and each latent is cut (never enlarged) to the sub-grid that its
    placement names, to be taken from the middle of the picture, with less than a row of surplus tokens at its end.
    All frames of a clip stay.
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
        cut = cut_grid(grid, tokens)
        assert cut is not None, (grid, tokens)
        placements[grid] = Placement(cut, tokens, 1 - tokens / grid.tokens)
    return [placements[grid] for grid in grids]


def cut_grid(grid: Grid, tokens: int) -> Grid | None:
    """The part of a grid that holds the tokens with less than a row to spare, over all its frames.

    Of several, the one that is nearest in aspect and has few tokens to spare, both in logs, as the planner weighs
    them; of equals the one with the fewest to spare. None where there is none, which happens to clips only: a picture
    always has one.
    """
    found = []
    for width in range(1, grid.width + 1):
        rows = -(-tokens // width)
        height = rows // grid.frames
        if height * grid.frames == rows and height <= grid.height:
            reshaped = abs(np.log(width * grid.height / (height * grid.width)))
            spare = rows * width - tokens
            found.append((round(reshaped + np.log1p(spare / tokens), 9), spare, Grid(height, width, grid.frames)))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def _targets(grids: Sequence[Grid], counts: Sequence[int], max_graphs: int) -> dict[int, int]:
    """What each count is cut to: runs of neighbouring counts, each run cut to what all of it can take.

    Exact by dynamic programming over the runs. One more run never loses more, so there are `max_graphs` runs.
    """
    tokens, loss = _runs(grids, counts)
    best = np.append(0.0, np.full(len(counts), np.inf))
    starts = []
    for _ in range(max_graphs):
        total = best[:-1, None] + loss
        starts.append(total.argmin(axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[-1]):
        raise ValueError(
            f"max_graphs is {max_graphs}, but clips of these lengths cannot be cut to so few token counts; "
            f"set it to {len(counts)}, or encode the clips with the same number of frames."
        )
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
        common, clips, latents, kept = smallest, set[Grid](), 0, 0.0
        for end in range(first + 1, len(counts) + 1):
            group = groups[counts[end - 1]]
            clips |= {grid for grid in group if grid.frames > 1}
            while common and any(cut_grid(clip, common) is None for clip in clips):
                common -= 1
            if not common:
                break
            latents += len(group)
            kept += len(group) / counts[end - 1]
            tokens[first, end], loss[first, end] = common, latents - common * kept
    return tokens, loss
