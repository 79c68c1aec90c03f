"""The forms that a picture is shown in: which windows, how large, mirrored or not."""

import pytest
from tessera.data.buckets.grids import Grid, crop_box, place
from tessera.data.encode.augmentation import PLAIN_VIEW, View, make_views
from tessera.data.folders.options import FolderOptions

WIDE = (160, 640)  # height, width
GRID = Grid(8, 8)


def views(size, **treatment):
    return make_views("key", size, place(size, GRID, 64, 16), 16, FolderOptions(**treatment))


def boxes(size, crops):
    return [crop_box(size, GRID, 16, view.zoom, view.position)[0] for view in crops]


def test_views_without_options_are_the_one_of_before():
    assert views(WIDE) == (PLAIN_VIEW,)
    assert boxes(WIDE, views(WIDE)) == [crop_box(WIDE, GRID, 16)[0]] == [(240, 0, 400, 160)]


def test_crops_spread_over_what_is_cropped_from_end_to_end():
    assert boxes(WIDE, views(WIDE, crops=3)) == [(240, 0, 400, 160), (0, 0, 160, 160), (480, 0, 640, 160)]
    assert boxes((640, 160), views((640, 160), crops=2)) == [(0, 0, 160, 160), (0, 480, 160, 640)]


def test_the_first_crop_is_the_one_nearest_to_the_middle():
    assert views(WIDE, crops=3)[0] == PLAIN_VIEW
    assert [view.position[0] for view in views(WIDE, crops=5)] == [0.5, 0.0, 0.25, 0.75, 1.0]
    assert [view.position[0] for view in views(WIDE, crops=4)] == [1 / 3, 0.0, 2 / 3, 1.0]


def test_crops_are_a_token_apart_at_least():
    assert views((160, 160), crops=4) == (PLAIN_VIEW,)  # nothing is cropped
    assert len(views((160, 205), crops=9)) == 3  # 45 pixels, a token takes 20


def test_zoomed_crops_stay_within_the_picture_and_its_own_pixels():
    size = (400, 640)
    crops = views(size, crops=40, crop_zoom=8.0)
    largest_zoom = 400 / 128  # the grid has 128 pixels a side
    assert crops[0] == PLAIN_VIEW and len(set(crops)) == 40
    assert 1 <= min(v.zoom for v in crops) and largest_zoom * 0.8 < max(v.zoom for v in crops) <= largest_zoom
    for left, top, right, bottom in boxes(size, crops):
        assert 0 <= left and right <= 640 and 0 <= top and bottom <= 400
        assert right - left == pytest.approx(bottom - top) and right - left >= 128 - 1e-9
    assert crops == views(size, crops=40, crop_zoom=8.0)
    assert (
        make_views("other", size, place(size, GRID, 64, 16), 16, FolderOptions(crops=2, crop_zoom=8.0))[1] != crops[1]
    )
    assert max(v.zoom for v in views(size, crops=40, crop_zoom=1.5)) <= 1.5
    assert views((100, 100), crops=3, crop_zoom=4.0) == (PLAIN_VIEW,)  # smaller than the grid


def test_a_flip_doubles_the_windows_and_the_first_is_not_mirrored():
    crops = views(WIDE, crops=2, flip="horizontal")
    assert [view.flip for view in crops] == [False, False, True, True]
    assert [view.position for view in crops[:2]] == [view.position for view in crops[2:]]
    assert views(WIDE, flip="horizontal") == (PLAIN_VIEW, View(flip=True))
