"""Sheets of clips: frames by their colour."""

import numpy as np
import pytest
from tessera.train.preview.contact_sheet import render_frames, render_sheet


class Pixels(np.ndarray):
    """Stand-in for a tensor on a sheet: its frames, and them as an array."""

    def float(self):
        return self.astype(np.float32)

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


def clip(frames, height=8, width=12):
    """Frame n is grey of n / 100."""
    greys = np.arange(frames, dtype=np.float32) / np.float32(100)
    return np.broadcast_to(greys.reshape(-1, 1, 1, 1), (frames, height, width, 3)).view(Pixels)


def greys(picture, x=2):
    """The frames from the top down, by their grey."""
    column = np.asarray(picture)[:, x, 0].astype(int)
    inner = [int(v) for v in column if v < 250]
    return [v for v, previous in zip(inner, [-1, *inner], strict=False) if v != previous]


def grey(*frames):
    return [int(255 * np.float32(frame / 100)) for frame in frames]


@pytest.mark.parametrize(
    ("length", "frames", "expected"),
    [(5, 1, [2]), (33, 3, [0, 16, 32]), (33, 5, [0, 8, 16, 24, 32]), (2, 3, [0, 1]), (1, 9, [0])],
)
def test_frames_stand_under_each_other_from_the_first_to_the_last(length, frames, expected):
    ((cells, _),) = render_frames({(0, 0): clip(length)}, frames)
    picture = cells[0, 0]
    assert greys(picture) == grey(*expected)
    assert picture.width == 12 and 8 * len(expected) <= picture.height <= 12 * len(expected)


def test_large_frames_are_made_smaller_one_by_one():
    ((cells, limit),) = render_frames({(0, 0): clip(3, 512, 2048), (0, 1): clip(1, 64, 64)}, 3)
    assert cells[0, 0].size[0] == 1024 and 3 * 256 <= cells[0, 0].size[1] < 3 * 256 + 16
    sheet = render_sheet(["row"], ["a", "b"], cells, limit)
    assert greys(sheet, 40)[-3:] == grey(0, 1, 2)


def test_an_animation_has_a_sheet_for_each_moment_and_short_clips_stay_at_their_end():
    sheets = list(render_frames({(0, 0): clip(3), (0, 1): clip(2), (1, 0): clip(1)}, 0))
    greys_by_cell = [{cell: greys(picture) for cell, picture in cells.items()} for cells, _ in sheets]
    assert greys_by_cell == [{(0, 0): grey(n), (0, 1): grey(min(n, 1)), (1, 0): grey(0)} for n in range(3)]
    clips = {(row, column): clip(2, 512, 512) for row in range(2) for column in range(30)}
    images = [render_sheet(["a", "b"], [str(n) for n in range(30)], *cells) for cells in render_frames(clips, 0)]
    assert len(images) == 2 and images[0].size == images[1].size and max(images[0].size) <= 2048 + 8 * 31
