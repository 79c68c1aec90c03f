"""The objective of every model type of ComfyUI, against its own formulas and those of the papers."""

import math
from types import SimpleNamespace

import comfy.model_base
import comfy.model_sampling as core
import pytest
import torch
from comfy.model_base import ModelType
from comfy.model_patcher import ModelPatcher
from comfy_extras import nodes_model_advanced as nodes
from tessera.models.native.objective import LEAST_FLOW_SIGMA, SamplingObjective, default_shift, objective_of
from tessera.models.objective import FlowMatching

LEVELS = (0.0, 0.02, 0.31, 0.5, 0.77, 0.98, 1.0)
FLOW = (ModelType.FLOW, ModelType.FLUX, ModelType.FLOW_COSMOS)
REFUSED = (ModelType.STABLE_CASCADE, ModelType.IMG_TO_IMG, ModelType.IMG_TO_IMG_FLOW)
SETTINGS = {
    ModelType.V_PREDICTION_EDM: {"sigma_max": 120.0, "sigma_min": 0.002},
    ModelType.EDM: {"sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002},
    ModelType.FLOW: {"shift": 3.0},
    ModelType.FLUX: {"shift": 1.15},
    ModelType.FLOW_COSMOS: {"sigma_data": 1.0, "sigma_max": 80.0, "sigma_min": 0.002},
    ModelType.V_PREDICTION_CONTINUOUS: {"sigma_max": 500.0, "sigma_min": 0.03},
}


def sampling_of(kind: ModelType, **settings):
    config = SimpleNamespace(sampling_settings=settings or SETTINGS.get(kind, {}))
    return comfy.model_base.model_sampling(config, kind)


def model_of(sampling) -> ModelPatcher:
    model = torch.nn.Module()
    model.model_sampling = sampling
    model.latent_format = None
    model.model_config = None
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    latent, noise = (torch.randn(4, 6, 5, generator=source) for _ in range(2))
    return 0.8 * latent + 0.1, noise


def sigmas_of(objective: SamplingObjective) -> list[float]:
    if isinstance(objective.sampling, core.IMG_TO_IMG_FLOW):  # has a table of another path
        return [0.1, 0.5, 0.9]
    return [objective.noise_level(level) for level in LEVELS]


@pytest.mark.parametrize("kind", list(ModelType))
def test_a_model_that_meets_its_target_denoises_to_the_latent(kind):
    sampling, (latent, noise) = sampling_of(kind), pair()
    objective = SamplingObjective(sampling)
    for sigma in sigmas_of(objective):
        x_t, target = objective.add_noise(latent, noise, sigma), objective.target(latent, noise, sigma)
        level = torch.tensor([sigma], dtype=torch.float64)
        denoised = sampling.calculate_denoised(level, target.double()[None], x_t.double()[None])[0]
        # x_t and the target are rounded to fp32 here, and count as much as noise does.
        within = 3e-7 * max(1.0, x_t.abs().max().item())
        torch.testing.assert_close(denoised.float(), latent, rtol=0, atol=within)
        assert x_t.dtype == target.dtype == torch.float32


@pytest.mark.parametrize("kind", [kind for kind in ModelType if kind not in REFUSED])
def test_the_target_is_what_the_papers_call_it(kind):
    """noise − x0 of flow matching; the noise of DDPM; v = alpha·noise − sigma·x0 of Salimans & Ho 2022 (arXiv
    2202.00512), with alpha² + sigma² = 1; F of Karras et al. 2022 (arXiv 2206.00364, table 1)."""
    objective, (latent, noise) = SamplingObjective(sampling_of(kind)), pair()
    x0, n = latent.double(), noise.double()
    for sigma in sigmas_of(objective):
        alpha = 1 / math.sqrt(1 + sigma**2)
        if kind in FLOW:
            expected = n - x0
        elif kind is ModelType.EPS:
            expected = n
        elif kind is ModelType.EDM:
            data = 0.5
            skip, out = data**2 / (sigma**2 + data**2), sigma * data / math.sqrt(sigma**2 + data**2)
            expected = (x0 - skip * (x0 + sigma * n)) / out
        else:
            expected = alpha * n - sigma * alpha * x0
        torch.testing.assert_close(objective.target(latent, noise, sigma), expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in ModelType if kind not in REFUSED])
