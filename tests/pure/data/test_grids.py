"""The grids of one token count, against all grids tried one by one."""

import numpy as np
import pytest
from tessera.data.buckets.grids import FITS, RAGGED_EDGE, Grid, Placement, find_bucket


def all_grids(tokens: int, fit: str, max_aspect: float) -> list[tuple[int, int]]:
    """(height, width) of every grid that holds the tokens with less than a row to spare (none for whole grids)."""
    grids = []
    for width in range(1, tokens + 1):
        for height in (tokens // width, tokens // width + 1):
            spare = height * width - tokens
            holds = spare == 0 or (fit == RAGGED_EDGE and 0 < spare < width)
            if height and holds and 1 / max_aspect <= width / height <= max_aspect:
                grids.append((height, width))
    return grids


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("max_aspect", (2.0, 4.0))
def test_a_family_loses_as_little_as_the_best_of_all_grids_at_any_aspect(fit, max_aspect):
    log_aspects = np.linspace(-2, 2, 2001)
    aspects = np.exp(log_aspects)
    for tokens in (1, 2, 4, 7, 15, 16, 19, 22, 60, 97, 240, 241, 900, 3600, 4047):
        candidates = all_grids(tokens, fit, max_aspect)
        family = find_bucket(tokens, fit, max_aspect)
        if not candidates:
            assert family is None
            continue
        best = np.max(
            [np.minimum(aspects / (w / h), w / h / aspects) * tokens / (h * w) for h, w in candidates],
            axis=0,
        )
        assert {(g.height, g.width) for g in family.grids} <= set(candidates)
        assert np.allclose(1 - family.crop(log_aspects), best, rtol=0, atol=1e-12)


def test_whole_grids_are_all_the_factor_pairs():
    assert [(g.height, g.width) for g in find_bucket(24, "whole grids", 4.0).grids] == [(8, 3), (6, 4), (4, 6), (3, 8)]
    assert find_bucket(23, "whole grids", 4.0) is None


def test_grid_with_fewer_tokens_to_spare_stays_of_two_that_lose_alike():
    # For 15 tokens 3 x 7 sees of any wide picture what 3 x 5 sees, with six tokens missing.
    grids = find_bucket(15, RAGGED_EDGE, 4.0).grids
    assert Grid(3, 5) in grids and Grid(3, 7) not in grids


def test_a_placement_that_leaves_out_a_row_or_more_is_refused():
    Placement(Grid(4, 6), 19, 0.0)
    Placement(Grid(4, 6, frames=2), 38, 0.0)
    for tokens in (18, 25):
        with pytest.raises(AssertionError):
            Placement(Grid(4, 6), tokens, 0.0)
    for tokens in (36, 43):  # a whole row of each frame, and one token of the last frame only
        with pytest.raises(AssertionError):
            Placement(Grid(4, 6, frames=2), tokens, 0.0)
