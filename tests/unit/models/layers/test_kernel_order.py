"""Torch's order of attention's kernels is decided before ComfyUI's first attention."""

from typing import Any

import pytest
import torch
from tessera.models.layers import attention
from tiny.nodes.prompt import awaited


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """A stand-in for a GPU that notes what torch is asked to choose a kernel for."""
    dtypes: list[torch.dtype] = []
    zeros = torch.zeros

    def ask(q: torch.Tensor, *_: Any) -> int:
        dtypes.append(q.dtype)
        return 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **options: zeros(*size, **options))
    monkeypatch.setattr(torch, "_fused_sdp_choice", ask)
    return dtypes


def test_torch_is_asked_once_for_a_kernel_that_cudnn_takes(questions) -> None:
    attention.settle_kernel_order()
    assert questions == [torch.bfloat16]


def test_a_torch_without_the_question_is_left_alone(questions, monkeypatch) -> None:
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    attention.settle_kernel_order()


def test_comfyui_has_it_asked_when_it_loads_the_pack(monkeypatch) -> None:
    from tessera import nodes

    calls: list[bool] = []
    monkeypatch.setattr(nodes, "settle_kernel_order", lambda: calls.append(True))
    monkeypatch.setattr(nodes, "use_persistent_cache", lambda folder: "")
    monkeypatch.setattr(nodes, "PromptServer", None)
    awaited(nodes.TesseraExtension().on_load())
    assert calls == [True]
