"""The loss plot: the average against its formula, the picture by where its colours are."""

import math

import numpy as np
import pytest
from tessera.train.preview.loss_plot import BOTTOM, LEFT, RIGHT, TOP, plot_loss, smoothed

ORANGE = (217, 119, 6)
RAW = (164, 199, 232)
SMOOTH = (23, 92, 163)
BAD = (200, 60, 48)
WIDE = 1024 - LEFT - RIGHT  # from the first step to the last
PLOT = (slice(TOP - 4, 512 - BOTTOM), slice(LEFT + 3, LEFT + WIDE))


def pixels(picture, colour, tolerance=45) -> np.ndarray:
    """(n, 2) rows, and columns counted from the first step, inside the plot's area that have this colour."""
    array = np.asarray(picture, dtype=int)[PLOT]
    return np.argwhere((np.abs(array - colour) <= tolerance).all(-1)) + (0, 3)


def heights(picture, colour) -> list[float]:
    """The mean row of the colour at the left, the middle and the right of the plot."""
    points = pixels(picture, colour)
    return [points[np.abs(points[:, 1] - column) < 5, 0].mean() for column in (10, WIDE / 2, WIDE - 10)]


def test_the_average_weighs_all_values_so_far_and_has_no_zero_start():
    loss, s = [4.0, 1.0, 3.0, 2.0], 0.7
    expected = []
    for step in range(len(loss)):
        weights = [s ** (step - i) for i in range(step + 1)]
        expected.append(sum(w * x for w, x in zip(weights, loss, strict=False)) / sum(weights))
    np.testing.assert_allclose(smoothed(loss, s), expected, rtol=1e-12)
    np.testing.assert_allclose(smoothed([5.0] * 6, 0.99), 5.0, rtol=1e-12)


def test_values_that_are_not_finite_are_left_out_of_the_average():
    result = smoothed([1.0, math.nan, math.inf, 3.0], 0.5)
    assert np.isnan(result[1:3]).all()
    np.testing.assert_allclose(result[[0, 3]], smoothed([1.0, 3.0], 0.5), rtol=1e-12)


def test_a_falling_loss_falls_in_the_picture():
    picture = plot_loss([1.0 - step / 200 for step in range(200)], smoothing=0.0)
    assert picture.size == (1024, 512) and picture.mode == "RGB"
    left, middle, right = heights(picture, SMOOTH)
    assert left < middle < right
    assert middle == pytest.approx((left + right) / 2, abs=3)


def test_a_log_scale_makes_an_exponential_a_straight_line():
    loss = [math.exp(-step / 20) for step in range(200)]
    left, middle, right = heights(plot_loss(loss, 0.0, log_scale=True), SMOOTH)
    assert middle == pytest.approx((left + right) / 2, abs=3)
    left, middle, right = heights(plot_loss(loss, 0.0), SMOOTH)
    assert middle > (left + 3 * right) / 4


def test_raw_and_average_are_both_drawn():
    noisy = [1.0 + 0.5 * (-1) ** step for step in range(300)]
    picture = plot_loss(noisy, smoothing=0.95)
    spread = np.ptp(pixels(picture, RAW)[:, 0])
    assert spread > 200 > 4 * np.ptp(pixels(picture, SMOOTH)[1000:, 0]) / 2


def test_missing_values_are_marked_at_the_foot():
    loss = [0.5] * 100
    assert len(pixels(plot_loss(loss), BAD)) == 0
    loss[50] = math.nan
    marks = pixels(plot_loss(loss), BAD)
    assert len(marks) and abs(marks[:, 1].mean() - WIDE * 50 / 99) < 2
    assert len(pixels(plot_loss([1.0, 0.0, -1.0, 1.0], log_scale=True), BAD))


def test_a_single_step_is_a_dot_in_the_middle():
    dot = pixels(plot_loss([0.3]), SMOOTH)
    assert len(dot) > 20
    assert abs(dot[:, 1].mean() - WIDE / 2) < 3


@pytest.mark.parametrize("loss", [[0.0], [0.0, 0.0], [1e-30, 1e30], [-3.0, -2.0], [7.0] * 3, [1e-9] * 2])
@pytest.mark.parametrize("log_scale", [False, True])
def test_odd_series_are_drawn_or_refused_in_a_sentence(loss, log_scale):
    if log_scale and max(loss) <= 0:
        with pytest.raises(ValueError, match="switch log_scale off"):
            plot_loss(loss, log_scale=True)
    else:
        assert len(pixels(plot_loss(loss, log_scale=log_scale), SMOOTH))


def test_a_long_run_keeps_its_single_spike():
    loss = [0.5] * 50_000
    loss[31_234] = 9.0
    spike = pixels(plot_loss(loss, smoothing=0.99), RAW)
    assert spike[:, 0].min() < 40
    assert abs(spike[np.argmin(spike[:, 0]), 1] - WIDE * 31_234 / 49_999) < 2


def test_an_empty_or_wholly_broken_series_is_refused():
    with pytest.raises(ValueError, match="loss is empty; train at least one step"):
        plot_loss([])
    with pytest.raises(ValueError, match="no value that can be drawn among its 2; lower the learning rate"):
        plot_loss([math.nan, math.inf])
    with pytest.raises(ValueError, match="smoothing is 1"):
        plot_loss([1.0], smoothing=1)


def test_the_validation_loss_is_drawn_beside_the_training_loss_at_its_steps():
    loss = [1.0] * 200
    plain, with_validation = plot_loss(loss), plot_loss(loss, validation=[(0, 1.5), (100, 2.0), (200, 0.5)])
    assert len(pixels(plain, ORANGE)) == 0 and len(pixels(with_validation, SMOOTH)) > 500
    points = pixels(with_validation, ORANGE)
    top = points[points[:, 0] == points[:, 0].min(), 1].mean()
    assert top == pytest.approx(WIDE / 2, abs=3)  # step 100 of 200 in the middle
    left, right = (points[np.abs(points[:, 1] - column) < 8, 0].mean() for column in (3, WIDE))
    train = pixels(with_validation, SMOOTH)[:, 0].mean()
    assert points[:, 0].min() < left < train < right
    empty = plot_loss(loss, log_scale=True, validation=[(100, 0.0), (200, math.nan)])
    assert len(pixels(empty, ORANGE)) == 0


def test_text_is_high_enough_for_a_node_and_stays_inside():
    """A third of the size, as on a node, its capitals are to be 8 pixels high, as those of text of 11 pixels are."""
    loss = [12.3456 / (step + 1) for step in range(12_345)]
    picture = plot_loss([*loss, math.nan], 0.9, validation=[(0, 3.21), (12_000, 0.123)])
    dark = np.asarray(picture.convert("L"), dtype=int) < 150
    assert not dark[:, :4].any() and not dark[:, -4:].any()
    numbers = dark[512 - BOTTOM + 10 :, LEFT + 20 :]  # those of the steps
    rows = np.flatnonzero(numbers.any(1))
    assert 22 <= np.ptp(rows) + 1 and rows[-1] < numbers.shape[0] - 3
