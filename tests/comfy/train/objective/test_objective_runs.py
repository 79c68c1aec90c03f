"""The objective within a run: what the model is shown and what it is held to, by its options; and after a resume."""

import pytest
import tiny
import torch
from comfy.model_management import InterruptProcessingException
from comfy_extras.nodes_model_advanced import ModelSamplingDiscrete
from tessera.common.rng import generator
from tessera.lora.options import NetworkOptions
from tessera.models.catalogue.registry import family_of
from tessera.models.native.objective import objective_of
from tessera.train.objective import batch as batches
from tessera.train.objective.batch import make_batch, strata_sizes
from tessera.train.objective.noise import sample_noise
from tessera.train.objective.options import ObjectiveOptions
from tessera.train.objective.timestep_sampling import Strata
from tessera.train.optim.options import OptimizerOptions
from tiny.train.runs import Watcher, cancel_at, mixed_data, run_settings, sample, train, training_data

EVERYTHING = {
    "timestep_sampling": "beta",
    "stratified": "epoch",
    "weighting": "cosmap",
    "loss": "pseudo_huber",
    "huber_schedule": "exponential",
    "ip_noise_gamma": 0.2,
    "ip_noise_gamma_random_strength": True,
    "noise_offset": 0.1,
}
HARD = {"batch_size": 2, "gradient_accumulation": 2, "objective": EVERYTHING}


@pytest.fixture
def draws(monkeypatch):
    """Every sigma that is drawn, with its stratum, by the step and the sample's number in it.

    A cancelled run has made the next step's first batch already, so that a resumed one draws it again: alike.
    """
    records = {}
    key = None
    choose, draw = batches.sample_stratum, batches.sample_sigma

    def record_stratum(*args):
        nonlocal key
        key = args[2:4]
        return choose(*args)

    def recorded(*args):
        sigma = draw(*args)
        assert records.setdefault(key, (sigma, args[-1])) == (sigma, args[-1])
        return sigma

    monkeypatch.setattr(batches, "sample_stratum", record_stratum)
    monkeypatch.setattr(batches, "sample_sigma", recorded)
    return records


@pytest.mark.parametrize("stratified", ["epoch", "batch"])
def test_a_resumed_run_draws_and_learns_the_same(stratified, tiny_flux, tmp_path, draws):
    options = HARD | {"objective": EVERYTHING | {"stratified": stratified}}
    whole = train(tiny_flux, mixed_data(), tmp_path / "whole", **options)
    uninterrupted = dict(draws)
    draws.clear()
    with pytest.raises(InterruptProcessingException):
        train(tiny_flux, mixed_data(), tmp_path / "cancelled", cancel_at(3), **options)
    resumed = train(tiny_flux, mixed_data(), tmp_path / "cancelled", **options)
    assert draws == uninterrupted and len(draws) == 6 * 4
    assert whole.loss == resumed.loss
    assert all(torch.equal(whole.lora[name], resumed.lora[name]) for name in whole.lora)
    # 4 samples in a step, 5 in an epoch: each group holds each of its parts once
    size = 4 if stratified == "batch" else 5
    strata = [stratum for _, stratum in draws.values()]
    assert all(sorted(strata[i : i + size]) == [(k, size) for k in range(size)] for i in range(0, 24 - size + 1, size))


def test_the_draws_of_a_step_and_an_epoch_are_counted_with_repeats():
    data = training_data(sample("a", 4, 4, repeats=3), sample("b", 4, 4, repeats=2))
    settings = run_settings(batch_size=3, gradient_accumulation=4)
    assert strata_sizes(settings.samples_per_step, data.samples) == Strata(12, 5)


