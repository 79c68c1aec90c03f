"""Places of control pictures, against the boxes of their results."""

from pathlib import Path

import pytest
from tessera.data.buckets.grids import RAGGED_EDGE, WHOLE_GRIDS, crop_box
from tessera.data.buckets.planner import plan_buckets
from tessera.data.encode.control_crops import place_controls
from tessera.data.folders.items import Item
from tessera.data.media.frames import ImagePixels

MANY = [(1000, 1500), (1500, 1000), (1080, 1920), (900, 1200), (1000, 1000), (1280, 800), (1100, 1000), (500, 1100)]


def still(size):
    return ImagePixels(Path("x.png"), "x.png", str(size), size)


def place_all(pairs, fit, *, max_graphs=1, megapixels=1.0, control_megapixels=1.0):
    """The plan of results and the control plan. pairs: (height, width) of a result and of its control pictures."""
    items = [
        Item(str(i), "", 1, still(result), tuple(map(still, control_sizes)))
        for i, (result, *control_sizes) in enumerate(pairs)
    ]
    plan = plan_buckets(
        [result for result, *_ in pairs], megapixels=megapixels, pixels_per_token=16, max_graphs=max_graphs, fit=fit
    )
    return plan, place_controls(
        items, plan, megapixels=megapixels, control_megapixels=control_megapixels, max_graphs=max_graphs
    )


def relative_box(size, grid):
    (left, top, right, bottom), _ = crop_box(size, grid, 16)
    return left / size[1], top / size[0], right / size[1], bottom / size[0]


@pytest.mark.parametrize("fit", [RAGGED_EDGE, WHOLE_GRIDS])
@pytest.mark.parametrize("sizes", [MANY[:1], MANY[:4]])
def test_a_control_of_its_results_shape_loses_the_same_edges(fit, sizes):
    pairs = [(size, size, (size[0] // 2, size[1] // 2)) for size in sizes]
    plan, controls = place_all(pairs, fit)
    for size, result, places in zip(sizes, plan.placements, controls.placements, strict=True):
        assert len(places) == 2
        for scale, placement in zip((1, 2), places, strict=True):
            assert placement.tokens == placement.grid.height * placement.grid.width
            box = relative_box((size[0] // scale, size[1] // scale), placement.grid)
            assert box == pytest.approx(relative_box(size, result.grid), abs=1e-9)
    if fit == WHOLE_GRIDS:
        assert {p.tokens for places in controls.placements for p in places} == set(plan.token_counts)
    (note,) = controls.notes
    worst = max(p.crop for places in controls.placements for p in places)
    assert note.startswith("Control pictures take ") and f"{worst:.2%} at worst" in note


def test_controls_of_another_shape_than_their_results_share_grids_of_their_own():
    pairs = [((1000, 1500), (1000, 1500)), ((1000, 1500), (1000, 1000)), ((1000, 1500), (1000, 1500), (800, 800))]
    plan, controls = place_all(pairs, RAGGED_EDGE)
    (first,), (second,), (third, fourth) = controls.placements
    assert first.grid == third.grid == plan.placements[0].grid
    assert second.grid == fourth.grid == plan_buckets(
        [(1000, 1000)], megapixels=1.0, pixels_per_token=16, fit=WHOLE_GRIDS
    ).placements[0].grid  # fmt: skip
    assert len(controls.notes) == 1


def test_a_ragged_edge_over_many_shapes_keeps_the_graphs_few_and_says_what_aligns_them():
    pairs = [(size, size) for size in MANY]
    plan, controls = place_all(pairs, RAGGED_EDGE)
    assert len({p.tokens for places in controls.placements for p in places}) == 1
    counts = len({placement.grid.height * placement.grid.width for placement in plan.placements})
    assert counts > 4
    crop, apart = controls.notes
    worst = max(p.crop for places in controls.placements for p in places)
    assert f"{worst:.2%} at worst" in crop
    assert f"{plan.mean_crop:.2%} on average and {plan.worst_crop:.2%} at worst" in apart
    assert apart.endswith(
        f"To crop both the same way, choose fit whole grids (with ragged edge they would take {counts} token counts, "
        f"each compiled)."
    )
    _, allowed = place_all(pairs, RAGGED_EDGE, max_graphs=counts)
    assert [places[0].grid for places in allowed.placements] == [placement.grid for placement in plan.placements]


def test_controls_of_another_size_are_planned_by_themselves_with_the_remedy_in_the_note():
    _, controls = place_all([(size, size) for size in MANY[:4]], RAGGED_EDGE, megapixels=0.5)
    assert controls.notes[-1].endswith("To crop both the same way, set control_megapixels to 0.5, like megapixels.")
    (tokens,) = {p.tokens for places in controls.placements for p in places}
    assert tokens == pytest.approx(4096, rel=0.13)
    # Where the grids of both have one shape all the same there is nothing to mend.
    assert len(place_all([((1000, 1000), (1000, 1000))], RAGGED_EDGE, megapixels=0.25)[1].notes) == 1


def test_grids_of_their_own_suit_the_controls_that_are_shown_most_often():
    sizes, weights = [(900, 1200), (500, 1100)], [40, 1]
    items = [Item("x", "", n, still((1000, 1000)), (still(size),)) for size, n in zip(sizes, weights, strict=True)]
    options = {"megapixels": 0.25, "pixels_per_token": 16, "fit": WHOLE_GRIDS}
    plan = plan_buckets([(1000, 1000)] * 2, **options)
    controls = place_controls(items, plan, megapixels=0.25, control_megapixels=0.25, max_graphs=1)
    placed = tuple(places[0] for places in controls.placements)
    assert (
        placed
        == plan_buckets(sizes, weights=weights, **options).placements
        != plan_buckets(sizes, **options).placements
    )


def test_items_without_controls_have_no_note():
    assert place_all([((1000, 1500),)], RAGGED_EDGE)[1].notes == ()
