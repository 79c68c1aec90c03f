"""The bucket tokens against its definition, written out and searched by brute force."""

import csv
import random
from itertools import combinations
from math import ceil, exp, floor, log
from pathlib import Path

import pytest
from tessera.data.buckets.equal_area import equal_area_crop
from tessera.data.buckets.grids import FITS, RAGGED_EDGE, Grid, crop_box
from tessera.data.buckets.latent_crops import place_latents
from tessera.data.buckets.planner import plan_buckets

TABLE = Path(__file__).resolve().parents[2] / "data" / "aspect_ratios.csv"
FLUX = {"megapixels": 1.0, "pixels_per_token": 16}


def table_of_sizes() -> tuple[list[tuple[int, int]], list[int]]:
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [(int(r["height"]), int(r["width"])) for r in rows], [int(r["count"]) for r in rows]


def some_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    return [(rng.randrange(400, 3000), rng.randrange(400, 3000)) for _ in range(count)]


def lost_share(size: tuple[int, int], grid: Grid, tokens: int) -> float:
    """The part of a picture that is lost: covered by the grid in proportion, cut to it, less the tokens left out."""
    height, width = size
    scale = max(grid.height / height, grid.width / width)
    visible_area = (grid.height / scale) * (grid.width / scale)
    return 1 - visible_area / (height * width) * tokens / (grid.height * grid.width)


def grids_of(tokens: int, fit: str, max_aspect: float = 4.0) -> list[Grid]:
    grids = []
    for width in range(1, tokens + 1):
        height = ceil(tokens / width)
        if (fit == RAGGED_EDGE or height * width == tokens) and 1 / max_aspect <= width / height <= max_aspect:
            grids.append(Grid(height, width))
    return grids


def mean_loss(sizes, weights, counts, fit, wanted_of) -> float:
    """The tokens's objective of a set of token counts, by the rule in the module's text."""
    total = 0.0
    for size, weight in zip(sizes, weights, strict=True):
        total += weight * min(
            lost_share(size, grid, n) + 0.01 * abs(log(n / wanted_of)) for n in counts for grid in grids_of(n, fit)
        )
    return total / sum(weights) + 0.005 * (len(counts) - 1)


def objective_of(plan, sizes, weights) -> float:
    crops = [
        weight * (lost_share(size, p.grid, p.tokens) + 0.01 * abs(log(p.tokens / plan.wanted_tokens)))
        for size, weight, p in zip(sizes, weights, plan.placements, strict=True)
    ]
    return sum(crops) / sum(weights) + 0.005 * (len(plan.token_counts) - 1)


def test_every_grid_of_a_family_has_exactly_its_token_count():
    sizes, counts = table_of_sizes()
    for graphs in (1, 2, 4):
        plan = plan_buckets(sizes, weights=counts, max_graphs=graphs, **FLUX)
        assert len(plan.token_counts) <= graphs
        assert len({p.grid for p in plan.placements}) > 8
        for placement in plan.placements:
            assert placement.grid.height * placement.grid.width == placement.tokens
            assert placement.tokens in plan.token_counts


def test_the_ragged_edge_leaves_out_less_than_a_row_and_serves_all_with_one_count():
    for seed in range(5):
        plan = plan_buckets(some_sizes(200, seed), fit=RAGGED_EDGE, max_graphs=3, **FLUX)
        assert len(plan.token_counts) == 1
        surplus = [p.grid.height * p.grid.width - p.tokens for p in plan.placements]
        assert all(0 <= s < p.grid.width for s, p in zip(surplus, plan.placements, strict=True))
        assert any(surplus)


def test_the_token_counts_stay_near_the_wanted_size():
    for fit in FITS:
        for megapixels in (0.06, 0.25, 1.0, 2.0):
            sizes = some_sizes(60, 3)
            plan = plan_buckets(sizes, megapixels=megapixels, pixels_per_token=16, max_graphs=3, fit=fit)
            wanted_tokens = megapixels * 1024 * 1024 / 256
            assert all(wanted_tokens * 7 / 8 <= n <= wanted_tokens * 17 / 16 for n in plan.token_counts)


@pytest.mark.parametrize("fit", FITS)
def test_one_count_is_the_best_of_all_in_the_window(fit):
    for seed, count in ((0, 1), (1, 2), (2, 7), (3, 12)):
        sizes = some_sizes(count, seed)
        weights = [random.Random(seed + i).choice((1, 1, 5, 20)) for i in range(count)]
        plan = plan_buckets(sizes, megapixels=0.1, pixels_per_token=16, fit=fit, weights=weights)
        wanted_tokens = plan.wanted_tokens
        assert wanted_tokens == round(0.1 * 1024 * 1024 / 256)
        window = [n for n in range(ceil(wanted_tokens * 7 / 8), floor(wanted_tokens * 17 / 16) + 1) if grids_of(n, fit)]
        best = min(mean_loss(sizes, weights, [n], fit, wanted_tokens) for n in window)
        assert objective_of(plan, sizes, weights) == pytest.approx(best, abs=1e-9)


