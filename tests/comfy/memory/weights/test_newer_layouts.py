"""Layouts that newer releases of ComfyUI read train as they are stored, where comfy_kitchen has them."""

from typing import Any

import comfy_kitchen.tensor
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor, get_layout_class
from tessera.memory.weights.frozen import FrozenWeights
from tiny.memory.quantised import LAYER
from torch import Tensor

OUT = 48
IN = 128
GROUP = 64
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asym_w4a8_int8() -> QuantizedTensor:
    return QuantizedTensor.from_float(0.1 * random(OUT, IN), "AsymW4A8Int8Layout", convrot_groupsize=GROUP)


def awq_w4a16() -> QuantizedTensor:
    """It is quantised by other programs only: 4 bits of each number, a scale and a zero point of each group."""
    data = torch.randint(-128, 128, (OUT, IN // 2), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale, zeros = (0.02 * random(IN // GROUP, OUT, seed=seed).bfloat16() for seed in (1, 2))
    kind: Any = get_layout_class("TensorCoreAWQW4A16Layout")
    params = kind.Params(scale=scale, zeros=zeros, group_size=GROUP, orig_dtype=torch.bfloat16, orig_shape=(OUT, IN))
    return QuantizedTensor(data, "TensorCoreAWQW4A16Layout", params)


BY_LAYOUT = {"AsymW4A8Int8Layout": asym_w4a8_int8, "TensorCoreAWQW4A16Layout": awq_w4a16}
THERE = [make for layout, make in BY_LAYOUT.items() if hasattr(comfy_kitchen.tensor, layout)]


@pytest.mark.parametrize("make", THERE, ids=[make.__name__ for make in THERE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_numbers_are_core_s_and_the_stored_parts_wait_for_backward(make: Any, dtype: torch.dtype) -> None:
    weight = make()
    layer = torch.nn.Linear(IN, OUT, bias=False)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    model = torch.nn.Module()
    model.diffusion_model = torch.nn.Module()
    model.diffusion_model.block = torch.nn.ModuleList([torch.nn.Module()])
    model.diffusion_model.block[0].layer = layer
    frozen = FrozenWeights(ModelPatcher(model, CPU, CPU), CPU, dtype).linear(LAYER)
    assert frozen.shape == (OUT, IN) and frozen.layout is not None

    whole = weight.to(dtype).dequantize().to(dtype)
    x, grad = random(2, 5, IN, seed=3).to(dtype).requires_grad_(), random(2, 5, OUT, seed=4).to(dtype)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = frozen.apply(x)
    assert y.dtype == dtype and torch.equal(y, x.detach() @ whole.T)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (frozen.weight, *frozen.parts)}
    assert sum(t.nbytes for t in saved) < 0.8 * OUT * IN
    y.backward(grad)
    assert x.grad is not None and torch.equal(x.grad, grad @ whole)
    torch.testing.assert_close(frozen.full(), weight.to(torch.float32).dequantize(), rtol=0, atol=0)
