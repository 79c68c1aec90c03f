"""FlashAttention 2, 3 and 4 by name: their values, their gradients, and that a compiler sees one op.

Stand-ins with the packages' signatures compute here (`tiny.memory.flash_attn`); the packages need a GPU.
"""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tessera.models.layers import flash_attention as op
from tessera.models.layers.attention import attention_function, cudnn, ragged_attention_function
from tiny.memory.flash_attn import NAMES, FakeKernels, installed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")
FIXED = {"alike": (12, 12), "text longer": (12, 20)}
LENGTHS = {"whole": (9, 9, 9), "different": (7, 9, 1)}
BACKENDS = [None, "aot_eager"]


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Iterator[FakeKernels]:
    """One version, installed alone."""
    with installed(request.param) as packages:
        attention_function("flash-attn", CPU, torch.float32)
        packages[request.param].calls.clear()
        yield packages[request.param]


def make_tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(attend: Any, tensors: list[Tensor], *extra: Any) -> list[Tensor]:
    out = attend(*tensors, *extra)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, grad)]


def within_a_block(attend: Any, backend: str | None) -> Any:
    def block(q: Tensor, k: Tensor, v: Tensor, *extra: Any) -> Tensor:
        return attend(q * 1.5, k, v.sin(), *extra) * 2

    torch._dynamo.reset()
    return block if backend is None else torch.compile(block, backend=backend, fullgraph=True, dynamic=False)


