"""Start pictures of Wan's image to video models."""

import tiny
import torch
from family_cases import CASES
from tiny.models.family_case import our_velocity, relative_error


def test_a_model_of_first_and_last_picture_equals_core(case_file):
    case = CASES["wan-2.1-i2v"]
    model = case.load(case_file(case, pictures=2))
    for pictures in (1, 2):
        samples = [
            tiny.wan_sample(f"sample {i}", grid, "2.1-i2v", text=4 + 2 * i, pictures=pictures)
            for i, grid in enumerate([(1, 4, 6), (2, 3, 4)])
        ]
        references = [case.core_velocity(model, s, sigma) for s, sigma in zip(samples, (0.15, 0.5), strict=True)]
        assert relative_error(our_velocity(model, samples, [0.15, 0.5]), torch.stack(references)) < 2e-6


def test_core_never_gets_the_samples_own_start_picture_to_write_on(case_file, monkeypatch):
    """Core writes the scaled latent over what its resize gave it: a copy only as long as that resize makes one."""
    import comfy.model_base

    monkeypatch.setattr(comfy.model_base.utils, "common_upscale", lambda samples, *size: samples)
    case = CASES["wan-2.1-i2v"]
    model, sample = case.load(case_file(case)), tiny.wan_sample("one", (2, 3, 4), "2.1-i2v")
    read = sample.load().conditioning
    copies = {name: read[name].clone() for name in ("concat_latent_image", "concat_mask")}
    our_velocity(model, [sample], [0.5])
    assert all(torch.equal(read[name], tensor) for name, tensor in copies.items())
