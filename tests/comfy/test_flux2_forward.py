"""FLUX.2's training forward says what ComfyUI's own does: dev and klein, captions and references of any shape."""

from types import SimpleNamespace

import pytest
import tiny
import torch
from tessera.models.family import SampleFacts
from tessera.models.flux.family import Flux2
from tessera.models.registry import family_of
from tiny.flux_core import core_velocity, our_velocity
from tiny.flux_data import flux_sample
from tiny.runs import train, training_data

METHODS = (None, "offset", "index", "index_timestep_zero", "uxo")
SIGMAS = [0.15, 0.5, 0.9]


def captions(*lengths):
    """Samples with captions of these lengths."""
    return [SampleFacts("a.png", 1, (), 0, frozenset(), length) for length in lengths]


@pytest.fixture(scope="module")
def files(tiny_files, tmp_path_factory):
    klein = tmp_path_factory.mktemp("flux2") / "klein.safetensors"
    return {"dev": tiny_files["flux2"], "klein": tiny.write_flux2(klein, guidance=False, hidden=256)}


# Samples that agree in tokens, references one by one too. Captions of 5 to 512 tokens are all padded to 512.
BATCHES = {
    "none": lambda method: [
        flux_sample("wide", 4, 6, 5, method=method),
        flux_sample("tall", 8, 3, 40, method=method),
        flux_sample("long", 2, 12, 512, method=method),
    ],
    "references": lambda method: [
        flux_sample("wide", 4, 6, 5, [(4, 6), (3, 3)], method=method),
        flux_sample("tall", 8, 3, 40, [(6, 4), (1, 9)], method=method),
        flux_sample("long", 2, 12, 90, [(8, 3), (9, 1)], method=method),
    ],
    "ragged edge": lambda method: [
        flux_sample("wide", 4, 6, 5, [(4, 6), (3, 3)], method=method, tokens=23),
        flux_sample("tall", 8, 3, 40, [(6, 4), (1, 9)], method=method, tokens=23),
        flux_sample("five", 5, 5, 90, [(8, 3), (9, 1)], method=method, tokens=23),
    ],
}


def relative_error(model, samples, guidance):
    pairs = zip(samples, SIGMAS, strict=True)
    expected = torch.stack([core_velocity(model, s, sigma, guidance) for s, sigma in pairs])
    found = our_velocity(model, samples, SIGMAS, guidance)
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "method"), [("none", None), *((n, m) for n in ("references", "ragged edge") for m in METHODS)]
)
@pytest.mark.parametrize("kind", ["dev", "klein"])
def test_a_batch_of_shapes_equals_core_on_each_alone(files, kind, name, method):
    assert relative_error(tiny.load_flux2(files[kind]), BATCHES[name](method), 2.5) < 3e-6


def test_a_batch_may_mix_the_methods_of_its_samples(files):
    names = zip("abc", ("index_timestep_zero", None, "uxo"), strict=True)
    samples = [flux_sample(name, 4, 6, 9, [(6, 4)], method=method) for name, method in names]
    assert relative_error(tiny.load_flux2(files["dev"]), samples, 4.0) < 3e-6


def test_guidance_and_each_method_make_a_difference(files):
    """So that equality above says something."""
    dev, klein = (tiny.load_flux2(files[kind]) for kind in ("dev", "klein"))
    samples = BATCHES["references"](None)
    found = [our_velocity(dev, BATCHES["references"](method), SIGMAS, 1.0) for method in METHODS[1:]]
    found.append(our_velocity(dev, samples, SIGMAS, 4.0))
    for i, one in enumerate(found):
        for other in found[:i]:
            assert float((one - other).norm() / other.norm()) > 1e-3
    assert torch.equal(our_velocity(klein, samples, SIGMAS, 1.0), our_velocity(klein, samples, SIGMAS, 4.0))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=["bf16", "fp16"])
def test_sixteen_bit_models_equal_core_within_their_rounding(tmp_path, dtype, bound):
    model = tiny.load_flux2(tiny.write_flux2(tmp_path / "flux2.safetensors", hidden=256, dtype=dtype))
    model.set_model_compute_dtype(dtype)
    model.model.manual_cast_dtype = dtype
    for name, method in (("none", None), ("references", "index_timestep_zero")):
        assert relative_error(model, BATCHES[name](method), 2.5) < bound


def test_captions_are_padded_left_to_512_and_not_cut(files):
    model = tiny.load_flux2(files["dev"])
    family = family_of(model)
    assert isinstance(family, Flux2)
    assert [family.text_length(model.model, length) for length in (3, 512, 700)] == [512, 512, 700]
    samples = [flux_sample("long", 2, 2, 700)]
    assert relative_error(model, samples * 3, 1.0) < 3e-6
    assert family.notes(model.model, captions(512, 40)) == []
    (note,) = family.notes(model.model, captions(512, 513, 700))
    assert "2 captions have more than 512 tokens" in note


def test_what_a_file_says_of_its_model():
    def model(hidden, guidance):
        params = SimpleNamespace(hidden_size=hidden, guidance_embed=guidance)
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
        assert log(Flux2().shift(None, tokens)) == pytest.approx(compute_empirical_mu(tokens, 200), abs=1e-4)


def test_clips_and_data_of_flux1_are_refused(files, tmp_path):
    model = tiny.load_flux2(files["dev"])
    with pytest.raises(ValueError, match="a.mp4 is a clip of 5 frames; FLUX.2 trains on pictures"):
        Flux2().check(model.model, SampleFacts("a.mp4", 5, (), 0, frozenset()))
    with pytest.raises(ValueError, match="data has latents of 16 channels and the model takes 128"):
        train(model, training_data(flux_sample("flux1", 4, 4, family="flux")), tmp_path)


def test_models_of_the_class_that_run_another_forward_are_not_taken(files):
    model = tiny.load_flux2(files["klein"])
    model.model.diffusion_model.params.txt_norm = True
    with pytest.raises(ValueError, match="model is a Flux2, which Train LoRA cannot train"):
        family_of(model)
