"""The tiny models by class run in ComfyUI's own code: what the tests of the native path compare with is alive."""

import pytest
import torch
from tiny.native import NAMED, ROWS, TRAINED, build, core_forward, sample_of


def _forward(row, name="a sample", x=None):
    patcher = build(row)
    sigma = float(patcher.model.model_sampling.percent_to_sigma(0.5))
    latent = patcher.model.process_latent_in(sample_of(row).load().latent[None])[0]
    return patcher, latent, core_forward(patcher, row, sample_of(row, name), sigma, latent if x is None else x)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_tiny_model_is_made_as_loaders_make_it_and_hears_its_inputs(row):
    patcher, latent, out = _forward(row)
    assert all(weight.is_inference() for weight in patcher.model.diffusion_model.parameters())
    assert sum(weight.numel() for weight in patcher.model.diffusion_model.parameters()) < 5_000_000
    assert out.shape == latent.shape
    assert out.isfinite().all()
    assert torch.equal(out, _forward(row)[2]), "it is another model each time"
    change = (out - latent).norm()
    other_text = _forward(row, "another sample")[2]
    assert (other_text - out).norm() > 2e-3 * change
    shifted = latent + 0.1 * latent.roll(1, -1)
    assert ((_forward(row, x=shifted)[2] - shifted) - (out - latent)).norm() > 1e-3 * change


def test_a_tiny_model_is_of_the_class_that_its_row_names():
    import comfy.supported_models

    for row in ROWS:
        model = build(row).model
        assert type(model.model_config) is getattr(comfy.supported_models, row.model), row.name


def test_the_rows_cover_thirty_distinct_forwards():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.tier for row in NAMED} == {"A"}
    # A second row of a class that people train has the tier of the first.
    named_models = {row.model for row in NAMED}
    assert all(row.tier == ("A" if row.model in named_models else "B") for row in ROWS[len(NAMED) :])
    assert all((row.tier == "–") == ("training" in row.left_out) for row in ROWS)
    forwards = {type(build(row).model.diffusion_model) for row in TRAINED}
    assert len(forwards) >= 30, len(forwards)