def test_two_counts_are_the_best_pair_of_all_in_the_window():
    for seed in range(3):
        sizes = some_sizes(6, seed)
        plan = plan_buckets(sizes, megapixels=0.06, pixels_per_token=16, max_graphs=2)
        wanted_tokens = plan.wanted_tokens
        window = [
            n
            for n in range(ceil(wanted_tokens * 7 / 8), floor(wanted_tokens * 17 / 16) + 1)
            if grids_of(n, "whole grids")
        ]
        subsets = [[n] for n in window] + [list(pair) for pair in combinations(window, 2)]
        best = min(mean_loss(sizes, [1] * 6, counts, "whole grids", wanted_tokens) for counts in subsets)
        assert objective_of(plan, sizes, [1] * 6) == pytest.approx(best, abs=1e-9)


def test_exchanging_counts_comes_as_near_as_trying_all(monkeypatch):
    from tessera.data.buckets import planner

    sizes = some_sizes(30, 11)
    exact = plan_buckets(sizes, max_graphs=2, **FLUX)
    monkeypatch.setattr(planner, "EXHAUSTIVE_LIMIT", 0)
    searched = plan_buckets(sizes, max_graphs=2, **FLUX)
    assert len(searched.token_counts) == 2
    assert searched.mean_crop <= exact.mean_crop + 0.003


def test_a_second_count_is_used_only_where_it_saves_half_a_point():
    sizes, counts = table_of_sizes()
    plans = [plan_buckets(sizes, weights=counts, max_graphs=graphs, **FLUX) for graphs in (1, 2, 3, 8)]
    used = [len(plan.token_counts) for plan in plans]
    assert used[:3] == [1, 2, 3]
    assert plans[0].mean_crop - plans[1].mean_crop > 0.005
    assert plans[1].mean_crop - plans[2].mean_crop > 0.005
    assert used[3] < 8

    one_camera = [(4000, 6000)] * 9 + [(6000, 4000)]
    assert len(plan_buckets(one_camera, max_graphs=4, **FLUX).token_counts) == 1


def test_the_crop_is_what_the_box_leaves_out():
    sizes = [*some_sizes(40, 5), (100, 1000), (1000, 100), (1, 1), (333, 77)]
    for fit in FITS:
        plan = plan_buckets(sizes, fit=fit, max_graphs=2, **FLUX)
        for size, placement in zip(sizes, plan.placements, strict=True):
            (left, top, right, bottom), (target_height, target_width) = crop_box(size, placement.grid, 16)
            height, width = size
            assert 0 <= left <= right <= width and 0 <= top <= bottom <= height
            assert left == pytest.approx(width - right) and top == pytest.approx(height - bottom)
            assert (target_height, target_width) == (16 * placement.grid.height, 16 * placement.grid.width)
            assert (right - left) / (bottom - top) == pytest.approx(target_width / target_height, rel=1e-12)
            assert right - left == pytest.approx(width) or bottom - top == pytest.approx(height)
            box = (right - left) * (bottom - top) / (height * width)
            grid_tokens = placement.grid.height * placement.grid.width
            assert placement.crop == pytest.approx(1 - box * placement.tokens / grid_tokens, abs=1e-12)
            assert placement.scale == pytest.approx(target_width / (right - left))


@pytest.mark.parametrize("megapixels", (0.005, 0.02, 0.06, 1.0))
def test_each_picture_has_the_grid_that_loses_least(megapixels):
    sizes = some_sizes(150, 8)
    for fit in FITS:
        plan = plan_buckets(sizes, megapixels=megapixels, pixels_per_token=16, fit=fit)
        (tokens,) = plan.token_counts
        grids = grids_of(tokens, fit)
        for size, placement in zip(sizes, plan.placements, strict=True):
            assert placement.crop == pytest.approx(min(lost_share(size, grid, tokens) for grid in grids), abs=1e-12)


def test_mean_and_worst_crop_are_those_of_the_placements():
    sizes, counts = table_of_sizes()
    plan = plan_buckets(sizes, weights=counts, **FLUX)
    crops = [p.crop for p in plan.placements]
    assert plan.worst_crop == max(crops)
    assert plan.mean_crop == pytest.approx(sum(c * n for c, n in zip(crops, counts, strict=True)) / 10_000)
    assert plan.mean_crop != pytest.approx(sum(crops) / len(crops), abs=1e-4)


