"""A Wan file of fp8: what is no Linear is cast when it is loaded."""

import torch
from family_cases import CASES
from tiny.memory import swapping
from tiny.train.runs import training_data


def test_the_patch_embedding_is_fp32(case_file, tmp_path):
    case = CASES["wan-2.2-5b"]
    model = case.load(case_file(case, dtype=torch.float8_e4m3fn, **case.deep), torch.float8_e4m3fn)
    data = training_data(*case.batches()["shapes"]())
    swapped = swapping.trained(model, data, tmp_path, batch=2, steps=1, blocks_to_swap=case.deep_blocks)
    assert swapped.placed.weights.transformer.patch_embedding.weight.dtype == torch.float32
