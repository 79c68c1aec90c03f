"""The plan as text and as a picture says what the plan holds."""

import numpy as np
import pytest
from tessera.data.buckets.planner import plan_buckets
from tessera.data.buckets.plot import (
    BUCKET_COLOURS,
    CROPS,
    GRIDS,
    HEIGHT,
    HISTOGRAM,
    LOST,
    WIDTH,
    describe_plan,
    plot_plan,
)

FLUX = {"megapixels": 1.0, "pixels_per_token": 16}
SIZES = [(3000, 4000)] * 20 + [(1080, 1920)] * 10 + [(1000, 1000)] * 5 + [(1500, 1200), (700, 2000), (2000, 800)]


def pixels(plan, sizes, panel=(0, 0, WIDTH, HEIGHT)) -> np.ndarray:
    return np.asarray(plot_plan(plan, sizes).crop(panel)).astype(int)


def near(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    """Count the pixels of that colour, but for a little smoothing."""
    return int((np.abs(picture - colour).max(axis=-1) <= 8).sum())


def test_the_picture_has_its_size_and_mode():
    image = plot_plan(plan_buckets(SIZES, **FLUX), SIZES)
    assert image.size == (WIDTH, HEIGHT) and image.mode == "RGB"


def test_each_panel_changes_with_the_plan():
    single = plan_buckets(SIZES, **FLUX)
    two = plan_buckets(SIZES, max_graphs=2, **FLUX)
    assert len(single.token_counts) == 1 and len(two.token_counts) == 2
    for panel in (HISTOGRAM, CROPS, GRIDS):
        assert (pixels(single, SIZES, panel) != pixels(two, SIZES, panel)).any()
        assert (pixels(single, SIZES, panel) == pixels(single, SIZES, panel)).all()


def test_each_family_shows_in_its_own_colour_in_the_histogram_and_in_the_grids():
    for graphs in (1, 2):
        plan = plan_buckets(SIZES, max_graphs=graphs, **FLUX)
        for panel in (HISTOGRAM, GRIDS):
            image = pixels(plan, SIZES, panel)
            assert [near(image, colour) > 0 for colour in BUCKET_COLOURS[:3]] == [True, graphs == 2, False]


def test_the_highest_bar_stands_at_the_commonest_aspect():
    sizes = [(1000, 1000)] * 3 + [(1000, 2000)] * 30 + [(2000, 1000)]
    image = pixels(plan_buckets(sizes, **FLUX), sizes, HISTOGRAM)
    heights = (np.abs(image - BUCKET_COLOURS[0]).max(axis=-1) <= 8).sum(axis=0)
    left, centre, right = (heights[part].max() for part in (slice(0, 170), slice(170, 350), slice(350, None)))
    assert right > 0.97 * (HISTOGRAM[3] - HISTOGRAM[1])
    assert centre == pytest.approx(right * 3 / 30, abs=2)
    assert left == pytest.approx(right * 1 / 30, abs=3)


def test_loss_is_drawn_as_an_area_of_that_part():
    sizes = [(1000, 1000)] * 30 + [(100, 1000)] * 10
    plan = plan_buckets(sizes, **FLUX)
    assert plan.worst_crop == pytest.approx(0.6)
    image = pixels(plan, sizes, CROPS)
    lost_area = (image[..., 0] > 200) & (image[..., 0] - image[..., 2] > 20)
    columns = lost_area.sum(axis=0)
    assert 0.22 < (columns > 40).mean() < 0.28
    assert columns[: len(columns) // 5].mean() == pytest.approx((CROPS[3] - CROPS[1]) / 1.1, rel=0.07)


def test_a_plan_without_crops_draws_no_area():
    sizes = [(1024, 1024)] * 4
    plan = plan_buckets(sizes, **FLUX)
    assert plan.worst_crop == 0
    image = pixels(plan, sizes, (CROPS[0], CROPS[1], CROPS[2], CROPS[3] - 20))
    assert near(image, LOST) == 0


@pytest.mark.parametrize("fit", ("whole grids", "ragged edge"))
def test_any_data_set_can_be_drawn(fit):
    rng = np.random.default_rng(4)
    many_sizes = [(int(h), int(w)) for h, w in rng.integers(200, 3000, (400, 2))]
    for sizes in ([(1, 1)], [(10, 1000)], [(1000, 10), (10, 1000)], many_sizes):
        for megapixels in (0.001, 0.06, 1.0):
            plan = plan_buckets(sizes, megapixels=megapixels, pixels_per_token=16, max_graphs=9, fit=fit)
            assert plot_plan(plan, sizes).size == (WIDTH, HEIGHT)


def test_the_text_says_the_numbers_of_the_plan():
    plan = plan_buckets(SIZES, max_graphs=2, **FLUX)
    text = describe_plan(plan)
    for tokens in plan.token_counts:
        placed = [p for p in plan.placements if p.tokens == tokens]
        grids = {p.grid for p in placed}
        line = next(line for line in text.splitlines() if line.startswith(f"{tokens} tokens"))
        assert f"({tokens * 256 / 1024**2:.2f} megapixels; 4096 tokens asked for)" in line
        assert f": {len(placed)} pictures on {len(grids)} grid" in line
    assert (
        f"{100 * plan.mean_crop:.2f}% of a picture is cropped on average, {100 * plan.worst_crop:.2f}% at most" in text
    )
    assert f"would crop {100 * plan.equal_area_crop:.2f}%" in text
    assert f"{plan.equal_area_counts} token counts to compile for instead of 2." in text


def test_the_text_names_enlarged_pictures_only_where_there_are_any():
    assert "enlarged" not in describe_plan(plan_buckets([(1024, 1024)], **FLUX))
    assert "1 picture is smaller" in describe_plan(plan_buckets([(512, 512)], **FLUX))
    assert "2 pictures are smaller" in describe_plan(plan_buckets([(512, 512)] * 2, **FLUX))
