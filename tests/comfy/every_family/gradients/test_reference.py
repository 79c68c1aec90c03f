"""What each family's formulas say is what ComfyUI says, so that they can stand as the reference for gradients."""

from typing import Any

import pytest
import torch
from family_cases import cases, every_case
from safetensors.torch import load_file
from tiny.models.family_case import FamilyCase, relative_error
from torch import Tensor

SIGMAS, GUIDANCE = (0.2, 0.6, 0.85), 3.5


def in_main_batches() -> list[Any]:
    params = []
    for case in cases("reference"):
        names = [*case.main_batches, *(["ragged"] if case.ragged_in_core else [])]
        params += [pytest.param(case, name, id=f"{case.name}-{name}") for name in dict.fromkeys(names)]
    return params


@pytest.mark.parametrize(("case", "batch"), in_main_batches())
def test_the_reference_equals_comfyuis_forward(case_file, case, batch):
    model, tensors = case.load(case_file(case)), load_file(case_file(case))
    for sample, sigma in zip(case.batches()[batch](), SIGMAS, strict=False):
        reference = case.core_velocity(model, sample, sigma, GUIDANCE)
        actual = case.reference_velocity(tensors, sample, sample.load().latent, sigma, GUIDANCE)
        assert relative_error(actual, reference) < 1e-5


@every_case("reference")
def test_heads_are_taken_apart_as_comfyui_does(case_file, case):
    file = case_file(case, **case.wide)
    sample = case.batches()["shapes"]()[0]
    reference = case.core_velocity(case.load(file), sample, 0.6, GUIDANCE)
    actual = case.reference_velocity(load_file(file), sample, sample.load().latent, 0.6, GUIDANCE)
    assert relative_error(actual, reference) < 1e-5


def velocity(case: FamilyCase, tensors: Any, dtype: torch.dtype = torch.float64, lora: Any = None) -> Tensor:
    """Of the last main batch's first sample."""
    sample = case.batches()[case.main_batches[-1]]()[0]
    return case.reference_velocity(tensors, sample, sample.load().latent.to(dtype), 0.6, GUIDANCE, lora)


@every_case("reference")
def test_float64_goes_beyond_float32(case_file, case):
    """In float32 most of the error is that of the timestep's sines, whose arguments run up to 1000."""
    tensors = load_file(case_file(case))
    exact = velocity(case, tensors)
    assert exact.dtype == torch.float64
    assert 1e-8 < relative_error(velocity(case, tensors, torch.float32), exact) < 1e-4


def some_linears(case: FamilyCase, tensors: dict[str, Tensor]) -> list[str]:
    """Three of the blocks' Linears, from the first to the last."""
    matrices = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.ndim == 2]
    inside = [name for name in matrices if ".0." in name and not name.endswith(case.unused or "none")]
    return [inside[0], inside[len(inside) // 2], inside[-1]]


@every_case("reference")
def test_a_lora_equals_the_weights_it_stands_for(case_file, case):
    tensors = load_file(case_file(case))
    g = torch.Generator().manual_seed(3)
    lora, merged = {}, {name: t.double() for name, t in tensors.items()}
    for name in some_linears(case, tensors):
        out, width = tensors[f"{name}.weight"].shape
        down = torch.randn(3, width, generator=g, dtype=torch.float64) / width**0.5
        up = torch.randn(out, 3, generator=g, dtype=torch.float64)
        lora[name] = (down, up, 0.5)
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + 0.5 * up @ down
    beside = velocity(case, tensors, lora=lora)
    assert relative_error(beside, velocity(case, merged)) < 1e-12
    assert relative_error(beside, velocity(case, tensors)) > 1e-2


@every_case("reference")
def test_gradients_of_the_reference_are_those_of_finite_differences(case_file, case):
    tensors = load_file(case_file(case))
    g = torch.Generator().manual_seed(4)
    name = some_linears(case, tensors)[0]
    out, width = tensors[f"{name}.weight"].shape
    down = (torch.randn(2, width, generator=g, dtype=torch.float64) / width**0.5).requires_grad_()
    up = torch.randn(out, 2, generator=g, dtype=torch.float64).requires_grad_()

    def loss(d: Tensor, u: Tensor) -> Tensor:
        return velocity(case, tensors, lora={name: (d, u, 1.0)}).square().mean()

    loss(down, up).backward()
    directions = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in (down, up)]
    step = 1e-6
    with torch.no_grad():
        plus, minus = (loss(down + s * directions[0], up + s * directions[1]) for s in (step, -step))
    slope = sum((t.grad * d).sum() for t, d in zip((down, up), directions, strict=True))
    assert float((plus - minus) / (2 * step)) == pytest.approx(float(slope), rel=1e-6)