def test_repeats_weigh_like_copies():
    sizes = some_sizes(8, 21)
    weights = [1, 30, 1, 2, 1, 1, 9, 1]
    weighted = plan_buckets(sizes, weights=weights, max_graphs=2, **FLUX)
    copied = plan_buckets([s for s, w in zip(sizes, weights, strict=True) for _ in range(w)], max_graphs=2, **FLUX)
    assert weighted.token_counts == copied.token_counts
    assert weighted.mean_crop == pytest.approx(copied.mean_crop)
    alone = plan_buckets(sizes, weights=[1000 if i == 1 else 1 for i in range(8)], **FLUX)
    assert alone.placements[1].crop <= plan_buckets(sizes, **FLUX).placements[1].crop
    assert alone.placements[1].crop < 0.005


def test_the_plan_depends_on_nothing_but_the_pictures():
    sizes = some_sizes(300, 2)
    order = list(range(300))
    random.Random(1).shuffle(order)
    for fit in FITS:
        plan = plan_buckets(sizes, fit=fit, max_graphs=3, **FLUX)
        assert plan == plan_buckets(sizes, fit=fit, max_graphs=3, **FLUX)
        shuffled = plan_buckets([sizes[i] for i in order], fit=fit, max_graphs=3, **FLUX)
        assert shuffled.placements == tuple(plan.placements[i] for i in order)


def test_on_ten_thousand_pictures_it_beats_buckets_of_equal_area():
    sizes, counts = table_of_sizes()
    assert sum(counts) == 10_000
    grid_crop, grid_counts = equal_area_crop(sizes, 1.0, 16, weights=counts)
    single, two, three = (plan_buckets(sizes, weights=counts, max_graphs=n, **FLUX) for n in (1, 2, 3))
    ragged = plan_buckets(sizes, weights=counts, fit=RAGGED_EDGE, **FLUX)
    assert grid_counts >= 10
    assert (single.equal_area_crop, single.equal_area_counts) == (grid_crop, grid_counts)
    assert ragged.mean_crop < grid_crop / 2
    assert two.mean_crop < grid_crop
    assert three.mean_crop < grid_crop / 2
    assert single.mean_crop < 0.051


def test_the_plan_beats_the_figures_for_buckets_that_do_not_know_the_pictures():
    rng = random.Random(0)
    common = [1, 1.25, 4 / 3, 1.5, 1.6, 16 / 9, 2.0, 0.8, 0.75, 2 / 3, 0.625, 9 / 16, 0.5, 1.85, 2.35]
    shares = [12, 4, 14, 22, 2, 12, 2, 8, 8, 14, 1, 9, 1, 1, 1]
    aspects = [rng.choices(common, shares)[0] * exp(rng.gauss(0, 0.05)) for _ in range(800)]
    sizes = [(1_000_000, round(1_000_000 * aspect)) for aspect in aspects]
    mean = [plan_buckets(sizes, max_graphs=n, **FLUX).mean_crop for n in (1, 2, 3)]
    assert mean[0] < 0.050 and mean[1] < 0.027 and mean[2] < 0.019
    assert plan_buckets(sizes, fit=RAGGED_EDGE, **FLUX).mean_crop < 0.0145


@pytest.mark.parametrize("fit", FITS)
def test_large_pictures_get_a_plan_as_well(fit):
    plan = plan_buckets(some_sizes(20, 9), megapixels=16, pixels_per_token=16, fit=fit, max_aspect=8)
    assert plan.mean_crop < 0.03


