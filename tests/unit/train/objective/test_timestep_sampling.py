import dataclasses
import math

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats
from tessera.common.rng import generator
from tessera.models.flux.family import flux2_resolution_shift
from tessera.models.qwen_image.family import qwen_resolution_shift
from tessera.train.objective.options import TIMESTEP_SAMPLING, ObjectiveOptions
from tessera.train.objective.sigma_curve import parse_curve
from tessera.train.objective.timestep_sampling import Strata, check_range, sample_sigma, sample_stratum, sigma_cdf

DRAWS = 10_000
CURVE = "0.1:0, 0.4:2, 0.5:2, 0.5001:0.5, 0.9:1"


def sigmas(options: ObjectiveOptions, tokens: int = 1024, shift: float = 1.0, draws: int = DRAWS) -> np.ndarray:
    return np.array([sample_sigma(options, generator(5, "sigma", i, 0), tokens, shift) for i in range(draws)])


def unshifted(sigma, shift):
    return sigma / (shift - (shift - 1) * sigma)


def logit_normal(mean, std):
    return lambda s: stats.norm.cdf(special.logit(s), mean, std)


def mode(scale):
    """P(f(u) ≤ s) for f(u) = 1 − u − scale·(cos²(πu/2) − 1 + u), which falls: 1 − u where f(u) = s."""

    def f(u):
        return 1 - u - scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)

    return np.vectorize(lambda s: 1 - optimize.brentq(lambda u: f(u) - s, 0, 1) if 0 < s < 1 else float(s >= 1))


def curve(points):
    """The integral of the density over a fine grid that has every point on it."""
    x, y = np.array(points).T
    grid = np.unique(np.concatenate([np.linspace(x[0], x[-1], 20_001), x]))
    area = integrate.cumulative_trapezoid(np.interp(grid, x, y), grid, initial=0)
    return lambda s: np.interp(s, grid, area / area[-1])


WRITTEN_OUT = {
    "logit_normal": ({"logit_mean": 0.4, "logit_std": 1.3}, logit_normal(0.4, 1.3)),
    "uniform": ({}, lambda s: s),
    "resolution_shifted": ({"logit_std": 1.3, "shift": 1.0}, logit_normal(0, 1.3)),
    "resolution_flux2": ({"logit_std": 1.3, "shift": 1.0}, logit_normal(0, 1.3)),
    "resolution_qwen": ({"logit_std": 1.3, "shift": 1.0}, logit_normal(0, 1.3)),
    "sigmoid": ({"sigmoid_scale": 1.6}, logit_normal(0, 1.6)),
    "mode": ({"mode_scale": 1.29}, mode(1.29)),
    # log SNR = 2·log((1 − s)/s): P(sigma ≤ s) = P(log SNR ≥ that)
    "logsnr": (
        {"logsnr_mean": -3.0, "logsnr_std": 2.0},
        lambda s: stats.norm.sf(-2 * special.logit(s), -3.0, 2.0),
    ),
    "beta": ({"beta_alpha": 0.7, "beta_beta": 2.5}, stats.beta(0.7, 2.5).cdf),
    "custom": ({"sigma_curve": CURVE}, curve([(0.1, 0), (0.4, 2), (0.5, 2), (0.5001, 0.5), (0.9, 1)])),
}
each_sampling = pytest.mark.parametrize("sampling", TIMESTEP_SAMPLING)


def options_of(sampling, **changes):
    return ObjectiveOptions(sampling, **(WRITTEN_OUT[sampling][0] | changes))


def test_every_sampling_is_written_out():
    assert set(WRITTEN_OUT) == set(TIMESTEP_SAMPLING)


@each_sampling
def test_draws_follow_the_formula(sampling):
    assert stats.kstest(sigmas(options_of(sampling)), WRITTEN_OUT[sampling][1]).pvalue > 0.01


