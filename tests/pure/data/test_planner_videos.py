"""The tokens over clips: exactly constant tokens in every frame, and one choice for all frame counts."""

import random
from itertools import combinations
from math import ceil, floor, log

import pytest
from tessera.data.buckets.equal_area import equal_area_crop
from tessera.data.buckets.grids import FITS, RAGGED_EDGE, WHOLE_GRIDS, Grid
from tessera.data.buckets.latent_crops import place_latents
from tessera.data.buckets.planner import plan_buckets
from tessera.data.buckets.plot import HEIGHT, WIDTH, describe_plan, plot_plan

WAN = {"megapixels": 0.38, "pixels_per_token": 16}


def some_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(300, 1200), rng.randrange(300, 1200)) for _ in range(count)]


def lost_share(size: tuple[int, int], height: int, width: int, tokens: int) -> float:
    """The part of a frame that is lost on a (height, width) grid of which `tokens` are kept."""
    aspect, target = size[1] / size[0], width / height
    return 1 - min(aspect / target, target / aspect) * tokens / (height * width)


def least_loss(size: tuple[int, int], tokens: int, fit: str) -> float:
    grids = [(ceil(tokens / width), width) for width in range(1, tokens + 1)]
    grids = [(h, w) for h, w in grids if (fit == RAGGED_EDGE or h * w == tokens) and 1 / 4 <= w / h <= 4]
    return min((lost_share(size, h, w, tokens) for h, w in grids), default=float("inf"))