def test_buckets_of_equal_area_are_all_those_that_fit_in_steps_of_64_pixels():
    sizes = some_sizes(50, 13)
    sides = range(256, 2049, 64)
    buckets = {(1024 * 1024 // width // 64 * 64, width) for width in sides}
    buckets |= {(width, height) for height, width in buckets}
    assert (1024, 1024) in buckets and (832, 1216) in buckets
    nearest = [min(buckets, key=lambda b, s=size: lost_share(s, Grid(*b), b[0] * b[1])) for size in sizes]
    crop = sum(lost_share(s, Grid(*b), b[0] * b[1]) for s, b in zip(sizes, nearest, strict=True)) / len(sizes)
    assert equal_area_crop(sizes, 1.0, 16) == (pytest.approx(crop), len({h * w for h, w in nearest}))


@pytest.mark.parametrize("fit", FITS)
def test_odd_data_sets_get_a_plan(fit):
    for size in ((512, 512), (100, 1000), (1000, 100), (1, 1), (1, 5000), (16, 16)):
        for megapixels in (0.001, 0.06, 1.0):
            plan = plan_buckets([size], megapixels=megapixels, pixels_per_token=16, max_graphs=3, fit=fit)
            assert len(plan.token_counts) == 1 and 0 <= plan.worst_crop < 1
    for tokens in range(1, 40):
        plan_buckets([(3, 4)], megapixels=tokens * 256 / 1024**2, pixels_per_token=16, fit=fit)


def test_a_picture_beyond_the_widest_grid_is_cropped_to_it():
    plan = plan_buckets([(100, 1000)], **FLUX)
    assert (plan.placements[0].grid.height, plan.placements[0].grid.width) == (32, 128)
    assert plan.worst_crop == pytest.approx(0.6)
    assert plan_buckets([(100, 1000), (1024, 1024)], **FLUX).worst_crop == pytest.approx(0.6)
    assert plan_buckets([(100, 1000)], max_aspect=10, **FLUX).worst_crop < 0.02


def test_pictures_smaller_than_their_grid_are_counted():
    plan = plan_buckets([(512, 512), (1024, 1024), (2048, 2048), (1023, 1023)], **FLUX)
    assert plan.token_counts == (4096,)
    assert [p.scale for p in plan.placements] == pytest.approx([2.0, 1.0, 0.5, 1024 / 1023])
    assert plan.upscaled == 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"megapixels": 0}, "megapixels is 0; set it above 0"),
        ({"megapixels": -1.0}, "megapixels is -1.0; set it above 0"),
        ({"megapixels": 65}, "megapixels is 65; set it above 0 and to at most 64"),
        ({"megapixels": float("nan")}, "megapixels is nan"),
        ({"max_graphs": 0}, "max_graphs is 0; set it to 1 or more"),
        ({"fit": "padded"}, "fit is 'padded'; choose one of whole grids, ragged edge"),
        ({"sizes": []}, "at least one picture"),
        ({"sizes": [(10, 0)]}, "0 x 10 pixels"),
    ],
)
def test_bad_input_ends_in_one_sentence(change, sentence):
    arguments = {"sizes": [(512, 512)], "megapixels": 1.0, "pixels_per_token": 16} | change
    with pytest.raises(ValueError, match=sentence):
        plan_buckets(arguments.pop("sizes"), **arguments)


def test_latents_of_few_counts_stay_whole():
    grids = [Grid(64, 64), Grid(60, 60), Grid(32, 128)]
    placements = place_latents(grids, 2)
    assert [p.grid for p in placements] == grids
    assert [p.tokens for p in placements] == [4096, 3600, 4096]
    assert [p.crop for p in placements] == [0, 0, 0]


def test_latents_of_a_frequent_count_stay_whole():
    rare = Grid(4, 4)
    frequent = Grid(4, 5)
    large = Grid(5, 6)
    assert [p.tokens for p in place_latents([rare, *[frequent] * 10, large], 2)] == [16, *[20] * 11]


def test_latents_of_many_counts_are_cut_with_the_least_loss_and_never_enlarged():
    for seed in range(4):
        rng = random.Random(seed)
        grids = [Grid(rng.randrange(8, 20), rng.randrange(8, 20)) for _ in range(9)]
        for max_graphs in (1, 2, 3):
            placements = place_latents(grids, max_graphs)
            token_counts = {p.tokens for p in placements}
            assert len(token_counts) <= max_graphs
            for grid, placement in zip(grids, placements, strict=True):
                cut = placement.grid
                assert cut.height <= grid.height and cut.width <= grid.width
                assert 0 <= cut.height * cut.width - placement.tokens < cut.width
                assert placement.crop == pytest.approx(1 - placement.tokens / (grid.height * grid.width))
            counts = [grid.height * grid.width for grid in grids]
            best = min(
                sum(1 - max(n for n in subset if n <= count) / count for count in counts)
                for size in range(1, max_graphs + 1)
                for subset in combinations(sorted(set(counts)), size)
                if min(subset) <= min(counts)
            )
            assert sum(p.crop for p in placements) == pytest.approx(best)


def test_a_cut_latent_keeps_its_shape_as_far_as_it_can():
    by_rows_and_columns = place_latents([Grid(64, 64), Grid(60, 60)], 1)[0]
    assert by_rows_and_columns.grid == Grid(60, 60)
    assert place_latents([Grid(40, 64), Grid(1, 2496)], 1)[0].grid == Grid(39, 64)
    # 6 x 10 would hold 60 tokens exactly, but it is far from square.
    assert place_latents([Grid(12, 12), Grid(1, 60)], 1)[0].grid == Grid(8, 8)
