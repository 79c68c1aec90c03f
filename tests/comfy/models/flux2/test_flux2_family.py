"""FLUX.2's family: what it says of a model and of samples, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from family_cases import CASES
from tessera.models.catalogue.registry import family_of
from tessera.models.family import SampleFacts
from tessera.models.flux.family import Flux2
from tiny.models.family_case import our_velocity
from tiny.models.flux import flux_sample
from tiny.train.runs import train, training_data

METHODS = ("offset", "index", "index_timestep_zero", "uxo")
SIGMAS = [0.15, 0.5, 0.9]


def captions(*lengths):
    """Samples with captions of these lengths."""
    return [SampleFacts("a.png", 1, (), 0, frozenset(), length) for length in lengths]


def loaded(case_file, variant):
    case = CASES[f"flux2-{variant}"]
    return case.load(case_file(case))


def test_guidance_and_each_method_make_a_difference(case_file):
    """So that equality above says something."""
    dev, klein = (loaded(case_file, variant) for variant in ("dev", "klein"))
    batches = CASES["flux2-dev"].batches()
    samples = batches["references by default"]()
    velocities = [our_velocity(dev, batches[f"references {method}"](), SIGMAS, 1.0) for method in METHODS]
    velocities.append(our_velocity(dev, samples, SIGMAS, 4.0))
    for i, velocity in enumerate(velocities):
        for other in velocities[:i]:
            assert float((velocity - other).norm() / other.norm()) > 1e-3
    assert torch.equal(our_velocity(klein, samples, SIGMAS, 1.0), our_velocity(klein, samples, SIGMAS, 4.0))


def test_captions_are_padded_left_to_512_and_longer_ones_to_a_step_of_the_ladder(case_file):
    model = loaded(case_file, "dev")
    family = family_of(model)
    assert isinstance(family, Flux2)
    assert [family.conditioning.text_length(model.model, length) for length in (3, 512, 700)] == [512, 512, 768]
    assert family.notes(model.model, captions(512, 40)) == []
    (note,) = family.notes(model.model, captions(512, 513, 700))
    assert "2 captions have more than 512 tokens" in note


def test_metadata_of_a_file_name_its_model():
    def model(width, guidance):
        params = SimpleNamespace(hidden_size=width, guidance_embed=guidance)
        return SimpleNamespace(diffusion_model=SimpleNamespace(params=params))

    family = Flux2()
    origins = [family.origin(model(*size)) for size in ((6144, True), (4096, False), (3072, False), (128, False))]
    assert [o.architecture for o in origins] == ["Flux.2-dev", "Flux.2-klein-9b", "Flux.2-klein-4b", "Flux.2-klein"]
    assert [o.kohya_version for o in origins[:3]] == ["flux_2_dev", "flux_2_klein_9b", "flux_2_klein_4b"]


def test_the_shift_is_the_line_that_flux2s_own_sampler_comes_to():
    """compute_empirical_mu of black-forest-labs/flux2 as core has it, at the 200 steps through which it is drawn."""
    from math import log

    from comfy_extras.nodes_flux import compute_empirical_mu

    for tokens in (1024, 4096, 8100):
        assert log(Flux2().sampling.shift(None, tokens)) == pytest.approx(compute_empirical_mu(tokens, 200), abs=1e-4)


def test_clips_and_data_of_flux1_are_refused(case_file, tmp_path):
    model = loaded(case_file, "dev")
    with pytest.raises(ValueError, match="a.mp4 is a clip of 5 frames; FLUX.2 trains on pictures"):
        Flux2().check(model.model, SampleFacts("a.mp4", 5, (), 0, frozenset()))
    with pytest.raises(ValueError, match="data has latents of 16 channels, but the model takes 128"):
        train(model, training_data(flux_sample("flux1", 4, 4, family="flux")), tmp_path)


def test_models_of_the_class_that_run_another_forward_are_not_taken(case_file):
    model = loaded(case_file, "klein")
    model.model.diffusion_model.params.txt_norm = True
    assert family_of(model).name == "native-flux2" and not Flux2().matches(model.model)