@each_sampling
def test_a_constant_shift_moves_the_draws_of_every_sampling(sampling):
    cdf = WRITTEN_OUT[sampling][1]
    draws = sigmas(options_of(sampling, shift=3.0), draws=4000)
    assert stats.kstest(draws, lambda s: cdf(unshifted(s, 3.0))).pvalue > 0.01


@each_sampling
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.6), (0.45, 0.8), (0.2, 1.0)])
def test_a_cut_range_keeps_the_shares_inside_it(sampling, low, high):
    cdf = WRITTEN_OUT[sampling][1]
    draws = sigmas(options_of(sampling, shift=1.5, min_sigma=low, max_sigma=high), draws=3000)
    least, upper = cdf(unshifted(np.array([low, high]), 1.5))
    assert low <= draws.min() and draws.max() <= high
    assert stats.kstest(draws, lambda s: (cdf(unshifted(s, 1.5)) - least) / (upper - least)).pvalue > 0.01


@each_sampling
def test_a_squeezed_range_maps_the_same_draws(sampling):
    whole = sigmas(options_of(sampling, shift=1.5), draws=200)
    squeezed = sigmas(options_of(sampling, shift=1.5, min_sigma=0.2, max_sigma=0.6, sigma_range="squeeze"), draws=200)
    np.testing.assert_allclose(squeezed, 0.2 + 0.4 * whole, rtol=1e-12)


@each_sampling
def test_strata_of_a_sampling_follow_the_formula_too(sampling):
    options = options_of(sampling, stratified="epoch")
    strata = Strata(1, 500)
    draws = [
        sample_sigma(options, generator(5, "sigma", i, 0), 1024, 1.0, sample_stratum(options, 5, i, 0, strata))
        for i in range(500)
    ]
    # Of 500 draws one lies in each 500th, so the distance from the formula is no more than that.
    assert stats.kstest(draws, WRITTEN_OUT[sampling][1]).statistic <= 1 / 500 + 1e-4


@each_sampling
def test_the_share_below_a_sigma_is_that_of_the_formula(sampling):
    cdf = WRITTEN_OUT[sampling][1]
    for sigma in (0.05, 0.3, 0.45, 0.5, 0.7, 0.95):
        share = sigma_cdf(options_of(sampling), 1024, 1.0, sigma)
        assert share == pytest.approx(float(cdf(sigma)), abs=2e-5)
        cut = sigma_cdf(options_of(sampling, min_sigma=0.2, max_sigma=0.8), 1024, 1.0, sigma)
        least, upper = float(cdf(0.2)), float(cdf(0.8))
        assert cut == pytest.approx(min(max((float(cdf(sigma)) - least) / (upper - least), 0), 1), abs=1e-4)
    for sampling_range in ("cut", "squeeze"):
        options = options_of(sampling, min_sigma=0.2, max_sigma=0.8, sigma_range=sampling_range)
        assert (sigma_cdf(options, 1024, 1.0, 0.2), sigma_cdf(options, 1024, 1.0, 0.8)) == (0.0, 1.0)


@pytest.mark.parametrize("scale", [-1.0, -0.4, 0.0, 0.8, 1.75])
def test_mode_holds_for_all_its_scales(scale):
    draws = sigmas(ObjectiveOptions("mode", mode_scale=scale), draws=3000)
    assert stats.kstest(draws, mode(scale)).pvalue > 0.01


def test_the_resolution_curves_are_those_of_the_samplers():
    # mu of FLUX.2 by hand at 50 steps: m200 + (m10 − m200)·150/190, and m200 alone above 4300 tokens
    assert math.log(flux2_resolution_shift(1024)) == pytest.approx(1.701955, abs=1e-5)
    assert math.log(flux2_resolution_shift(4096)) == pytest.approx(2.023351, abs=1e-5)
    assert math.log(flux2_resolution_shift(6400)) == pytest.approx(0.00016927 * 6400 + 0.45666666)
    assert math.log(qwen_resolution_shift(256)) == pytest.approx(0.5)
    assert math.log(qwen_resolution_shift(8192)) == pytest.approx(0.9)
    assert qwen_resolution_shift(83 * 83) == pytest.approx(2.3033, abs=1e-4)  # 1328 x 1328


