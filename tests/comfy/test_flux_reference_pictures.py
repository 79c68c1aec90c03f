"""FLUX.1 with reference pictures, as Kontext sees them, says what ComfyUI's own does with the same conditioning."""

import pytest
import tiny
import torch
from tessera.models.family import SampleFacts
from tessera.models.flux.family import Flux
from tiny.flux_core import core_velocity, our_velocity
from tiny.flux_data import flux_sample
from tiny.runs import train, training_data

METHODS = (None, "offset", "index", "uxo")
SIGMAS = [0.15, 0.5, 0.9]
# In each batch the samples agree in tokens, and their references in tokens one by one; nothing else is alike.
WIDE, TALL, LONG = [(8, 4), (4, 6), (6, 6)], [(4, 8), (6, 4), (2, 18)], [(16, 2), (2, 12), (18, 2)]
BATCHES = {
    "one": ([(4, 6), (3, 8), (12, 2)], [WIDE[:1], TALL[:1], LONG[:1]], None),
    "three": ([(4, 6), (3, 8), (12, 2)], [WIDE, TALL, LONG], None),
    "squares": ([(4, 6)], [[(6, 6), (6, 6), (4, 4)]], None),
    "odd sides": ([(4, 6), (3, 8)], [[(7, 3), (5, 4)], [(3, 8), (4, 5)]], None),
    "ragged edge": ([(4, 6), (5, 5), (3, 8)], [WIDE, TALL, LONG], 23),
}


def batch(name, method=None):
    grids, references, tokens = BATCHES[name]
    pairs = enumerate(zip(grids, references, strict=True))
    return [
        flux_sample(f"{name} {i}", *grid, 9, given, family="flux", method=method, tokens=tokens)
        for i, (grid, given) in pairs
    ]


def check(model, samples):
    assert len({s.graph_key for s in samples}) == 1
    sigmas = SIGMAS[: len(samples)]
    expected = torch.stack([core_velocity(model, s, sigma, 2.5) for s, sigma in zip(samples, sigmas, strict=True)])
    found = our_velocity(model, samples, sigmas, 2.5)
    assert found.shape == expected.shape
    assert float((found - expected).norm() / expected.norm()) < 3e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_shapes_equals_core_on_each_alone(tiny_flux, name, method):
    check(tiny_flux, batch(name, method))


def test_each_method_and_each_reference_makes_a_difference(tiny_flux):
    """So that equality above says something."""
    given = [(WIDE, method) for method in METHODS[1:]] + [(WIDE[:2], None), ([], None)]
    samples = [flux_sample("same", 4, 6, 9, pictures, family="flux", method=method) for pictures, method in given]
    found = [our_velocity(tiny_flux, [sample], SIGMAS[:1]) for sample in samples]
    for i, one in enumerate(found):
        for other in found[:i]:
            assert float((one - other).norm() / other.norm()) > 1e-3


def test_schnell_and_sixteen_bits_too(tiny_files, tmp_path):
    check(tiny.load_flux(tiny_files["schnell"]), batch("three"))
    for dtype, bound in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        model = tiny.load_flux(tiny.write_flux(tmp_path / f"{dtype}.safetensors", hidden=256, dtype=dtype))
        model.set_model_compute_dtype(dtype)
        model.model.manual_cast_dtype = dtype
        samples = batch("ragged edge")
        pairs = zip(samples, SIGMAS, strict=True)
        expected = torch.stack([core_velocity(model, s, sigma, 2.5) for s, sigma in pairs])
        found = our_velocity(model, samples, SIGMAS, 2.5)
        assert float((found - expected).norm() / expected.norm()) < bound


def test_a_method_that_core_cannot_run_on_flux1_is_named(tiny_flux, tmp_path):
    (sample,) = batch("one", "index_timestep_zero")[:1]
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        core_velocity(tiny_flux, sample, 0.5)
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
