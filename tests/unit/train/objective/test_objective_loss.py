import math

import pytest
import torch
from scipy import stats
from tessera.common.rng import generator
from tessera.train.objective.flow_options import check_schedule_options
from tessera.train.objective.loss import Signal, huber_threshold, sigma_weight, training_loss, velocity_loss
from tessera.train.objective.noise import perturb_noise, sample_noise
from tessera.train.objective.notes import objective_notes
from tessera.train.objective.options import LOSSES, WEIGHTINGS, ObjectiveOptions

SIGMA = torch.tensor([0.0, 0.25, 0.5, 0.9, 1.0])
# One sample of two tokens with two channels; the errors are 0.1, -0.2, 0.5 and -3.
ERRORS = torch.tensor([[[0.1, -0.2], [0.5, -3.0]]])
# By hand, at c = 0.4.
BY_HAND = {
    "mse": [0.01, 0.04, 0.25, 9.0],
    "l1": [0.1, 0.2, 0.5, 3.0],
    "huber": [0.01, 0.04, 0.8 * 0.5 - 0.16, 0.8 * 3 - 0.16],
    "pseudo_huber": [0.8 * (math.sqrt(e * e + 0.16) - 0.4) for e in (0.1, 0.2, 0.5, 3.0)],
}


def test_every_loss_and_weighting_is_written_out_here():
    assert set(BY_HAND) == set(LOSSES)
    assert set(WEIGHTS_BY_HAND) == set(WEIGHTINGS)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_the_mean_of_its_formula(loss):
    a, b, c, d = BY_HAND[loss]
    threshold = torch.tensor([0.4])
    target = torch.tensor([[[5.0, -1.0], [0.0, 2.0]]])
    actual = velocity_loss(target + ERRORS, target, loss, None, threshold)
    assert actual.tolist() == pytest.approx([(a + b + c + d) / 4], rel=1e-5)
    weighted = velocity_loss(target + ERRORS, target, loss, torch.tensor([[3.0, 1.0]]), threshold)
    assert weighted.tolist() == pytest.approx([(3 * (a + b) / 2 + (c + d) / 2) / 4], rel=1e-5)
    first = velocity_loss(target + ERRORS, target, loss, torch.tensor([[1.0, 0.0]]), threshold)
    assert first.tolist() == pytest.approx([(a + b) / 2], rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_tokens_have_no_gradient_under_any_loss(loss):
    prediction = torch.randn(1, 4, 3, generator=generator(1)).requires_grad_()
    weights = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    velocity_loss(prediction, torch.zeros(1, 4, 3), loss, weights, torch.tensor([0.4])).sum().backward()
    assert prediction.grad[0, [0, 3]].abs().max() == 0 and prediction.grad[0, 1:3].abs().min() > 0


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_a_loss_equal_those_of_fp64_and_stay_finite(loss):
    errors = torch.tensor([[[0.0, 1e-6, -1e-3], [0.4, 40.0, -1e4]]])

    def slope(dtype):
        e = errors.to(dtype).requires_grad_()
        c = torch.tensor(0.4, dtype=dtype)
        formulas = {
            "mse": e**2,
            "l1": e.abs(),
            "huber": torch.where(e.abs() <= c, e**2, 2 * c * e.abs() - c**2),
            "pseudo_huber": 2 * c * ((e**2 + c**2).sqrt() - c),
        }[loss]
        formulas.mean().backward()
        return e.grad

    e = errors.clone().requires_grad_()
    velocity_loss(e, torch.zeros_like(e), loss, None, torch.tensor([0.4])).sum().backward()
    torch.testing.assert_close(e.grad.double(), slope(torch.float64), rtol=1e-5, atol=1e-12)


def test_pseudo_huber_keeps_the_digits_of_small_errors():
    """sqrt(e² + c²) − c itself has none of them left in fp32."""
    actual = velocity_loss(torch.full((1, 1, 1), 1e-5), torch.zeros(1, 1, 1), "pseudo_huber", None, torch.tensor([0.1]))
    assert actual.item() == pytest.approx(1e-10, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "by_hand"),
    [
        ("constant", [0.1] * 5),
        ("exponential", [math.exp(math.log(0.1) * s) for s in (0, 0.25, 0.5, 0.9, 1)]),
        # (1 − c) / (1 + noise/signal)² + c: noise/signal is 0, 1/3, 1, 9 and infinite
        ("snr", [1.0, 0.9 / (4 / 3) ** 2 + 0.1, 0.9 / 4 + 0.1, 0.9 / 100 + 0.1, 0.1]),
    ],
)
def test_huber_c_follows_its_schedule(schedule, by_hand):
    options = ObjectiveOptions(huber_schedule=schedule, huber_c=0.1)
    assert huber_threshold(options, SIGMA).tolist() == pytest.approx(by_hand, rel=1e-5)