@pytest.mark.parametrize(("sampling", "mu"), [("resolution_flux2", 2.023351), ("resolution_qwen", 0.693548)])
def test_a_resolution_s_shift_moves_the_draws_and_the_model_s_own_does_not(sampling, mu):
    draws, cdf = sigmas(ObjectiveOptions(sampling), 4096, 7.0, draws=3000), logit_normal(0, 1)
    assert stats.kstest(draws, lambda s: cdf(unshifted(s, math.exp(mu)))).pvalue > 0.01


@each_sampling
def test_the_model_s_own_shift_moves_all_but_what_says_itself_where_it_lies(sampling):
    options = ObjectiveOptions(sampling)
    has_moved = sigmas(options, 1024, 3.0, draws=20).tolist() != sigmas(options, 1024, 1.0, draws=20).tolist()
    assert has_moved == (sampling in ("logit_normal", "uniform", "sigmoid", "mode", "beta"))


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        (
            ObjectiveOptions(),
            [0.8011771215475583, 0.3516542380686192, 0.9306028509665042],
        ),
        (
            ObjectiveOptions("uniform"),
            [0.9419214558573112, 0.7928283627894681, 0.9440814443221843],
        ),
        (
            ObjectiveOptions("resolution_shifted"),
            [0.7747292004463477, 0.31642868788560624, 0.9196447079654488],
        ),
        (
            ObjectiveOptions(shift=3.0, logit_mean=0.4, logit_std=1.3),
            [0.9076594350349513, 0.42026376196799614, 0.9791309988222243],
        ),
        (
            ObjectiveOptions(min_sigma=0.3, max_sigma=0.9),
            [0.8443853665288739, 0.7407523452869327, 0.8461802247336108],
        ),
        (
            ObjectiveOptions("uniform", min_sigma=0.3, max_sigma=0.9, sigma_range="squeeze"),
            [0.8651528735143867, 0.7756970176736809, 0.8664488665933108],
        ),
        (
            ObjectiveOptions("uniform", min_sigma=0.3, max_sigma=0.9),
            [0.8542365191187007, 0.7444693947533342, 0.8559068251720294],
        ),
    ],
)
def test_the_first_samplings_draw_what_they_always_drew(options, draws):
    assert [sample_sigma(options, generator(7, "sigma", 2, 0, i), 1024, 2.2) for i in range(3)] == pytest.approx(
        draws, rel=1e-13
    )


@pytest.mark.parametrize(("step", "epoch"), [(8, 8), (8, 20), (6, 4)])
@pytest.mark.parametrize("kind", ["batch", "epoch"])
def test_each_part_is_drawn_once_in_each_group(kind, step, epoch):
    options = ObjectiveOptions("uniform", stratified=kind)
    strata = Strata(step, epoch)
    draws = [
        sample_sigma(options, generator(9, "sigma", s, n), 1024, 1.0, sample_stratum(options, 9, s, n, strata))
        for s in range(40)
        for n in range(step)
    ]
    size = step if kind == "batch" else epoch
    groups = [draws[i : i + size] for i in range(0, len(draws) - size + 1, size)]
    assert all(sorted(int(sigma * size) for sigma in group) == list(range(size)) for group in groups)
    orders = {tuple(int(sigma * size) for sigma in group) for group in groups}
    assert len(orders) > min(len(groups), math.factorial(size)) / 2  # in another order each time
    assert stats.kstest(draws, "uniform").pvalue > 0.01


def test_strata_depend_on_the_place_in_the_run_only():
    options, strata = ObjectiveOptions(stratified="epoch"), Strata(4, 10)
    places = [(s, n) for s in range(12) for n in range(4)]
    forward = [sample_stratum(options, 3, *place, strata) for place in places]
    backward = [sample_stratum(options, 3, *place, strata) for place in reversed(places)]
    assert forward == backward[::-1]
    assert forward != [sample_stratum(options, 4, *place, strata) for place in places]
    assert sample_stratum(ObjectiveOptions(), 3, 0, 0, strata) is None


