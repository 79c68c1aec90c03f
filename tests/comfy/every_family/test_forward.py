"""Every family's training forward says what ComfyUI's own does: a batch of shapes, and each of its samples alone."""

from typing import Any

import pytest
import tiny
import torch
from family_cases import cases, every_case
from tessera.models.catalogue.registry import family_of
from tiny.models.family_case import computing_in, noisy, our_velocity, relative_error
from tiny.train.runs import training_data

SIGMAS = [0.15, 0.5, 0.8, 0.95]
GUIDANCE = 2.5


def batches_of(case: Any) -> dict[str, Any]:
    """Those that ComfyUI can be asked for."""
    return {n: b for n, b in case.batches().items() if case.ragged_in_core or not n.startswith("ragged")}


def in_every_batch(*axes: str) -> list[Any]:
    return [
        pytest.param(case, name, id=f"{case.name}-{name}")
        for case in cases("forward", *axes)
        for name in batches_of(case)
    ]


def expected_of(case: Any, model: Any, samples: list[Any]) -> torch.Tensor:
    pairs = zip(samples, SIGMAS, strict=False)
    return torch.stack([case.core_velocity(model, sample, sigma, GUIDANCE) for sample, sigma in pairs])


@pytest.mark.parametrize(("case", "batch"), in_every_batch())
def test_a_batch_of_shapes_equals_core_on_each_alone(case_file, case, batch):
    model, samples = case.load(case_file(case)), case.batches()[batch]()
    assert len({sample.graph_key for sample in samples}) == 1
    expected = expected_of(case, model, samples)
    actual = our_velocity(model, samples, SIGMAS[: len(samples)], GUIDANCE)
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < case.forward_bounds["fp32"]
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("case", "batch"), [p for p in in_every_batch() if p.values[1] in ("shapes", "ragged")])
def test_forward_of_the_trainer_equals_core_too(case_file, tmp_path, case, batch):
    model, samples = case.load(case_file(case)), case.batches()[batch]()
    expected = expected_of(case, model, samples)
    trainer = tiny.make_trainer(model, training_data(*samples), tmp_path)
    sigmas = torch.tensor(SIGMAS[: len(samples)])
    with torch.no_grad():
        inputs = trainer.context.family.forward.inputs(
            trainer.context.patcher, [noisy(s) for s in samples], sigmas, GUIDANCE
        )
        actual = trainer.placed.velocity(inputs, (0, 0))
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)
    trainer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_case("forward", "16 bit")
def test_sixteen_bit_models_of_two_heads_equal_core_within_their_rounding(case_file, case, dtype):
    model = computing_in(case.load(case_file(case, dtype=dtype, **case.wide)), dtype)
    bound = case.forward_bounds["bf16" if dtype == torch.bfloat16 else "fp16"]
    for name in case.main_batches:
        samples = case.batches()[name]()
        actual = our_velocity(model, samples, SIGMAS[: len(samples)], GUIDANCE)
        assert actual.dtype == dtype
        assert relative_error(actual, expected_of(case, model, samples)) < bound, name


@every_case("forward", "fp8")
def test_a_file_kept_in_fp8_equals_core(case_file, case):
    model = case.load(case_file(case, dtype=torch.float8_e4m3fn), torch.float8_e4m3fn)
    assert torch.float8_e4m3fn in {p.dtype for p in model.model.diffusion_model.parameters()}
    samples = case.batches()["shapes"]()
    actual = our_velocity(model, samples, SIGMAS[: len(samples)], GUIDANCE)
    assert relative_error(actual, expected_of(case, model, samples)) < case.forward_bounds["fp32"]


@every_case("forward")
def test_the_family_of_a_model_is_found(case_file, case):
    model = case.load(case_file(case))
    assert family_of(model).name == case.family and family_of(model).variant(model.model) == case.variant