WEIGHTS_BY_HAND = {
    "none": [1.0] * 5,
    "sigma_sqrt": [1e6, 16.0, 4.0, 1 / 0.81, 1.0],
    "cosmap": [2 / (math.pi * x) for x in (1, 1 - 0.5 + 0.125, 0.5, 1 - 1.8 + 1.62, 1)],
    # sigma²·min(((1 − sigma)/sigma)², 5): 9, 1, 1/81 are the ratios at 0.25, 0.5 and 0.9
    "min_snr": [0.0, 0.0625 * 5, 0.25 * 1, 0.81 / 81, 0.0],
}


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_weight_is_that_of_its_formula(weighting):
    actual = sigma_weight(ObjectiveOptions(weighting=weighting), SIGMA)
    assert actual.tolist() == pytest.approx(WEIGHTS_BY_HAND[weighting], rel=1e-5)


RATIOS = torch.tensor([0.03, 0.5, 1.0, 14.6, 4518.0])  # noise over signal, as on the schedule of SDXL with zero SNR
SNR = [1 / 0.0009, 4.0, 1.0, 1 / 14.6**2, 1 / 4518**2]


def test_min_snr_weighs_noise_and_v_as_the_paper_does():
    """Hang et al. 2023, sec. 3.4: min(SNR, gamma)/SNR on the noise, min(SNR, gamma)/(SNR + 1) on v."""
    options = ObjectiveOptions(weighting="min_snr", min_snr_gamma=3.0)
    noise, v = Signal(RATIOS, RATIOS), Signal(RATIOS, RATIOS / (1 + RATIOS**2).sqrt())
    levels = torch.linspace(0, 1, 5)
    assert sigma_weight(options, levels, noise).tolist() == pytest.approx([min(s, 3) / s for s in SNR], rel=1e-5)
    assert sigma_weight(options, levels, v).tolist() == pytest.approx([min(s, 3) / (s + 1) for s in SNR], rel=1e-5)
    straight = Signal(SIGMA / (1 - SIGMA), SIGMA)
    reference = sigma_weight(options, SIGMA[1:4])
    torch.testing.assert_close(sigma_weight(options, SIGMA, straight)[1:4], reference)


def test_huber_c_follows_the_noise_over_the_signal_of_a_schedule():
    signal, levels = Signal(RATIOS, RATIOS), torch.linspace(0, 1, 5)
    snr = huber_threshold(ObjectiveOptions(huber_schedule="snr", huber_c=0.1), levels, signal)
    assert snr.tolist() == pytest.approx([0.9 / (1 + r) ** 2 + 0.1 for r in RATIOS.tolist()], rel=1e-5)
    by_level = huber_threshold(ObjectiveOptions(huber_schedule="exponential", huber_c=0.1), levels, signal)
    assert by_level.tolist() == pytest.approx([0.1 ** float(u) for u in levels], rel=1e-5)


def test_the_training_loss_of_a_schedule_is_weighted_by_its_signal():
    options = ObjectiveOptions(loss="huber", huber_c=0.1, huber_schedule="snr", weighting="min_snr")
    signal, level = Signal(torch.tensor([2.0]), torch.tensor([2.0])), torch.tensor([0.6])
    actual = training_loss(options, ERRORS, torch.zeros_like(ERRORS), level, None, signal)
    expected = velocity_loss(ERRORS, torch.zeros_like(ERRORS), "huber", None, torch.tensor([0.9 / 9 + 0.1]))
    torch.testing.assert_close(actual, expected)  # SNR 1/4 is below gamma: a weight of 1


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("weighting", "cosmap", "'none', 'min_snr'"),
        ("weighting", "sigma_sqrt", "'none', 'min_snr'"),
        ("timestep_sampling", "logsnr", "'logit_normal', 'uniform', 'sigmoid', 'mode', 'beta', 'custom'"),
        ("timestep_sampling", "resolution_flux2", "'logit_normal', 'uniform', 'sigmoid', 'mode', 'beta', 'custom'"),
    ],
)
def test_options_of_flow_matching_are_refused_for_a_noise_schedule(name, value, choices):
    with pytest.raises(ValueError) as raised:
        check_schedule_options(ObjectiveOptions(**{name: value}), "SDXL")
    assert str(raised.value) == (
        f"{name} is '{value}', which is for flow matching models, and SDXL is not one; choose one of {choices}."
    )