def test_a_range_without_draws_is_refused_for_every_kind_of_distribution():
    narrow = {"custom": "0:1, 0.5:1", "beta": None, "mode": None}
    with pytest.raises(ValueError, match="timestep_sampling 'custom' draws lies between min_sigma 0.6 and max_sigma 1"):
        check_range(ObjectiveOptions("custom", sigma_curve=narrow["custom"], min_sigma=0.6), 1024, 1.0)
    with pytest.raises(ValueError, match="timestep_sampling 'beta'"):
        check_range(ObjectiveOptions("beta", beta_alpha=50.0, beta_beta=1.0, max_sigma=0.3), 1024, 1.0)
    check_range(ObjectiveOptions("mode", min_sigma=0.9), 1024, 1.0)


def test_a_curve_draws_between_its_points_only_and_never_where_it_is_0():
    options = ObjectiveOptions("custom", sigma_curve="0.1:1, 0.2:1, 0.2001:0, 0.7999:0, 0.8:1; 0.9:1\n0.95:0 1:0")
    draws = sigmas(options, draws=2000)
    assert draws.min() >= 0.1 and draws.max() <= 0.95
    assert not ((draws > 0.2001) & (draws < 0.7999)).any()
    whole = parse_curve(options.sigma_curve)
    assert (whole.quantile(0.0), whole.quantile(1.0)) == (0.1, 0.95)
    parts = np.linspace(0.001, 0.999, 97)
    np.testing.assert_allclose([whole.cdf(whole.quantile(p)) for p in parts], parts, atol=1e-9)
    falling = parse_curve("0:1e200, 0.3:0, 0.7:0, 1:1e200")
    for part in (1e-9, 0.1, math.nextafter(0.5, 0), 0.5, math.nextafter(0.5, 1), 1 - 1e-9):
        assert falling.cdf(falling.quantile(part)) == pytest.approx(part, abs=1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "sigma_curve is ''; give at least two points"),
        ("0.5:1", "at least two points, such as 0:1, 0.5:3, 1:0"),
        (" ".join(f"{i / 10**5}:1" for i in range(10**5)), "sigma_curve has 100000 points; give at most 1000"),
        ("0:1, half:2", "sigma_curve has 'half:2'; write points as sigma:weight"),
        ("0:1, 0.5, 1:1", "sigma_curve has '0.5'; write points as"),
        ("0:1, 1.5:1", "sigma_curve has '1.5:1'; sigmas lie between 0"),
        ("0:1, nan:1", "sigma_curve has 'nan:1'; sigmas lie between 0"),
        ("0:1, 0.5:-1", "sigma_curve has '0.5:-1'; give a weight of 0 or more"),
        ("0:1, 1:inf", "sigma_curve has '1:inf'; give a weight of 0 or more"),
        ("0:1, 0.5:1, 0.5:2", "sigma_curve has '0.5:2' after sigma 0.5; put the points in rising order"),
        ("0:0, 1:0", "give at least one weight above 0"),
    ],
)
def test_a_curve_that_is_none_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveOptions(sigma_curve=text)


@pytest.mark.parametrize("extreme", ["beta", "mode", "logsnr", "sigmoid"])
def test_extreme_parameters_still_give_sigmas_between_0_and_1(extreme):
    parameters = {
        "beta": {"beta_alpha": 0.05, "beta_beta": 50.0},
        "mode": {"mode_scale": 1.75},
        "logsnr": {"logsnr_mean": -2000.0, "logsnr_std": 20.0},
        "sigmoid": {"sigmoid_scale": 1000.0},
    }
    options = ObjectiveOptions(extreme, **parameters[extreme])
    for cut in (options, dataclasses.replace(options, max_sigma=0.999)):
        draws = sigmas(cut, draws=200)
        assert ((0 <= draws) & (draws <= 1)).all()