def test_perturbed_input_and_offset_noise_are_what_the_formulas_say(tiny_flux, tmp_path):
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path)
    (item,) = trainer.context.data.samples
    samples = [(item, item.load())]
    x0 = (samples[0][1].latent.double() - 0.1159) * 0.3611
    objective = ObjectiveOptions(ip_noise_gamma=0.3, noise_offset=0.2)
    step_batch = make_batch(
        trainer.context.patcher, trainer.context.family, samples, objective, trainer.device, 3, (5, 1)
    )
    noise = sample_noise(x0.shape, generator(3, "noise", 5, 1, 0), 0.2).double()
    xi = torch.randn(x0.shape, generator=generator(3, "ip_noise", 5, 1, 0)).double()
    sigma = float(step_batch.sigma)

    def tokens(latent):
        return latent.reshape(16, 4, 2, 4, 2).permute(1, 3, 0, 2, 4).reshape(1, 16, 64).float()

    torch.testing.assert_close(step_batch.target, tokens(noise - x0), rtol=1e-5, atol=1e-5)
    noisy = (1 - sigma) * x0 + sigma * (noise + 0.3 * xi)
    torch.testing.assert_close(step_batch.inputs.tokens, tokens(noisy), rtol=1e-5, atol=1e-5)
    trainer.close()