def test_a_noise_schedule_is_told_how_its_levels_are_drawn():
    (note,) = check_schedule_options(ObjectiveOptions(), "SDXL")
    assert note.startswith("timestep_sampling logit_normal picks the middle of the noise schedule of SDXL more often;")
    assert check_schedule_options(ObjectiveOptions("uniform", weighting="min_snr"), "SDXL") == ()


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_training_loss_is_the_weighted_loss_of_each_sample(loss, weighting):
    options = ObjectiveOptions(loss=loss, weighting=weighting, huber_c=0.4)
    sigma = torch.tensor([0.25, 0.9])
    prediction = torch.cat([ERRORS, 2 * ERRORS])
    tokens = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    actual = training_loss(options, prediction, torch.zeros_like(prediction), sigma, tokens)
    plain = velocity_loss(prediction, torch.zeros_like(prediction), loss, tokens, torch.tensor([0.4, 0.4]))
    weights = WEIGHTS_BY_HAND[weighting]
    torch.testing.assert_close(actual, plain * torch.tensor([weights[1], weights[3]]))


def test_the_defaults_are_the_plain_mean_square_bit_for_bit():
    prediction, target = torch.randn(3, 5, 4, generator=generator(1)), torch.randn(3, 5, 4, generator=generator(2))
    actual = training_loss(ObjectiveOptions(), prediction, target, torch.rand(3), None)
    assert torch.equal(actual, (prediction - target).square().mean(dim=(1, 2)))


def test_noise_without_offset_and_perturbation_is_as_it_always_was():
    noise = sample_noise((2, 3), generator(7, "noise", 2, 0, 1))
    torch.testing.assert_close(
        noise,
        torch.tensor(
            [
                [0.28894665837287903, -0.6762537360191345, 1.6215875148773193],
                [-0.1846153885126114, -0.5328774452209473, 1.1169816255569458],
            ]
        ),
        rtol=1e-6,
        atol=0,
    )
    assert perturb_noise(noise, ObjectiveOptions(), generator(1)) is noise


@pytest.mark.parametrize("shape", [(64, 8, 6), (64, 3, 8, 6)])
def test_a_noise_offset_is_one_number_per_channel(shape):
    plain, offset_noise = (sample_noise(shape, generator(3, "noise"), offset) for offset in (0.0, 0.2))
    offsets = (offset_noise - plain).flatten(1)
    assert (offsets.amax(1) - offsets.amin(1)).max() < 1e-6
    assert stats.kstest((offsets.mean(1) / 0.2).double().numpy(), "norm").pvalue > 0.01


def test_input_perturbation_adds_noise_of_its_strength():
    noise = torch.zeros(16, 32, 32)
    perturbation = perturb_noise(noise, ObjectiveOptions(ip_noise_gamma=0.1), generator(3, "ip_noise"))
    assert stats.kstest((perturbation / 0.1).flatten().double().numpy(), "norm").pvalue > 0.01
    assert noise.abs().max() == 0
    random = ObjectiveOptions(ip_noise_gamma=0.1, ip_noise_gamma_random_strength=True)
    strengths = [perturb_noise(noise, random, generator(3, "ip_noise", i)).std().item() / 0.1 for i in range(300)]
    assert stats.kstest(strengths, "uniform").pvalue > 0.01


def test_a_shift_in_place_of_that_by_resolution_is_named():
    (note,) = objective_notes(ObjectiveOptions(shift=3.0, timestep_sampling="resolution_qwen"))
    assert note.startswith("shift 3 replaces the shift of resolution_qwen")
    assert objective_notes(ObjectiveOptions(timestep_sampling="resolution_qwen")) == ()
    assert objective_notes(ObjectiveOptions(shift=3.0)) == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"timestep_sampling": "cubic"}, "timestep_sampling is 'cubic'; choose one of logit_normal, uniform"),
        ({"loss": "l2"}, "loss is 'l2'; choose one of mse, huber, pseudo_huber, l1"),
        ({"weighting": "snr"}, "weighting is 'snr'; choose one of none, sigma_sqrt, cosmap, min_snr"),
        ({"huber_schedule": "linear"}, "huber_schedule is 'linear'; choose one of"),
        ({"stratified": "run"}, "stratified is 'run'; choose one of off, batch, epoch"),
        ({"sigmoid_scale": 0.0}, "sigmoid_scale is 0.0; set it above 0"),
        ({"logsnr_std": -1.0}, "logsnr_std is -1.0; set it above 0"),
        ({"beta_alpha": 0.0}, "beta_alpha is 0.0; set it above 0"),
        ({"beta_beta": 0.0}, "beta_beta is 0.0; set it above 0"),
        ({"min_snr_gamma": 0.0}, "min_snr_gamma is 0.0; set it above 0"),
        ({"huber_c": 0.0}, "huber_c is 0.0; set it above 0"),
        ({"huber_c": math.nan}, "huber_c is nan; give a finite number"),
        ({"mode_scale": 1.8}, "mode_scale is 1.8; set it between -1 and 1.7519"),
        ({"mode_scale": -1.1}, "mode_scale is -1.1; set it between -1 and"),
        ({"ip_noise_gamma": -0.1}, "ip_noise_gamma is -0.1; set it between 0.0 and 1.0"),
        ({"noise_offset": 1.1}, "noise_offset is 1.1; set it between 0.0 and 1.0"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveOptions(**values)
