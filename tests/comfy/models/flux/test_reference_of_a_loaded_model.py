"""The formulas read FLUX's tensors by the names of a file and by those of a loaded model."""

import torch
from family_cases import CASES
from safetensors.torch import load_file


def test_the_tensors_of_a_loaded_model_serve_as_well_as_those_of_the_file(case_file):
    case = CASES["flux-dev"]
    file, sample = case_file(case), case.batches()["shapes"]()[0]
    loaded = case.load(file).model.diffusion_model.state_dict()
    velocities = (case.reference_velocity(t, sample, sample.load().latent, 0.5, 2.0) for t in (loaded, load_file(file)))
    assert torch.equal(*velocities)