def objective(sizes, frames, counts, fit, wanted_tokens) -> float:
    """The tokens's cost of a set of token counts by the rule in its module's text; infinite where one can't serve."""
    total = 0.0
    for size, length in zip(sizes, frames, strict=True):
        per_frame = [n // length for n in counts if n % length == 0]
        per_frame = [n for n in per_frame if wanted_tokens * 7 / 8 <= n <= wanted_tokens * 17 / 16]
        costs = [least_loss(size, n, fit) + 0.01 * abs(log(n / wanted_tokens)) for n in per_frame]
        total += min(costs, default=float("inf"))
    return total / len(sizes) + 0.005 * (len(counts) - 1)


def objective_of(plan, sizes) -> float:
    costs = [
        lost_share(size, p.grid.height, p.grid.width, p.tokens // p.grid.frames)
        + 0.01 * abs(log(p.tokens / p.grid.frames / plan.wanted_tokens))
        for size, p in zip(sizes, plan.placements, strict=True)
    ]
    return sum(costs) / len(costs) + 0.005 * (len(plan.token_counts) - 1)


@pytest.mark.parametrize("fit", FITS)
def test_every_frame_of_a_clip_keeps_equally_many_tokens_near_the_wanted_size(fit):
    sizes = some_sizes(60, 1)
    frames = [(1, 6, 7, 13, 21)[index % 5] for index in range(60)]
    plan = plan_buckets(sizes, frames=frames, fit=fit, max_graphs=5, **WAN)
    assert [p.grid.frames for p in plan.placements] == frames
    for placement in plan.placements:
        kept_tokens, rest = divmod(placement.tokens, placement.grid.frames)
        cells = placement.grid.height * placement.grid.width
        assert rest == 0 and cells - placement.grid.width < kept_tokens <= cells
        assert fit == RAGGED_EDGE or kept_tokens == cells
        assert plan.wanted_tokens * 7 / 8 <= kept_tokens <= plan.wanted_tokens * 17 / 16


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize(
    ("frames", "least"),
    [((1,), 1), ((21,), 1), ((6, 7), 1), ((1, 7), 2), ((6, 7, 21), 2), ((1, 6, 7, 13, 21), 4), ((20, 21, 24), 1)],
)
def test_frame_counts_that_can_share_a_token_count_do(fit, frames, least):
    sizes = some_sizes(4 * len(frames), 2)
    plan = plan_buckets(sizes, frames=[*frames] * 4, fit=fit, **WAN)
    assert plan.least_graphs == len(plan.token_counts) == least


@pytest.mark.parametrize("fit", FITS)
def test_a_shared_count_is_the_best_of_all_in_the_window(fit):
    for seed, lengths in ((0, (6, 7)), (1, (7,)), (2, (8, 9))):
        sizes = some_sizes(6, seed)
        frames = [lengths[index % len(lengths)] for index in range(6)]
        plan = plan_buckets(sizes, frames=frames, megapixels=0.06, pixels_per_token=16, fit=fit)
        wanted_tokens = plan.wanted_tokens
        window = range(floor(wanted_tokens * 7 / 8) * min(lengths), ceil(wanted_tokens * 17 / 16) * max(lengths) + 1)
        best = min(objective(sizes, frames, [n], fit, wanted_tokens) for n in window)
        assert objective_of(plan, sizes) == pytest.approx(best, abs=1e-9)


def test_pictures_and_clips_together_get_the_best_pair_of_all():
    sizes = some_sizes(6, 5)
    frames = [1, 3, 1, 3, 3, 1]
    plan = plan_buckets(sizes, frames=frames, megapixels=0.06, pixels_per_token=16, max_graphs=1)
    wanted_tokens = plan.wanted_tokens
    per_frame = range(ceil(wanted_tokens * 7 / 8), floor(wanted_tokens * 17 / 16) + 1)
    pairs = [(n, 3 * m) for n in per_frame for m in per_frame]
    best = min(objective(sizes, frames, pair, WHOLE_GRIDS, wanted_tokens) for pair in pairs)
    assert len(plan.token_counts) == plan.least_graphs == 2
    assert objective_of(plan, sizes) == pytest.approx(best, abs=1e-9)


def test_a_graph_beyond_the_least_is_used_only_where_it_pays():
    sizes, frames = some_sizes(40, 3), [6, 7] * 20
    single, two = (plan_buckets(sizes, frames=frames, max_graphs=graphs, **WAN) for graphs in (1, 2))
    assert len(single.token_counts) == 1 and len(two.token_counts) == 2
    assert objective_of(two, sizes) < objective_of(single, sizes)
    assert two.mean_crop < single.mean_crop - 0.005


def test_searching_by_exchange_finds_a_plan_for_every_frame_count(monkeypatch):
    from tessera.data.buckets import planner

    sizes = some_sizes(60, 11)
    frames = [(1, 6, 7, 21)[index % 4] for index in range(60)]
    exact = plan_buckets(sizes, frames=frames, max_graphs=3, **WAN)
    monkeypatch.setattr(planner, "EXHAUSTIVE_LIMIT", 0)
    monkeypatch.setattr(planner, "SUBSET_TABLE_LIMIT", 1)
    searched = plan_buckets(sizes, frames=frames, max_graphs=3, **WAN)
    assert [p.grid.frames for p in searched.placements] == frames
    assert objective_of(searched, sizes) <= objective_of(exact, sizes) + 0.003
    monkeypatch.setattr(planner, "TABLE_LIMIT", 1)
    plan = plan_buckets(sizes, frames=frames, max_graphs=3, **WAN)
    assert [p.grid.frames for p in plan.placements] == frames and len(plan.token_counts) == 3


def test_frames_of_one_are_pictures_and_weights_count():
    sizes = some_sizes(20, 4)
    assert plan_buckets(sizes, frames=[1] * 20, **WAN) == plan_buckets(sizes, **WAN)
    sixes, sevens = (
        plan_buckets(sizes, frames=[6, 7] * 10, weights=[heavy, 1001 - heavy] * 10, **WAN) for heavy in (1000, 1)
    )
    for first, better, worse in ((0, sixes, sevens), (1, sevens, sixes)):
        crops = [sum(p.crop for p in plan.placements[first::2]) for plan in (better, worse)]
        assert crops[0] < crops[1]
    assert sixes.least_graphs == sevens.least_graphs == 1


def test_equal_area_buckets_of_clips_count_their_frames():
    sizes = [(512, 512)] * 3
    assert equal_area_crop(sizes, 0.25, 16) == (0.0, 1)
    assert equal_area_crop(sizes, 0.25, 16, frames=[1, 7, 7]) == (0.0, 2)


def test_the_plan_says_the_frames():
    sizes = [(480, 832)] * 3 + [(832, 480)] * 2 + [(1000, 1000)]
    plan = plan_buckets(sizes, frames=[21, 21, 1, 6, 7, 1], **WAN)
    lines = describe_plan(plan).splitlines()
    assert any("21 latent frames of" in line and line.endswith("2 clips on 1 grid.") for line in lines)
    assert any("as 6 latent frames of" in line and "or 7 latent frames of" in line for line in lines)
    assert any("as one frame (" in line for line in lines) is False  # pictures alone are said as before
    assert any(line.endswith(" tokens asked for): 2 pictures on 2 grids.") for line in lines)
    assert "a frame asked for" in describe_plan(plan)
    assert plot_plan(plan, sizes).size == (WIDTH, HEIGHT)
    still = plan_buckets(sizes, **WAN)
    assert plot_plan(plan, sizes).tobytes() != plot_plan(still, sizes).tobytes()
    mixed = describe_plan(plan_buckets([(64, 64)] * 2, frames=[1, 2], **WAN))
    assert "2 pictures or clips are smaller" in mixed


def test_latents_of_clips_keep_all_frames_and_equally_many_tokens_of_each():
    grids = [Grid(10, 10, 3), Grid(10, 9, 3), Grid(20, 20), Grid(10, 6, 5)]
    placements = place_latents(grids, 1)
    assert {p.tokens for p in placements} == {270}  # the most that is a multiple of 15
    for grid, placement in zip(grids, placements, strict=True):
        cut = placement.grid
        assert cut.frames == grid.frames
        assert cut.height <= grid.height and cut.width <= grid.width
        assert 0 <= cut.height * cut.width - placement.tokens // cut.frames < cut.width
        assert placement.crop == pytest.approx(1 - 270 / grid.tokens)


def test_a_clip_is_not_cut_to_the_tokens_of_a_picture_whatever_max_graphs_says():
    grids = [Grid(30, 52), Grid(52, 30), Grid(30, 52, 21), Grid(30, 50, 21)]
    placements = place_latents(grids, 1)
    assert [p.tokens for p in placements] == [1560, 1560, 31500, 31500]
    assert len({p.tokens for p in place_latents([Grid(1, 1, 7), Grid(1, 1, 5)], 1)}) == 2
    with pytest.raises(ValueError, match="max_graphs is 0"):
        place_latents(grids, 0)


def test_latents_of_clips_are_cut_with_the_least_loss():
    for seed in range(3):
        rng = random.Random(seed)
        grids = [Grid(rng.randrange(8, 16), rng.randrange(8, 16), 4) for _ in range(7)]
        counts = [grid.tokens for grid in grids]
        best = min(
            sum(1 - max(n for n in subset if n <= count) / count for count in counts)
            for subset in combinations(sorted(set(counts)), 2)
            if min(subset) <= min(counts)
        )
        assert sum(p.crop for p in place_latents(grids, 2)) == pytest.approx(best)
