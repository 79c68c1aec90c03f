import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from tessera.common.rng import generator
from tessera.models.flux.family import resolution_shift
from tessera.models.objective import FlowMatching
from tessera.train.objective.loss import velocity_loss
from tessera.train.objective.noise import sample_noise
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.objective.timestep_sampling import check_range, sample_sigma, shift_sigma

DRAWS = 20_000


def sigmas(options: ObjectiveOptions, tokens: int = 4096, shift: float = 1.0) -> np.ndarray:
    return np.array([sample_sigma(options, generator(11, "sigma", step, 0), tokens, shift) for step in range(DRAWS)])


def logit_normal_cdf(mean: float, std: float, shift: float):
    """P(sigma' ≤ s): undo the shift, sigma = s / (shift − (shift − 1)·s), then the normal distribution of its logit."""

    def cdf(s):
        unshifted = s / (shift - (shift - 1) * s)
        return stats.norm.cdf((np.log(unshifted) - np.log1p(-unshifted) - mean) / std)

    return cdf


@pytest.mark.parametrize(
    ("options", "tokens", "family_shift", "cdf"),
    [
        (ObjectiveOptions(), 4096, 1.0, logit_normal_cdf(0, 1, 1)),
        (ObjectiveOptions(logit_mean=0.8, logit_std=0.5), 4096, 1.0, logit_normal_cdf(0.8, 0.5, 1)),
        (ObjectiveOptions(shift=3.0), 4096, 1.0, logit_normal_cdf(0, 1, 3)),
        (ObjectiveOptions(), 4096, 2.5, logit_normal_cdf(0, 1, 2.5)),
        (ObjectiveOptions(shift=1.0), 4096, 2.5, logit_normal_cdf(0, 1, 1)),
        (ObjectiveOptions("uniform"), 4096, 1.0, lambda s: s),
        (ObjectiveOptions("uniform", shift=2.0), 4096, 1.0, lambda s: s / (2 - s)),
        (ObjectiveOptions("resolution_shifted"), 4096, 1.0, logit_normal_cdf(0, 1, math.exp(1.15))),
        (ObjectiveOptions("resolution_shifted"), 256, 1.0, logit_normal_cdf(0, 1, math.exp(0.5))),
        (ObjectiveOptions("resolution_shifted", shift=3.0), 256, 1.0, logit_normal_cdf(0, 1, 3)),
    ],
)
def test_sigmas_follow_the_written_out_distribution(options, tokens, family_shift, cdf):
    assert stats.kstest(sigmas(options, tokens, family_shift), cdf).pvalue > 0.01


def test_the_resolution_shift_is_the_one_of_flux():
    """Values of BFL's time_shift(mu, 1.0, t), by hand: exp(mu) / (exp(mu) + 1/t − 1)."""
    for tokens, mu in [(256, 0.5), (4096, 1.15), (2176, 0.825), (8000, 1.15 + 0.65 * 3904 / 3840)]:
        assert resolution_shift(tokens) == pytest.approx(math.exp(mu), rel=1e-12)
        for t in (0.03, 0.5, 0.97):
            by_hand = math.exp(mu) / (math.exp(mu) + 1 / t - 1)
            assert shift_sigma(t, resolution_shift(tokens)) == pytest.approx(by_hand, rel=1e-12)


def test_a_shift_keeps_the_ends_and_moves_the_middle_to_noise():
    assert shift_sigma(0.0, 3.0) == 0.0
    assert shift_sigma(1.0, 3.0) == 1.0
    assert shift_sigma(0.5, 3.0) == pytest.approx(0.75)
    assert shift_sigma(0.3, 1.0) == pytest.approx(0.3)


def test_extreme_settings_still_give_sigmas_between_0_and_1():
    for mean in (-2000.0, 2000.0):
        values = [sample_sigma(ObjectiveOptions(logit_mean=mean, logit_std=50), generator(1, i), 64) for i in range(5)]
        assert all(0 <= v <= 1 for v in values)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "resolution_shifted"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 0.875), (0.875, 1.0), (0.3, 0.4)])
def test_a_cut_range_draws_what_the_whole_distribution_draws_within_it(sampling, low, high):
    whole = ObjectiveOptions(timestep_sampling=sampling, logit_mean=0.3, logit_std=1.2)
    part = dataclasses.replace(whole, min_sigma=low, max_sigma=high)
    everything = [sample_sigma(whole, generator(1, "whole", i), 4096, 3.0) for i in range(DRAWS)]
    inside = [sigma for sigma in everything if low <= sigma <= high]
    draws = [sample_sigma(part, generator(1, "part", i), 4096, 3.0) for i in range(len(inside))]
    assert len(inside) > 500 and low <= min(draws) and max(draws) <= high
    assert stats.ks_2samp(inside, draws).pvalue > 0.01


def test_a_squeezed_range_keeps_the_shape():
    whole = ObjectiveOptions()
    squeezed = dataclasses.replace(whole, min_sigma=0.2, max_sigma=0.6, sigma_range="squeeze")
    for i in range(20):
        sigma = sample_sigma(whole, generator(2, i), 64, 3.0)
        assert sample_sigma(squeezed, generator(2, i), 64, 3.0) == pytest.approx(0.2 + 0.4 * sigma, rel=1e-12)


