"""The product of an adapter's factors, added to a frozen Linear's result itself by torches that copied it first."""

from typing import Any

import pytest
import torch
from tessera.compile.region import compiled_function, inductor_options
from tessera.compile.settings import CompileOptions
from tessera.memory.activations.checkpointing import selective_eager
from tessera.memory.weights.frozen_linear import FrozenLinear
from tessera.models.adapters import add_product as module
from tessera.models.adapters.base import AdapterSpec
from tessera.models.adapters.lora import LoraAdapter
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_fw_bw_and_get_code
from torch.nn.functional import linear

PASS = "post_grad_custom_post_pass"


@pytest.fixture
def copying_torch(monkeypatch):
    """A torch before 2.14."""
    monkeypatch.setattr(module, "COPIES_ADDEND", True)


def layer(dtype: torch.dtype) -> tuple[FrozenLinear, LoraAdapter]:
    """Make a frozen Linear of 32 to 48 features, stored in `dtype`, with a LoRA."""
    torch.manual_seed(0)
    adapter = LoraAdapter(AdapterSpec("lora", 4, 4.0), 48, 32)
    for factor in adapter.parameters():
        torch.nn.init.normal_(factor)
    return FrozenLinear(torch.randn(48, 32).to(dtype), None, torch.randn(48)), adapter


def gradients(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view(out.shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_product_is_added_to_the_result_itself_in_eager(dtype: torch.dtype, monkeypatch: Any):
    frozen, adapter = layer(dtype)
    x = torch.randn(2, 5, 32, requires_grad=True)
    expected = adapter(x, frozen, None)
    expected_grads = gradients(expected, x, *adapter.parameters())
    monkeypatch.setattr(module, "COPIES_ADDEND", True)
    y = frozen.apply(x[0])
    assert module.add_product(y, torch.ones(5, 4), adapter.up).data_ptr() == y.data_ptr()
    total = adapter(x, frozen, None)
    assert torch.equal(total, expected)
    assert all(map(torch.equal, gradients(total, x, *adapter.parameters()), expected_grads))


@pytest.mark.parametrize("budget", [0.5, 1.0])
def test_result_that_selective_checkpointing_keeps_stays_as_it_is(copying_torch, budget: float):
    frozen, adapter = layer(torch.float32)
    x = torch.randn(2, 5, 32, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return adapter(x, frozen, None).sin()

    expected = gradients(run(x), x, *adapter.parameters())
    assert all(map(torch.equal, gradients(selective_eager(run, budget)(x), x, *adapter.parameters()), expected))


def body(x: Tensor, layers: Any) -> tuple[Tensor, ...]:
    """Run layers on one input, and one more product whose addend is read again."""
    frozen, _ = layers[0]
    y = linear(x[0], frozen.weight)
    return *(adapter(x, frozen, None) for frozen, adapter in layers), torch.addmm(y, x[0], frozen.weight.t()), y


def test_sums_in_a_graph_are_made_in_place_but_of_what_is_read_again(copying_torch):
    layers = [layer(torch.float32), layer(torch.float16)]
    factors = [factor for _, adapter in layers for factor in adapter.parameters()]
    x = torch.randn(1, 16, 32, requires_grad=True)
    grads = [torch.randn(1, 16, 48) for _ in layers] + [torch.randn(16, 48)] * 2
    expected = body(x, layers)
    expected_grads = torch.autograd.grad(expected, [x, *factors], grads)
    torch._dynamo.reset()
    run = compiled_function(body, "body_0", CompileOptions(dynamic="false"))
    outs: list[Tensor] = []

    def step() -> Tensor:
        outs[:] = run(x, layers)
        return sum((out * grad).sum() for out, grad in zip(outs, grads, strict=True))

    with config.patch(force_disable_caches=True):
        _, (forward, backward) = run_fw_bw_and_get_code(step)
    assert x.grad is not None
    for actual, reference in zip(
        [*outs, x.grad, *(f.grad for f in factors)], [*expected, *expected_grads], strict=True
    ):
        torch.testing.assert_close(actual, reference, atol=1e-4, rtol=1e-4)
    # Forward that of each LoRA; back that of each layer's two products.
    assert [code.count("tessera.add_product_.default(") for code in (forward, backward)] == [2, 2]
    assert [code.count("extern_kernels.addmm(buf") for code in (forward, backward)] == [1, 0]


def test_max_autotune_and_a_newer_torch_choose_their_own_kernels(monkeypatch):
    passes = {}
    for copies in (True, False):
        monkeypatch.setattr(module, "COPIES_ADDEND", copies)
        for mode in ("default", "max-autotune-no-cudagraphs"):
            passes[copies, mode] = PASS in inductor_options(mode, None)
    assert [key for key, has_pass in passes.items() if has_pass] == [(True, "default")]
