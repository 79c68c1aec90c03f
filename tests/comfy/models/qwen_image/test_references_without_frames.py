"""Reference latents of Qwen-Image may come without an axis of frames, and several stand side by side."""

import torch
from family_cases import CASES
from tessera.models.qwen_image.patchify import patchify_image, patchify_references
from tiny.models.family_case import our_velocity
from tiny.models.qwen_image import qwen_sample


def test_references_without_a_frame_axis_are_taken_as_pictures(case_file):
    sample = qwen_sample("flat", 4, 4, 9, references=[(4, 6)])
    case = CASES["qwen-image"]
    model = case.load(case_file(case))
    expected = our_velocity(model, [sample], [0.5])
    read = sample.load()
    read.conditioning["reference_latents"] = [x[:, :, 0] for x in read.conditioning["reference_latents"]]
    assert torch.equal(our_velocity(model, [sample], [0.5]), expected)


def test_a_third_reference_stands_beside_both_before_it_where_that_is_the_shorter_way():
    pictures = [torch.randn(1, 16, 1, *size) for size in ((4, 6), (6, 4), (4, 4))]
    actual = patchify_references(pictures, "offset")
    places = [(0, 0), (4, 0), (0, 6)]
    expected = [patchify_image(picture[0], 1, *place) for picture, place in zip(pictures, places, strict=True)]
    assert torch.equal(actual.positions, torch.cat([reference.positions for reference in expected]))
