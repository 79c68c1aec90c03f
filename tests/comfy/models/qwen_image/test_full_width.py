"""One layer of Qwen-Image of its real sizes, with references and timestep zero, in the dtypes that core runs it in."""

import pytest
import tiny
import torch
from family_cases import CASES
from tiny.models.family_case import computing_in, our_velocity, relative_error
from tiny.models.qwen_image import qwen_sample

SIZES = {"tiny": {}, "full": {"heads": 24, "head_size": 128, "text_dim": 3584}}
SIGMAS = [0.2, 0.55]


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_the_model_says_the_same_at_full_width_and_in_bf16(case_file, width, dtype, bound):
    case = CASES["qwen-image-edit-2511"]
    path = case_file(case, layers=1, dtype=torch.bfloat16, **SIZES[width])
    model = computing_in(case.load(path, dtype), dtype)
    text = SIZES[width].get("text_dim", tiny.QWEN_TEXT_WIDTH)
    samples = [
        qwen_sample("wide", 8, 12, 20, references=[(10, 8), (12, 14)], text_width=text),
        qwen_sample("tall", 16, 6, 50, references=[(8, 10), (14, 12)], text_width=text),
    ]
    expected = [case.core_velocity(model, s, sigma) for s, sigma in zip(samples, SIGMAS, strict=True)]
    actual = our_velocity(model, samples, SIGMAS)
    assert actual.dtype == dtype and model.model.get_dtype_inference() == dtype
    assert relative_error(actual, torch.stack(expected)) < bound