def test_the_input_of_the_model_is_that_of_its_path(kind):
    sampling, (latent, noise) = sampling_of(kind), pair()
    objective = SamplingObjective(sampling)
    for sigma in sigmas_of(objective):
        if kind in (ModelType.FLOW, ModelType.FLUX):
            expected = (1 - sigma) * latent.double() + sigma * noise.double()
        elif kind is ModelType.V_PREDICTION_DDPM:  # CogVideoX takes x_t of DDPM as it is
            expected = (latent.double() + sigma * noise.double()) / math.sqrt(1 + sigma**2)
        else:
            expected = latent.double() + sigma * noise.double()
        noisy = objective.add_noise(latent, noise, sigma)
        torch.testing.assert_close(noisy, expected.float(), rtol=1e-6, atol=1e-6)
        if kind is ModelType.FLOW_COSMOS:  # what the model sees is flow matching
            level = sigma / (1 + sigma)
            model_input = sampling.calculate_input(torch.tensor([sigma]), noisy[None])[0]
            torch.testing.assert_close(model_input, (1 - level) * latent + level * noise, rtol=1e-5, atol=1e-6)


def test_neither_latent_nor_noise_is_written_into():
    latent, noise = pair()
    copies = latent.clone(), noise.clone()
    for kind in ModelType:
        objective = SamplingObjective(sampling_of(kind))
        objective.add_noise(latent, noise, 0.5).add_(1)
        objective.target(latent, noise, 0.5).add_(1)
    assert torch.equal(latent, copies[0]) and torch.equal(noise, copies[1])


def test_levels_of_flow_models_are_their_sigmas():
    for kind in (ModelType.FLOW, ModelType.FLUX):
        objective = SamplingObjective(sampling_of(kind))
        assert [objective.noise_level(level) for level in LEVELS] == [LEAST_FLOW_SIGMA, *LEVELS[1:]]
        assert objective.is_flow and objective.noise_ratio(0.3) == pytest.approx(0.3 / 0.7, rel=1e-12)
        assert objective.noise_ratio(1.0) == FlowMatching().noise_ratio(1.0) == math.inf
        assert objective.output_scale(0.3) == pytest.approx(0.3, rel=1e-12)
    cosmos = sampling_of(ModelType.FLOW_COSMOS)
    objective = SamplingObjective(cosmos)
    for level in (0.02, 0.31, 0.5, 0.77, 0.98):
        sigma = objective.noise_level(level)
        assert sigma == pytest.approx(cosmos.sigma(level), rel=1e-12)
        assert cosmos.timestep(sigma) == pytest.approx(level, rel=1e-12)
        assert objective.is_flow and objective.noise_ratio(sigma) == pytest.approx(level / (1 - level), rel=1e-9)
        assert objective.output_scale(sigma) == pytest.approx(level, rel=1e-12)
    assert [objective.noise_level(level) for level in (0.0, 1.0)] == pytest.approx([0.002, 80.0])


@pytest.mark.parametrize("kind", [ModelType.EPS, ModelType.V_PREDICTION, ModelType.V_PREDICTION_DDPM])
@pytest.mark.parametrize("settings", [{"timesteps": 1000}, {"timesteps": 1000, "zsnr": True}, {"timesteps": 50}])
def test_levels_of_models_with_timesteps_are_shares_of_them(kind, settings):
    sampling = sampling_of(kind, **settings)
    objective, count = SamplingObjective(sampling), settings["timesteps"]
    assert not objective.is_flow
    levels = [objective.noise_level((step + 0.5) / count) for step in range(count)]
    assert torch.equal(sampling.timestep(torch.tensor(levels)), torch.arange(count))
    torch.testing.assert_close(torch.tensor(levels), sampling.sigma(torch.arange(count)))
    assert objective.noise_level(0.0) == sampling.sigma_min and objective.noise_level(1.0) == sampling.sigma_max


