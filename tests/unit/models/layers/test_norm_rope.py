"""Norm and rotation of queries and keys: the op for GPUs gives what the plain form gives, and its gradients.

The Triton kernels run here by Triton's interpreter, and are compiled for every generation of cards; how fast they are
only a card shows.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tessera.models.layers import norm_rope as layer
from tessera.models.layers.math import rope
from torch.nn import functional as F

CARDS = {80: "A100", 89: "RTX 40", 90: "H100", 120: "RTX 50"}
# Triton's interpreter cuts fp32 to bf16 where cards round.
DTYPES = (torch.float32, torch.float16)
EPS = 1e-6


def loaded() -> ModuleType:
    """The module of the kernels, anew: Triton decides how to run them where they are defined."""
    pytest.importorskip("triton")
    path = Path(layer.__file__).with_name("norm_rope_kernel.py")
    spec = importlib.util.spec_from_file_location("norm_rope_kernel_here", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["Triton", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The CPU takes the op as a GPU would, with the kernels and without."""
    monkeypatch.setattr(layer, "DEVICES", ("cpu",))
    if request.param == "Triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        kernel = loaded()
        put(kernel, monkeypatch)
        assert layer._kernel(torch.device("cpu"), torch.float32) is kernel
    else:
        monkeypatch.setattr(layer, "_kernel", lambda device, dtype: None)
    yield request.param
    getattr(layer._kernel, "cache_clear", lambda: None)()


def put(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the layer find these kernels."""
    monkeypatch.setitem(sys.modules, f"{layer.__package__}.norm_rope_kernel", kernel)
    monkeypatch.setattr(sys.modules[layer.__package__], "norm_rope_kernel", kernel, raising=False)
    layer._kernel.cache_clear()


class Case:
    """Two parts, 3 and 4 tokens of 9 heads, each cut out of one tensor with q, k and v, and tables for each sample."""

    def __init__(self, dtype: torch.dtype, dim: int = 32, batch: int = 2, tables: int = 2):
        generator = torch.Generator().manual_seed(0)
        shapes = ((batch, length, 3, 9, dim) for length in (3, 4))
        self.wide = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.weights = [(torch.rand(dim, generator=generator) + 0.5).to(dtype) for _ in range(2)]
        positions = torch.rand(tables, 7, 2, generator=generator) * 9
        self.table = rope(positions, (dim // 2, dim // 2), 10000)
        self.grad = torch.randn(batch, 7, 9, dim, generator=generator).to(dtype)

    def run(self, function: Any, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """The result and the gradients, in double precision. dtype: in place of the case's."""
        wide = [(x if dtype is None else x.to(dtype)).clone().requires_grad_() for x in self.wide]
        weights = [w if dtype is None else w.to(dtype) for w in self.weights]
        table = self.table if dtype is None else self.table.to(dtype)
        out = function([x[:, :, 1] for x in wide], weights, table)
        gradients = torch.autograd.grad(out, wide, self.grad.to(out.dtype))
        return [t.detach().double() for t in (out, *gradients)]


def exact(parts: list[torch.Tensor], weights: list[torch.Tensor], table: torch.Tensor) -> torch.Tensor:
    """The formulas as they are written: arXiv 1910.07467, then arXiv 2104.09864."""
    rows = [x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w for x, w in zip(parts, weights, strict=True)]
    first, second = torch.cat(rows, dim=1).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table.unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


def called(parts: Any, weights: Any, table: Any) -> torch.Tensor:
    return layer.norm_rope(parts, weights, table, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "batch", "tables"), [(32, 2, 2), (128, 1, 1), (16, 2, 1)])
