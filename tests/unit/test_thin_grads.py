"""The gradients of a LoRA's two factors in one pass over the gradient of the layer's output.

The Triton kernels run here by Triton's interpreter, and are compiled for every generation of cards; how fast they are
only a card shows.
"""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tessera.memory.weights.frozen_linear import FrozenLinear
from tessera.models.adapters.low_rank import gradients
from tessera.models.adapters.low_rank.linear import Update, lora_linears

CARDS = {80: "A100", 86: "RTX 30", 89: "RTX 40", 90: "H100", 100: "B200", 120: "RTX 50"}
SHAPES = [(64, 256, 16), (70, 300, 5), (200, 1000, 16), (129, 31, 33), (4608 // 8, 256, 64)]


def loaded() -> ModuleType:
    """The module of the kernels, anew: Triton decides how to run them where they are defined."""
    pytest.importorskip("triton")
    path = Path(gradients.__file__).with_name("gradients_kernel.py")
    spec = importlib.util.spec_from_file_location("gradients_kernel_here", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module: Any = loaded()
    # The interpreter of Triton 3.6 can't count to a number of its own with a NumPy of 2026.
    module.range = lambda end: range(int(getattr(end, "handle").data.item()))  # noqa: B009
    return module


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "columns", "rank"), SHAPES)
def test_both_gradients_are_those_in_fp64_rounded_once(kernel: Any, rows: int, columns: int, rank: int) -> None:
    grad = random(rows, columns).half()
    # As of one of several LoRAs on one input, whose rows lie in wider ones.
    hidden, up = random(rows, rank + 3, seed=1).half()[:, 3:], random(columns, rank, seed=2).half()
    found = kernel.thin_grads(grad, hidden, up)
    wanted = grad.double() @ up.double(), grad.double().T @ hidden.double()
    for one, exact in zip(found, wanted, strict=True):
        assert one.dtype == torch.float16 and one.shape == exact.shape and one.is_contiguous()
        assert (one.double() - exact).norm() < 3e-4 * exact.norm()
    again = kernel.thin_grads(grad, hidden, up)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(4608, 21504), (4608, 3072), (4096, 12288), (512, 9216), (64, 3072)])
def test_no_tile_is_left_out_and_the_parts_are_few(kernel: Any, rows: int, columns: int) -> None:
    groups, tiles, blocks = kernel.tiling(rows, columns)
    assert (groups - 1) * tiles * kernel.ROWS < rows <= groups * tiles * kernel.ROWS
    assert (blocks - 1) * kernel.COLUMNS < columns <= blocks * kernel.COLUMNS
    parts = 2 * 4 * kernel.padded(16) * (blocks * rows + groups * columns)  # written and read
    # Two products read the gradient twice.
    assert parts < 2 * rows * columns or rows < 512, parts


@pytest.fixture
def on_this_device(kernel: Any, monkeypatch: Any) -> Iterator[list[tuple[int, ...]]]:
    """The CPU takes the kernels as a GPU would. Gives the shapes of gradients that they took."""
    seen: list[tuple[int, ...]] = []

    def thin_grads(grad: torch.Tensor, *rest: torch.Tensor) -> Any:
        seen.append(tuple(grad.shape))
        return kernel.thin_grads(grad, *rest)

    name = f"{gradients.__package__}.gradients_kernel"
    monkeypatch.setitem(sys.modules, name, type("Module", (), {"thin_grads": staticmethod(thin_grads)}))
    monkeypatch.setattr(gradients, "DEVICES", ("cpu",))
    gradients._triton_kernel.cache_clear()
    yield seen
    gradients._triton_kernel.cache_clear()


@pytest.mark.parametrize("compiles", [False, True])
def test_linears_take_the_kernels_forward_and_back(compiles: bool, on_this_device: list[Any]) -> None:
    """Two Linears of one input: gradients as in fp64. A few rows, as a modulation has, are multiplied as before."""
    torch._dynamo.reset()
    half = torch.float16
    for rows in (72, 2):
        wide = [random(48, 32, seed=3) / 8, random(24, 32, seed=4) / 8]
        x, down = random(rows, 32, seed=5), random(8, 32, seed=6) / 8
        ups = [random(48, 4, seed=7) / 4, random(24, 4, seed=8) / 4]
        results = []
        for dtype in (torch.float64, half):
            own = [t.to(half).to(dtype).requires_grad_() for t in (x, down, *ups)]

            def run(x: Any, down: Any, *ups: Any, dtype: Any = dtype, wide: Any = wide) -> Any:
                frozen = [FrozenLinear(w.to(half).to(dtype), None, None) for w in wide]
                outs = lora_linears(x, frozen, down, [Update(up) for up in ups], x.shape[:1])
                return sum((out.float() * out.float()).mean() for out in outs)

            call: Any = torch.compile(run, backend="aot_eager", fullgraph=True) if compiles and dtype == half else run
            call(*own).backward()
            results.append([t.grad for t in own])
        for exact, found in zip(*results, strict=True):
            assert (found.double() - exact).norm() < 3e-3 * exact.norm()
    assert on_this_device == [(70, 300), (72, 48), (72, 24)]  # its trial, and the gradients


def test_where_triton_does_not_run_there_are_two_products(on_this_device: Any, monkeypatch: Any) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.")

    def wrong(grad: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor) -> Any:
        return hidden * 2, up * 2

    grad, hidden, up = random(64, 16).half(), random(64, 4).half(), random(16, 4).half()
    for kernel in (fails, wrong):
        gradients._triton_kernel.cache_clear()
        monkeypatch.setattr(sys.modules[f"{gradients.__package__}.gradients_kernel"], "thin_grads", kernel)
        hidden_grad, up_grad = gradients.thin_grads(grad, hidden, up)
        assert torch.equal(hidden_grad, grad @ up) and torch.equal(up_grad, grad.t() @ hidden)


@pytest.mark.parametrize("card", CARDS)
def test_they_are_compiled_for_every_card(card: int, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = loaded()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def built(function: Any, pointers: dict[str, str], numbers: tuple[str, ...], constants: dict[str, int]) -> Any:
        types = pointers | dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
        sixteens: Any = {(place,): [["tt.divisibility", 16]] for place in range(len(pointers) + 2)}
        source = ASTSource(function, types, constexprs=constants, attrs=sixteens)
        options = {"num_warps": 8, "num_stages": 2} if function is kernel._parts else None
        found = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
        assert found.asm["cubin"]
        return found

    wide = {"RANK": 16, "ROWS": kernel.ROWS, "COLUMNS": kernel.COLUMNS}
    tensors = dict.fromkeys(("grad", "hidden", "up"), "*bf16") | dict.fromkeys(("hidden_parts", "up_parts"), "*fp32")
    numbers = ("rows", "columns", "rank", "grad_stride", "hidden_stride", "tiles")
    for rank in (16, 64):
        parts = built(kernel._parts, tensors, numbers, wide | {"RANK": rank})
        assert card in (90, 100) or parts.metadata.shared <= 99 * 1024  # what the others have
        assert "mma" in parts.asm["ptx"]
    sums = dict.fromkeys(("hidden_parts", "up_parts"), "*fp32") | dict.fromkeys(("hidden_grad", "up_grad"), "*bf16")
    numbers = ("blocks", "groups", "hidden_size", "up_size", "programs", "rank")
    built(kernel._sums, sums, numbers, {"RANK": 16, "BLOCK": kernel.BLOCK})