@pytest.mark.parametrize("kind", [ModelType.V_PREDICTION_EDM, ModelType.EDM, ModelType.V_PREDICTION_CONTINUOUS])
def test_levels_of_models_without_timesteps_are_shares_of_log_sigma(kind):
    sampling = sampling_of(kind)
    objective = SamplingObjective(sampling)
    for level in (0.02, 0.31, 0.5, 0.77, 0.98):
        assert objective.noise_level(level) == pytest.approx(sampling.percent_to_sigma(1 - level), rel=1e-5)
    ends = [float(sampling.sigma_min), float(sampling.sigma_max)]
    assert [objective.noise_level(level) for level in (0.0, 1.0)] == pytest.approx(ends)
    assert not objective.is_flow


def test_noise_over_signal_and_the_weight_of_the_output():
    objective = SamplingObjective(sampling_of(ModelType.EPS))
    assert objective.noise_ratio(3.0) == pytest.approx(3.0)
    assert objective.output_scale(3.0) == pytest.approx(3.0)
    cogvideo = SamplingObjective(sampling_of(ModelType.V_PREDICTION_DDPM))
    assert cogvideo.noise_ratio(3.0) == pytest.approx(3.0)
    velocity = SamplingObjective(sampling_of(ModelType.V_PREDICTION))
    assert velocity.output_scale(3.0) == pytest.approx(3 / math.sqrt(10))
    scaled = SamplingObjective(sampling_of(ModelType.FLOW, shift=1.0, noise_scale=8.0))
    assert scaled.noise_ratio(0.5) == pytest.approx(8.0)
    latent, noise = pair()
    torch.testing.assert_close(scaled.target(latent, noise, 0.4), 8 * noise - latent)


def test_the_default_shift_is_that_of_the_class():
    shifts = {
        ModelType.FLOW: 3.0,
        ModelType.FLUX: math.exp(1.15),
        ModelType.EPS: 1.0,
        ModelType.V_PREDICTION: 1.0,
        ModelType.FLOW_COSMOS: 1.0,
    }
    for kind, shift in shifts.items():
        sampling = sampling_of(kind)
        assert default_shift(SimpleNamespace(model_sampling=sampling)) == pytest.approx(shift)
        if isinstance(sampling, core.CONST):  # the schedule of the sampler is the even one, shifted by it
            even = torch.arange(1, len(sampling.sigmas) + 1) / len(sampling.sigmas)
            torch.testing.assert_close(sampling.sigmas, shift * even / (1 + (shift - 1) * even))


def test_the_sampling_patched_onto_a_model_is_taken():
    base = model_of(sampling_of(ModelType.EPS))
    (patched,) = nodes.ModelSamplingDiscrete().patch(base, "v_prediction", zsnr=True)
    objective, (latent, noise) = objective_of(patched), pair()
    sigma = objective.noise_level(1.0)
    assert sigma > 1000 > objective_of(base).noise_level(1.0)
    torch.testing.assert_close(objective.target(latent, noise, sigma), -latent, rtol=0, atol=2e-3)
    flow = model_of(sampling_of(ModelType.FLOW))
    (shifted,) = nodes.ModelSamplingSD3().patch(flow, shift=7.0)
    assert objective_of(shifted).noise_level(0.25) == 0.25  # the shift is one of sampling levels


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_of_another_kind_is_refused(kind):
    with pytest.raises(ValueError, match="^model is a Module and samples by .*, which Train LoRA can't train"):
        objective_of(model_of(sampling_of(kind)))