class Ops(TorchDispatchMode):
    """The names of what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("another attention ran")


def close(actual: list[Tensor], expected: list[Tensor], bound: float = 1e-5) -> bool:
    return all((x - y).norm() <= bound * y.norm() for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "other_tokens"), FIXED.values(), ids=FIXED)
def test_values_and_gradients_are_those_of_sdpa(kernels, tokens, other_tokens, backend, monkeypatch):
    tensors = make_tensors((2, tokens, 3, 16), (2, other_tokens, 3, 16), (2, other_tokens, 3, 16))
    expected = with_gradients(within_a_block(attention_function("sdpa", CPU, torch.float32), None), tensors)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    actual = with_gradients(within_a_block(attention_function("flash-attn", CPU, torch.float32), backend), tensors)
    assert close(actual, expected) and actual[0].shape == (2, tokens, 48)
    assert len(kernels.calls) == 2 and kernels.calls[0] == "flash_attn_func"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_samples_of_different_length_see_their_own_tokens(kernels, lengths, backend):
    tensors, size = make_tensors(*[(3, 9, 2, 16)] * 3), torch.tensor(lengths)
    plain, flash = (ragged_attention_function(name, CPU, torch.float32) for name in ("sdpa", "flash-attn"))
    counts = (torch.arange(9) < size[:, None])[..., None]
    actual, expected = (
        with_gradients(
            within_a_block(lambda *x, kind=kind: kind.attend(*x) * counts, kernel),
            tensors,
            kind.bounds(size, 9, CPU),
        )
        for kind, kernel in ((flash, backend), (plain, None))
    )
    assert close(actual, expected)
    assert len(kernels.calls) == 2 and kernels.calls[0] == "flash_attn_varlen_func"


def test_any_lengths_share_one_graph(kernels):
    attend, counter = ragged_attention_function("flash-attn", CPU, torch.float32), torch._dynamo.testing
    counter = counter.CompileCounterWithBackend("aot_eager")
    block = torch.compile(attend.attend, backend=counter, fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    for lengths in LENGTHS.values():
        block(*make_tensors(*[(3, 9, 2, 16)] * 3), attend.bounds(torch.tensor(lengths), 9, CPU)).sum().backward()
    assert counter.frame_count == 1


def test_the_op_keeps_torchs_rules_for_custom_ops(kernels):
    package = op.flash_package(CPU, torch.float32)
    bounds = torch.tensor([0, 5, 9, 9, 18], dtype=torch.int32)
    torch.library.opcheck(
        op.flash_attention, (*make_tensors((2, 9, 3, 16), (2, 7, 3, 16), (2, 7, 3, 16)), None, package)
    )
    torch.library.opcheck(op.flash_attention, (*make_tensors(*[(2, 9, 3, 16)] * 3), bounds, package))


def test_flash_attention_counts_as_the_work_that_it_is():
    q, k = torch.empty(2, 9, 3, 16, device="meta"), torch.empty(2, 7, 3, 16, device="meta")
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        out, lse = op.flash_attention(q, k, k, None, NAMES["2"])
        op.flash_attention_backward(out, q, k, k, out, lse, None, NAMES["2"])
    assert counter.get_total_flops() == (4 + 10) * 2 * 3 * 9 * 7 * 16


def test_the_newest_that_has_kernels_for_the_card_is_taken(monkeypatch):
    for capability, version in (((8, 6), "2"), ((9, 0), "3"), ((10, 0), "4"), ((12, 0), "4"), ((7, 5), "3")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, value=capability: value)
        with installed("2", "3", "4"), monkeypatch.context() as patch:
            patch.setattr(op, "DEVICES", ("cuda",))
            patch.setattr(op, "_kernel_fault", lambda *_: None)
            assert op.flash_package(torch.device("cuda", 0), torch.bfloat16) == NAMES[version], capability


def test_one_that_does_not_work_is_passed_over_and_told_where_it_is_the_only_one(monkeypatch):
    def broken(name: str) -> Any:
        if name == NAMES["3"]:
            raise ImportError("undefined symbol: _ZN3c10\nand more")
        return importlib.import_module(name)

    with installed("2", "3", "4"):
        monkeypatch.setattr(op, "_module", broken)
        assert op.flash_package(CPU, torch.float32) == NAMES["4"]
    with installed("3"), pytest.raises(ValueError) as error:
        attention_function("flash-attn", CPU, torch.float32)
    assert str(error.value) == (
        "attention is 'flash-attn', which does not work here (FlashAttention 3: ImportError: undefined symbol: "
        "_ZN3c10); choose 'auto'."
    )


def test_one_whose_values_are_wrong_or_whose_signature_is_another_is_refused(kernels, monkeypatch):
    op.flash_package.cache_clear()
    for scale in (1.5, torch.nan):
        monkeypatch.setattr(kernels, "scale", scale)
        with pytest.raises(ValueError, match=r"does not work here \(FlashAttention .: its values are not those"):
            attention_function("flash-attn", CPU, torch.float32)
    for name, module in list(sys.modules.items()):
        if name in NAMES.values() and isinstance(module, ModuleType):
            monkeypatch.setattr(module, "flash_attn_func", lambda q, k, v: q)
    with pytest.raises(ValueError, match=r"does not work here \(FlashAttention .: TypeError"):
        ragged_attention_function("flash-attn", CPU, torch.float32)


def test_cudnn_by_name_is_its_own_kernel():
    """On tensors without data, through torch's own description of it."""
    shapes = [(2, 12, 3, 64), (2, 20, 3, 64), (2, 20, 3, 64)]
    tensors = [torch.empty(x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes]
    with Ops() as ops:
        out = cudnn(*tensors)
        out.sum().backward()
    assert out.shape == (2, 12, 192)
    assert [name for name in ops.seen if "attention" in name] == [
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_cudnn_attention_backward.default",
    ]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    within_a_block(cudnn, counter)(*tensors).sum().backward()
    assert counter.frame_count == 1 and "cudnn_attention" in counter.graphs[0].code


def test_needs_of_flash_attention_are_one_sentence(monkeypatch):
    with installed(), pytest.raises(ValueError, match="attention is 'flash-attn', which is not installed here"):
        ragged_attention_function("flash-attn", CPU, torch.bfloat16)
    with installed("2"):
        monkeypatch.setattr(op, "DTYPES", (torch.float16, torch.bfloat16))
        with pytest.raises(ValueError, match="needs a GPU and fp16 or bf16, not cpu in torch.float32"):
            attention_function("flash-attn", CPU, torch.float32)
    with pytest.raises(ValueError, match="attention is 'cudnn', which needs a GPU and fp16 or bf16, not cpu in"):
        ragged_attention_function("cudnn", CPU, torch.bfloat16)
