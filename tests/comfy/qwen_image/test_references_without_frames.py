"""Reference latents of Qwen-Image may come without an axis of frames."""

import torch
from family_cases import CASES
from tiny.family_case import our_velocity
from tiny.qwen_image import qwen_sample


def test_references_without_a_frame_axis_are_taken_as_pictures(case_file):
    sample = qwen_sample("flat", 4, 4, 9, references=[(4, 6)])
    case = CASES["qwen-image"]
    model = case.load(case_file(case))
    expected = our_velocity(model, [sample], [0.5])
    read = sample.load()
    read.conditioning["reference_latents"] = [x[:, :, 0] for x in read.conditioning["reference_latents"]]
    assert torch.equal(our_velocity(model, [sample], [0.5]), expected)
