"""Several sizes: what the text may say, who is trained at which size, and one token count for each size."""

import pytest
from tessera.data.buckets.planner import plan_buckets
from tessera.data.buckets.sizes import MOST_SIZES, choose_sizes, parse_sizes, plan_sizes

ARGUMENTS = {"pixels_per_token": 16, "max_graphs": 1, "fit": "ragged edge"}
PHOTOS = [(1024, 1024), (768, 1344), (600, 600), (300, 200)]  # height, width


def plans_of(megapixels, sizes=PHOTOS):
    return plan_sizes(sizes, megapixels, weights=[1.0] * len(sizes), frames=[1] * len(sizes), **ARGUMENTS)


def test_one_size_is_planned_as_before():
    (plan,) = plans_of((1.0, 1.0))
    assert plan.members == (0, 1, 2, 3) and list(plan.sizes) == PHOTOS
    assert plan.plan == plan_buckets(PHOTOS, megapixels=1.0, weights=[1.0] * 4, frames=[1] * 4, **ARGUMENTS)


def test_each_picture_is_trained_at_each_size_that_it_has_pixels_for_or_at_the_nearest_below():
    large, small, middle = plans_of((1.0, 0.1, 0.25))
    assert [size.megapixels for size in (large, small, middle)] == [1.0, 0.1, 0.25]
    assert large.members == (0, 1) and middle.members == (0, 1, 2)
    assert small.members == (0, 1, 2, 3), "0.06 megapixels: the smallest size, as nothing is below"
    assert [len(size.plan.token_counts) for size in (large, small, middle)] == [1, 1, 1]
    assert choose_sizes((950, 1024), (1.0, 0.5)) == [1.0, 0.5], "7/8 of a size are enough"
    assert choose_sizes((896, 1024), (1.0, 0.5)) == [1.0, 0.5], "just that"
    assert choose_sizes((880, 1024), (1.0, 0.5)) == [0.5]


def test_weights_and_frames_are_those_of_the_pictures_of_a_size():
    sizes = [(300, 200), (600, 600), (1024, 1024), (768, 1344)]
    weights, frames = [1.0, 2.0, 3.0, 50.0], [1, 5, 2, 3]
    large, _ = plan_sizes(sizes, (0.9, 0.05), weights=weights, frames=frames, **ARGUMENTS)
    assert large.members == (2, 3) and [placement.grid.frames for placement in large.plan.placements] == [2, 3]
    arguments = {**ARGUMENTS, "megapixels": 0.9}
    assert large.plan == plan_buckets(sizes[2:], weights=weights[2:], frames=frames[2:], **arguments)
    assert large.plan != plan_buckets(sizes[2:], weights=weights[:2], frames=frames[2:], **arguments)


def test_a_plan_without_the_pictures_of_an_earlier_size_counts_the_others():
    sizes = [(256, 256), (1024, 1024), (250, 256)]
    plans = plan_sizes(sizes, (0.0625, 0.0626), weights=[1.0, 1.0, 5.0], frames=[1] * 3, **ARGUMENTS)
    for size in plans:
        assert size.plan.upscaled == sum(placement.scale > 1 for placement in size.plan.placements)
        assert len(size.plan.placements) == len(size.members)


def test_a_size_that_gives_the_same_grids_again_or_has_no_picture_is_left_out():
    assert [size.megapixels for size in plans_of((1.0, 1.0001))] == [1.0]
    assert [size.megapixels for size in plans_of((1.0, 1.0004), PHOTOS[:1])] == [1.0], "4096 and 4098 tokens"
    assert [size.megapixels for size in plans_of((4.0, 0.05))] == [0.05]


def test_sizes_are_read_with_any_separator_and_each_once():
    assert parse_sizes("") == parse_sizes("  ") == ()
    assert parse_sizes("0.25, 0.5;1 0.25") == (0.25, 0.5, 1.0)
    assert parse_sizes("64") == (64.0,)
    assert len(parse_sizes(" ".join(map(str, range(1, MOST_SIZES + 1))))) == MOST_SIZES


@pytest.mark.parametrize("text", ["0,25", "-1", "nan", "1e9", "half", "0.5 MP", "0.25, 512x512"])
def test_a_bad_size_is_one_sentence(text):
    with pytest.raises(ValueError, match=r"^more_megapixels is .*; write sizes above 0 and up to 64 .*\.$"):
        parse_sizes(text)


def test_too_many_sizes_are_one_sentence():
    with pytest.raises(ValueError, match=f"^more_megapixels has {MOST_SIZES + 1} sizes; give at most {MOST_SIZES}.$"):
        parse_sizes(" ".join(map(str, range(1, MOST_SIZES + 2))))