def test_a_batch_of_a_noise_schedule_holds_its_noise_its_timestep_and_its_weight(tiny_flux, tmp_path, monkeypatch):
    """FLUX with the sampling of Stable Diffusion patched on: x0 + sigma·noise, to be answered with the noise."""
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path)
    (patched,) = ModelSamplingDiscrete().patch(trainer.context.patcher, "eps", zsnr=False)
    monkeypatch.setattr(type(trainer.context.family.sampling), "objective", lambda self, patcher: objective_of(patcher))
    (item,) = trainer.context.data.samples
    samples = [(item, item.load())]
    x0 = (samples[0][1].latent.double() - 0.1159) * 0.3611
    objective = ObjectiveOptions(ip_noise_gamma=0.3, weighting="min_snr")
    step_batch = make_batch(patched, trainer.context.family, samples, objective, trainer.device, 3, (0, 0))
    noise = sample_noise(x0.shape, generator(3, "noise", 0, 0, 0), 0.0).double()
    xi = torch.randn(x0.shape, generator=generator(3, "ip_noise", 0, 0, 0)).double()
    step = int(float(step_batch.sigma) * 1000)
    sigma = float(patched.get_model_object("model_sampling").sigmas[step])

    def tokens(latent):
        return latent.reshape(16, 4, 2, 4, 2).permute(1, 3, 0, 2, 4).reshape(1, 16, 64).float()

    assert 0 < step < 999 and step_batch.inputs.timestep.tolist() == [step]
    torch.testing.assert_close(step_batch.target, tokens(noise), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(step_batch.inputs.tokens, tokens(x0 + sigma * (noise + 0.3 * xi)), rtol=1e-5, atol=1e-5)
    assert step_batch.signal.noise_ratio.tolist() == step_batch.signal.output_scale.tolist() == pytest.approx([sigma])

    monkeypatch.setattr(trainer.placed, "velocity", lambda inputs, rng_key: step_batch.target + 1)
    monkeypatch.setattr(trainer.train_step.losses, "objective", objective)
    assert float(trainer.train_step.losses.batch_loss(step_batch, (0, 0))) == pytest.approx(
        min(1.0, 5 * sigma**2), rel=1e-5
    )
    trainer.close()


def test_a_run_on_a_noise_schedule_refuses_what_only_flow_matching_has(tiny_flux, tmp_path, monkeypatch):
    (patched,) = ModelSamplingDiscrete().patch(tiny_flux, "v_prediction", zsnr=True)
    monkeypatch.setattr(type(family_of(tiny_flux).sampling), "objective", lambda self, patcher: objective_of(patcher))
    with pytest.raises(ValueError, match="weighting is 'cosmap', which is for flow matching models"):
        train(patched, mixed_data(), tmp_path, Watcher(), steps=1, objective={"weighting": "cosmap"})


def test_the_loss_of_a_step_is_the_weighted_loss_of_its_samples(tiny_flux, tmp_path):
    """The velocity as it comes, the loss written out for each sample."""
    objective = ObjectiveOptions(loss="l1", weighting="min_snr")
    data = tiny.make_data([(4, 4), (2, 8)], [16, 16])
    trainer = tiny.make_trainer(tiny_flux, data, tmp_path, batch_size=2, objective=objective)
    tiny.fill_up_matrices(trainer)
    samples = [(s, s.load()) for s in data.samples]
    step_batch = make_batch(
        trainer.context.patcher, trainer.context.family, samples, objective, trainer.device, 3, (0, 0)
    )
    with torch.no_grad():
        error = (trainer.placed.velocity(step_batch.inputs, (0, 0)) - step_batch.target).double().abs().mean(dim=(1, 2))
    weights = [min((1 - s) ** 2, 5 * s**2) for s in step_batch.sigma.double().tolist()]
    expected = sum(float(e) * w for e, w in zip(error, weights, strict=True)) / 2
    assert trainer.train_step.forward_backward([tiny.micro_batch(0, 1)]) == pytest.approx(expected, rel=1e-5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trainer.network.parameters())
    trainer.close()


def test_weights_of_tokens_and_of_noise_levels_go_together(tiny_flux, tmp_path):
    objective = ObjectiveOptions(loss="huber", huber_c=0.5, weighting="sigma_sqrt")
    trainer = tiny.make_trainer(tiny_flux, tiny.make_data([(4, 4)], [16]), tmp_path, objective=objective)
    samples = [(s, s.load()) for s in trainer.context.data.samples]
    step_batch = make_batch(
        trainer.context.patcher, trainer.context.family, samples, objective, trainer.device, 3, (0, 0)
    )
    weights = torch.rand(1, 16, generator=generator(1))
    masked = batches.Batch(step_batch.inputs, step_batch.target, step_batch.sigma, weights)
    with torch.no_grad():
        e = (trainer.placed.velocity(step_batch.inputs, (0, 0)) - step_batch.target).double().abs()
        token_losses = torch.where(e <= 0.5, e**2, e - 0.25).mean(dim=2)
        expected = float((token_losses * weights).sum() / weights.sum()) / float(step_batch.sigma) ** 2
        assert float(trainer.train_step.losses.batch_loss(masked, (0, 0))) == pytest.approx(expected, rel=1e-5)
    trainer.close()


def test_a_range_is_checked_at_the_resolution_of_every_sample(tiny_flux, tmp_path):
    """At 16 tokens FLUX's curve leaves enough below 0.045; at 2304 it moves nearly all draws out of there."""
    data = training_data(sample("small", 4, 4), sample("large", 48, 48))
    objective = {"timestep_sampling": "resolution_shifted", "max_sigma": 0.045}
    train(tiny_flux, training_data(data.samples[0]), tmp_path / "small", steps=1, objective=objective)
    with pytest.raises(ValueError, match="draws lies between min_sigma 0 and max_sigma 0.045"):
        train(tiny_flux, data, tmp_path / "both", steps=1, objective=objective)


@pytest.mark.parametrize("loss", ["mse", "l1", "huber", "pseudo_huber"])
def test_every_loss_learns(loss, tiny_flux, tmp_path):
    objective = ObjectiveOptions(loss=loss, weighting="cosmap", stratified="epoch")
    data = tiny.make_data([(4, 4)], [16])
    trainer = tiny.make_trainer(
        tiny_flux,
        data,
        tmp_path,
        objective=objective,
        network=NetworkOptions(rank=8, alpha=8.0),
        optimizer=OptimizerOptions(learning_rate=1e-2),
        steps=30,
    )
    samples = [(s, s.load()) for s in data.samples]
    fixed = [
        make_batch(trainer.context.patcher, trainer.context.family, samples, objective, trainer.device, 99, (i, 0))
        for i in range(8)
    ]

    def error():
        with torch.no_grad():
            return sum(float(trainer.train_step.losses.batch_loss(step_batch, (0, 0))) for step_batch in fixed)

    initial = error()
    trainer.run()
    assert error() < 0.95 * initial
    trainer.close()
