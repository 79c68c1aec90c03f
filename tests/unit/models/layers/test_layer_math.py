"""The rotation of queries and keys, and attention over heads as a Linear gives them: values, and what is written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tessera.models.layers.attention import attention_function
from tessera.models.layers.math import rope, rotate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

B = 2
T = 5
H = 3
D = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


FORMS = {"eager": lambda function: function, "compiled": compiled}


class Launches(TorchDispatchMode):
    """The ops that run, but for views of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.seen.append(str(func).removeprefix("aten.").partition(".")[0])
        return func(*args, **(kwargs or {}))


def table() -> Tensor:
    positions = torch.rand(B, T, 2, generator=torch.Generator().manual_seed(2)) * 30
    return rope(positions, (6, 10), 100)


def make_inputs(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """x as a part of a wider Linear's output, and the gradient that reaches it."""
    generator = torch.Generator().manual_seed(0)
    wide, grad = (torch.randn(B, T, n * H * D, generator=generator).to(device, dtype) for n in (3, 1))
    x = wide[..., H * D : 2 * H * D].detach().requires_grad_()
    return x, grad.unflatten(-1, (H, D))


def with_gradient(rotation: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, pe: Tensor) -> list[Tensor]:
    x, grad = make_inputs(dtype)
    out = rotation(x.unflatten(-1, (H, D)), pe)
    return [out.detach(), *torch.autograd.grad(out, x, grad)]


def by_sums(x: Tensor, pe: Tensor) -> Tensor:
    """The formula of arXiv 2104.09864, an op for each sign in it, with one rounding at the end."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = pe.unbind(-1)
    return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rotation_rounds_as_its_formula_does(form, dtype):
    actual, expected = (with_gradient(f, dtype, table()) for f in (FORMS[form](rotate), by_sums))
    assert actual[0].dtype == dtype
    for result, plain in zip(actual, expected, strict=True):
        assert torch.equal(result, plain)


@pytest.mark.parametrize("form", FORMS)
def test_a_rotation_turns_each_pair_by_its_angle(form):
    x, _ = make_inputs(torch.float32)
    heads, pe = x.detach().unflatten(-1, (H, D)), table()
    assert pe.shape == (B, T, 1, D // 2, 2)
    angle = torch.atan2(pe[..., 1].double(), pe[..., 0].double())
    pairs = heads.double().unflatten(-1, (-1, 2))
    length, start = pairs.norm(dim=-1), torch.atan2(pairs[..., 1], pairs[..., 0])
    rotated = torch.stack(((start + angle).cos(), (start + angle).sin()), dim=-1) * length[..., None]
    torch.testing.assert_close(FORMS[form](rotate)(heads, pe).double(), rotated.flatten(-2), rtol=1e-5, atol=1e-5)


def test_torchs_own_kernels_write_three_times_in_a_rotation():
    """Wide, turned, narrow again; backward the same, with the small table conjugated."""
    (x, grad), pe = make_inputs(torch.bfloat16, "meta"), table().to("meta")
    with Launches() as forward:
        out = rotate(x.unflatten(-1, (H, D)), pe)
    with Launches() as backward:
        torch.autograd.backward(out, grad)
    assert forward.seen == ["_to_copy", "mul", "_to_copy"]
    assert backward.seen == ["_to_copy", "clone", "mul", "_to_copy"]


@pytest.mark.parametrize("choice", ["sdpa", "cudnn"])
def test_attention_copies_nothing(choice, monkeypatch):
    """Neither what it is given, nor its result, nor gradients; on tensors without data."""
    monkeypatch.setattr("tessera.models.layers.attention._check_cudnn", lambda *_: None)
    if choice == "sdpa":
        flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: flash(q, k, v)[0])
    attend = attention_function(choice, torch.device("meta"), torch.bfloat16)
    q, k, v = (torch.empty(B, T, 2, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    with Launches() as launches:
        out = attend(q, k, v)
        torch.autograd.backward(out, torch.empty_like(out))
    assert out.shape == (B, T, 128) and out.is_contiguous()
    assert [name for name in launches.seen if "attention" not in name] == []
    assert len(launches.seen) == 2
    assert all(x.grad is not None and x.grad.is_contiguous() for x in (q, k, v))
