"""FLUX.1 with reference pictures, as Kontext sees them."""

import pytest
from family_cases import CASES
from tessera.models.family import SampleFacts
from tessera.models.flux.family import Flux
from tiny.models.family_case import our_velocity
from tiny.models.flux import flux_sample
from tiny.train.runs import train, training_data

METHODS = (None, "offset", "index", "uxo")
WIDE = [(8, 4), (4, 6), (6, 6)]


def test_each_method_and_each_reference_makes_a_difference(tiny_flux):
    """So that equality above says something."""
    combinations = [(WIDE, method) for method in METHODS[1:]] + [(WIDE[:2], None), ([], None)]
    samples = [
        flux_sample("same", 4, 6, 9, pictures, family="flux", method=method) for pictures, method in combinations
    ]
    velocities = [our_velocity(tiny_flux, [sample], [0.15]) for sample in samples]
    for i, velocity in enumerate(velocities):
        for other in velocities[:i]:
            assert float((velocity - other).norm() / other.norm()) > 1e-3


def test_a_method_that_core_cannot_run_on_flux1_is_named(tiny_flux, tmp_path):
    sample = flux_sample("one", 4, 6, 9, WIDE[:1], family="flux", method="index_timestep_zero")
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        CASES["flux-dev"].core_velocity(tiny_flux, sample, 0.5)
    with pytest.raises(ValueError, match="index_timestep_zero, which ComfyUI cannot run on FLUX.1; set it to offset"):
        train(tiny_flux, training_data(sample), tmp_path)


def test_models_that_see_their_control_in_channels_take_no_references(tiny_flux):
    params = tiny_flux.model.diffusion_model.params
    facts = SampleFacts("cat.png", 1, (16,), 0, frozenset({"reference_latents"}))
    Flux().check(tiny_flux.model, facts)
    params.in_channels = 96
    alone = SampleFacts("cat.png", 1, (), 0, frozenset())
    with pytest.raises(ValueError, match="cat.png has no control picture, without which this model"):
        Flux().check(tiny_flux.model, alone)
    with pytest.raises(ValueError, match=r"cat.png has reference pictures, which this model \(Fill, Canny or Depth\)"):
        Flux().check(tiny_flux.model, facts)
