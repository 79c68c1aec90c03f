"""Options that regions are compiled with: those of their mode, without a fusion of inductor's that loses gradients."""

from typing import Any

import pytest
import torch
from tessera.compile.region import compiled_function, inductor_options
from tessera.compile.settings import CompileOptions
from tessera.models.adapters import add_product
from torch._inductor import compile_fx, config, list_mode_options

FUSION = "triton.mix_order_reduction"


def body(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_forward_and_backward_are_compiled_with_the_options_of_the_mode_and_without_the_fusion(mode, monkeypatch):
    expected = {**list_mode_options(mode, False), FUSION: False}
    initial, compilations = config.get_config_copy(), []
    inner = compile_fx._compile_fx_inner

    def noted(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        compilations.append(
            (bool(kwargs.get("is_backward")), {name: config.get_config_copy()[name] for name in expected})
        )
        return inner(graph, inputs, **kwargs)

    monkeypatch.setattr(compile_fx, "_compile_fx_inner", noted)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        run = compiled_function(body, "body_0", CompileOptions(mode=mode, dynamic="false"))
        run(torch.ones(4, requires_grad=True)).sum().backward()
    assert compilations == [(False, expected), (True, expected)]
    assert initial[FUSION] and config.get_config_copy() == initial


def test_a_torch_without_the_fusion_gets_the_options_of_the_mode(monkeypatch):
    class Older:
        triton = object()

    monkeypatch.setattr(torch._inductor, "config", Older)
    monkeypatch.setattr(add_product, "COPIES_ADDEND", False)
    assert inductor_options("default", None) == {}