def test_a_range_of_which_nothing_is_drawn_is_refused_before_a_step():
    narrow = ObjectiveOptions(logit_std=0.1, min_sigma=0.95)
    with pytest.raises(ValueError, match="between min_sigma 0.95 and max_sigma 1; widen them"):
        check_range(narrow, 4096, 1.0)
    check_range(dataclasses.replace(narrow, sigma_range="squeeze"), 4096, 1.0)
    check_range(ObjectiveOptions(min_sigma=0.95), 4096, 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_sigma": 0.5, "max_sigma": 0.5}, "min_sigma is 0.5 and max_sigma 0.5"),
        ({"max_sigma": 1.1}, "max_sigma 1.1"),
        ({"sigma_range": "fold"}, "sigma_range is 'fold'; choose one of cut, squeeze"),
        ({"expert_boundary": 1.0}, "expert_boundary is 1.0"),
    ],
)
def test_wrong_ranges_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveOptions(**values)


def test_tokens_of_weight_0_are_as_if_they_were_not_there():
    prediction, target = torch.randn(2, 6, 4, generator=generator(3)), torch.randn(2, 6, 4, generator=generator(4))
    weights = torch.tensor([[0.0, 0, 1, 1, 1, 1], [1.0, 1, 1, 1, 1, 1]])
    first = velocity_loss(prediction[:1, 2:], target[:1, 2:])
    second = velocity_loss(prediction[1:], target[1:])
    torch.testing.assert_close(velocity_loss(prediction, target, "mse", weights), torch.cat([first, second]))
    prediction.requires_grad_()
    velocity_loss(prediction, target, "mse", weights).mean().backward()
    assert prediction.grad[0, :2].abs().max() == 0 and prediction.grad[0, 2:].abs().min() > 0


def test_a_sample_s_noise_does_not_depend_on_the_rest_of_the_batch_or_the_global_generator():
    alone = sample_noise((16, 8, 6), generator(5, "noise", 2, 9))
    torch.manual_seed(123)
    noises = [sample_noise((16, 4, 12), generator(5, "noise", 2, sample)) for sample in range(4)]
    repeat = sample_noise((16, 8, 6), generator(5, "noise", 2, 9))
    assert torch.equal(alone, repeat)
    assert alone.dtype == torch.float32 and alone.device.type == "cpu"
    assert len({float(noise.sum()) for noise in noises}) == 4


def test_noise_is_normal():
    values = sample_noise((16, 32, 32), generator(5, "noise", 0, 0)).flatten().double().numpy()
    assert stats.kstest(values, "norm").pvalue > 0.01


def test_a_sample_is_noised_by_its_sigma():
    flow = FlowMatching()
    x0 = torch.tensor([[2.0, 4.0]])
    noise = torch.tensor([[0.0, 8.0]])
    assert torch.equal(flow.add_noise(x0, noise, 0.25), torch.tensor([[1.5, 5.0]]))
    assert torch.equal(flow.add_noise(x0, noise, 1.0), noise)


@pytest.mark.parametrize("sigma", [0.1, 0.5, 0.9])
def test_the_target_leads_from_x_t_to_both_ends_of_the_path(sigma):
    flow, x0, noise = FlowMatching(), *(torch.randn(5, 4, generator=generator(seed)) for seed in (1, 2))
    x_t, velocity = flow.add_noise(x0, noise, sigma), flow.target(x0, noise, sigma)
    torch.testing.assert_close(x_t - sigma * velocity, x0)
    torch.testing.assert_close(x_t + (1 - sigma) * velocity, noise)


def test_noising_bf16_latents_happens_in_fp32():
    x0 = torch.tensor([[1.0]], dtype=torch.bfloat16)
    noise = torch.tensor([[0.001]], dtype=torch.float32)
    assert FlowMatching().add_noise(x0, noise, 0.001).item() == pytest.approx(0.999001, abs=1e-7)
    assert FlowMatching().target(x0, noise, 0.001).item() == pytest.approx(-0.999, abs=1e-7)


def test_x_t_has_the_bits_of_a_sigma_that_was_rounded_to_fp32_first():
    x0, noise = (torch.randn(64, 64, generator=generator(seed)) for seed in (3, 4))
    for sigma in (1 / 3, 0.1, 0.987654321):
        level = torch.full((64, 64), sigma, dtype=torch.float32)
        assert torch.equal(FlowMatching().add_noise(x0, noise, sigma), (1 - level) * x0 + level * noise)


def test_the_loss_is_the_mean_square_of_each_sample():
    prediction = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.0, 2.0]]])
    target = torch.tensor([[[1.0, 0.0], [0.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]])
    assert velocity_loss(prediction, target, "mse").tolist() == [13 / 4, 1.0]


def test_the_loss_of_a_bf16_prediction_is_taken_in_fp32():
    prediction = torch.full((1, 64, 64), 1.0, dtype=torch.bfloat16)
    loss = velocity_loss(prediction, torch.full((1, 64, 64), 1.001), "mse")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e-6, rel=1e-3)


def test_the_loss_traces_whole():
    prediction, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    traced = torch.compile(velocity_loss, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(traced(prediction, target, "mse"), velocity_loss(prediction, target, "mse"))