def test_values_and_gradients_are_those_in_fp64(
    implementation: str, dtype: torch.dtype, dim: int, batch: int, tables: int
) -> None:
    case = Case(dtype, dim, batch, tables)
    for actual, expected in zip(case.run(called), case.run(exact, torch.float64), strict=True):
        error = (actual - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(dtype).eps, error


# As kernels of attention give the gradient of queries and keys, and as tensors are cut out of others.
LAYOUTS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "rows of an odd length": lambda t: F.pad(t, (0, 1))[..., :-1],
    "from an odd place on": lambda t: F.pad(t.flatten(), (1, 0))[1:].view(t.shape),
    "one number for all": lambda t: t[..., :1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_any_layout_are_taken(implementation: str, layout: str) -> None:
    case = Case(torch.float32)
    case.grad = LAYOUTS[layout](case.grad)
    for actual, expected in zip(case.run(called), case.run(exact, torch.float64), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    x, table = LAYOUTS[layout](case.wide[0][:, :, 0]), LAYOUTS[layout](case.table)
    for function in (layer.rope_heads, lambda *arguments: layer.norm_rope([arguments[0]], [None], arguments[1], None)):
        leaf = x.detach().requires_grad_()
        plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        results = [
            (function(heads, tables[:, :3]), heads) for heads, tables in ((leaf, table), (plain, table.contiguous()))
        ]
        actual, expected = (
            (out.detach(), *torch.autograd.grad(out, heads, case.grad[:, :3])) for out, heads in results
        )
        torch.testing.assert_close(actual, expected)


def test_a_rotation_alone_is_the_plain_one(implementation: str) -> None:
    from tessera.models.layers.math import rotate

    case = Case(torch.float32)
    x, grad = case.wide[1], case.grad[:, :4]
    results = []
    for function in (layer.rope_heads, rotate):
        leaf = x.clone().requires_grad_()
        out = function(leaf[:, :, 0], case.table[:, :4])
        results.append((out.detach(), *torch.autograd.grad(out, leaf, grad)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_the_op_is_one_of_a_whole_graph_and_keeps_what_it_was_given(implementation: str) -> None:
    case, saved = Case(torch.float32), []
    torch._dynamo.reset()
    compiled = torch.compile(called, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(case.run(compiled), case.run(exact, torch.float64), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    parts = [x[:, :, 1].requires_grad_() for x in case.wide]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        called(parts, case.weights, case.table)
    inputs = {t.untyped_storage().data_ptr() for t in (*parts, *case.weights, case.table)}
    assert {t.untyped_storage().data_ptr() for t in saved} == inputs


def test_other_devices_sizes_and_dtypes_take_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32)
    parts = [x[:, :, 1] for x in case.wide]

    def plain(parts: Any, table: Any = case.table, weights: Any = case.weights) -> bool:
        return not layer._fits(parts, weights, table)

    assert plain(parts)  # the CPU
    monkeypatch.setattr(layer, "DEVICES", ("cpu",))
    assert not plain(parts)
    assert plain([x.double() for x in parts]) and plain(parts, case.table.double())
    assert plain([x[..., :24] for x in parts]) and plain([x[..., ::2] for x in parts])
    assert plain(parts, weights=[w.requires_grad_() for w in case.weights])
    expected = torch.cat([F.rms_norm(x, (32,), None, EPS) for x in parts], dim=1)
    actual = layer.norm_rope(parts, [None, None], torch.tensor([1.0, 0.0]).expand(1, 7, 1, 16, 2), EPS)
    torch.testing.assert_close(actual, expected)


def test_a_kernel_that_gives_other_values_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernel: Any = loaded()
    backward = kernel.norm_rope_backward
    kernel.norm_rope_backward = lambda grad, *arguments: [2 * t for t in backward(grad, *arguments)]
    put(kernel, monkeypatch)
    assert layer._kernel(torch.device("cpu"), torch.float32) is None
    kernel.norm_rope_backward = backward
    layer._kernel.cache_clear()
    assert layer._kernel(torch.device("cpu"), torch.float32) is kernel
    layer._kernel.cache_clear()


@pytest.mark.parametrize("card", CARDS)
def test_the_kernel_is_compiled_for_every_card_and_reads_in_order(card: int, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = loaded()
    for function, whole in ((kernel._norm_rope, 2), (kernel._norm_rope_backward, 3)):
        ptx = compiled_for(card, function, kernel)
        # A thread's eight numbers in 16 bits are one access; its number of the weight and of the table one each.
        accesses = [access.split(".", 2)[2] for access in re.findall(r"(?:ld|st)\.global\S*", ptx)]
        assert sorted(accesses) == sorted(["v4.b32"] * whole + ["b16", "b32"])


def compiled_for(card: int, function: Any, kernel: Any) -> str:
    """The PTX of a kernel for FLUX's heads, built to the end by NVIDIA's assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"NORM": True, "HEADS": kernel.HEADS, "DIM": 128}
    types = {}
    for name in function.arg_names:
        pointer = "*fp32" if name == "table" else "*bf16" if name in ("x", "weight", "out", "grad") else "i32"
        types[name] = "constexpr" if name in constants else "fp32" if name == "eps" else pointer
    loose = ("constexpr", "fp32")
    places = [place for place, name in enumerate(types) if types[name] not in loose and name not in ("length", "heads")]
    sixteens: Any = {(place,): [["tt.divisibility", 16]] for place in places}
    source = ASTSource(function, types, constexprs=constants, attrs=sixteens)
    binary = triton.compile(source, target=GPUTarget("cuda", card, 32), options={"num_warps": kernel.WARPS})
    assert binary.asm["cubin"]
    return binary.asm["ptx"]
