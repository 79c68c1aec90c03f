import numpy as np
import pytest
from scipy import stats
from tessera.common.canvas import INK, PAPER
from tessera.train.objective import plot
from tessera.train.objective.options import TIMESTEP_SAMPLING, ObjectiveOptions
from tessera.train.objective.plot import BARS, POINTS, SAMPLES, density, plot_distribution, sampled_histogram


def colours(image):
    return {tuple(pixel) for pixel in np.asarray(image).reshape(-1, 3).tolist()}


def test_the_line_is_the_density_of_the_formula():
    sigma = (np.arange(POINTS) + 0.5) / POINTS
    beta = density(ObjectiveOptions("beta", beta_alpha=2.0, beta_beta=3.0, shift=1.0))
    np.testing.assert_allclose(beta, stats.beta(2, 3).pdf(sigma), atol=1e-3)
    curve = density(ObjectiveOptions("custom", sigma_curve="0:0, 1:1"))
    np.testing.assert_allclose(curve, 2 * sigma, atol=1e-9)


@pytest.mark.parametrize("sampling", TIMESTEP_SAMPLING)
@pytest.mark.parametrize("ranged", [{}, {"min_sigma": 0.3, "max_sigma": 0.8}])
def test_the_bars_follow_the_line(sampling, ranged):
    options = ObjectiveOptions(sampling, **ranged)
    exact, bars = density(options), sampled_histogram(options)
    assert sum(exact) / POINTS == pytest.approx(1, abs=1e-6) and sum(bars) / BARS == pytest.approx(1)
    shares = np.array(exact).reshape(BARS, -1).mean(axis=1) / BARS
    expected, counts = shares * SAMPLES, np.array(bars) / BARS * SAMPLES
    often = expected > 5
    spread = (counts[often] - expected[often]) ** 2 / expected[often]
    assert stats.chi2.sf(spread.sum(), often.sum()) > 0.001
    assert counts[expected == 0].sum() == 0


def test_the_weighted_line_is_the_density_times_the_weight():
    sigma = (np.arange(POINTS) + 0.5) / POINTS
    density = plot.weighted_density(ObjectiveOptions("uniform", weighting="cosmap"))
    # 2 / (π·(1 − 2s + 2s²)) integrates to 1 over [0, 1]
    np.testing.assert_allclose(density, 2 / (np.pi * (1 - 2 * sigma + 2 * sigma**2)), rtol=1e-4)
    assert plot._WEIGHTED in colours(plot_distribution(ObjectiveOptions(weighting="cosmap")))
    assert plot._WEIGHTED not in colours(plot_distribution(ObjectiveOptions()))


def test_the_picture_has_bars_and_the_line_and_is_the_same_each_time():
    image = plot_distribution(ObjectiveOptions())
    assert image.size == (1024, 512) and image.mode == "RGB"
    assert {plot._BAR, plot._DENSITY, INK, PAPER} <= colours(image)
    assert image.tobytes() == plot_distribution(ObjectiveOptions()).tobytes()


def test_a_range_without_draws_is_said_in_the_picture():
    """Whether it is one depends on the model's shift, so that the node itself takes it."""
    colour_set = colours(plot_distribution(ObjectiveOptions("custom", sigma_curve="0:1, 0.5:1", min_sigma=0.6)))
    assert plot._WEIGHTED in colour_set and plot._DENSITY not in colour_set
