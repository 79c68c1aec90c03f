"""Stored weights are dequantised to the values of code · scale in fp32, rounded once, in one kernel on a GPU.

The Triton kernel runs here by Triton's interpreter, and is compiled for every generation of cards; how fast it is, and
ComfyUI's own kernel, only a card shows.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tessera.memory.low_bit import dequantize
from tessera.memory.weights import frozen_linear
from tessera.memory.weights.frozen_linear import stored_linear, stored_linear_input_grad
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Triton's interpreter cuts fp32 to bf16 where cards round; that they do stands in the compiled kernel.
DTYPES = (torch.float32, torch.float16)
CARDS = {75: "Turing", 80: "A100", 86: "RTX 30", 89: "RTX 40", 90: "H100", 100: "B200", 120: "RTX 50"}
CUDA = torch.device("cuda", 0)


def loaded() -> ModuleType:
    """The module of the kernel, anew: Triton decides how to run it where it is defined."""
    pytest.importorskip("triton")
    path = Path(dequantize.__file__).with_name("dequantize_kernel.py")
    spec = importlib.util.spec_from_file_location("dequantize_kernel_here", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return loaded()


def codes_of(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Every code in turn."""
    return (torch.arange(rows * columns) % 256).to(torch.uint8).reshape(rows, columns).view(dtype)


def equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for the sign of a NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    bits = [values[~nan].view(torch.uint8) for values in (actual, expected)]
    return torch.equal(actual.isnan(), nan) and torch.equal(*bits)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", [*FP8, torch.int8])
def test_every_code_is_dequantised_exactly(kernel: Any, stored: torch.dtype, dtype: torch.dtype, by_rows: bool) -> None:
    for rows, columns in ((1, 256), (31, 33), (33, 24), (2, kernel.BLOCK + 1)):
        codes = codes_of(rows, columns, stored)
        scale = torch.rand(rows if by_rows else 1, 1) / 300
        scale = scale if by_rows else scale.reshape(())
        actual = kernel.dequantize_codes(codes, scale, (rows, columns), dtype)
        assert equal(actual, (codes.to(torch.float32) * scale).to(dtype)), (rows, columns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp8_is_dequantised_as_comfyui_does(kernel: Any, dtype: torch.dtype) -> None:
    import comfy_kitchen

    for rows, columns in ((131, 160), (31, 33), (1, 1024 + 40)):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
        weight *= torch.logspace(-12, 2, rows * columns).reshape(rows, columns)
        codes, scale = comfy_kitchen.quantize_mxfp8(weight, pad_32x=True)
        expected = comfy_kitchen.dequantize_mxfp8(codes, scale, dtype)[:rows, :columns]
        assert equal(kernel.dequantize_codes(codes, scale, (rows, columns), dtype, mx=True), expected.contiguous())


class Launches(TorchDispatchMode):
    """The ops that launch a kernel, and the bytes that these read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if not op.is_view and "empty" not in str(op):
            self.ops.append(str(op.overloadpacket))
            self.bytes += sum(t.nbytes for t in (*args, result) if isinstance(t, torch.Tensor))
        return result


def launches(weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[list[str], float]:
    """(ops, bytes for each code) of dequantising to bf16."""
    with Launches() as recorded:
        result = dequantize.dequantize(weight, scale, torch.bfloat16)
    assert result.shape == weight.shape and result.dtype == torch.bfloat16
    return recorded.ops, round(recorded.bytes / weight.numel(), 2)


def test_a_scaled_weight_is_one_kernel_of_3_bytes_a_code_on_a_gpu(monkeypatch: Any) -> None:
    calls = []

    def by_triton(codes: torch.Tensor, scale: torch.Tensor, shape: Any, dtype: Any, mx: bool) -> torch.Tensor:
        calls.append(tuple(scale.shape))
        return codes.new_empty(shape, dtype=dtype)

    with FakeTensorMode():
        weight = torch.empty(3072, 9216, dtype=torch.float8_e4m3fn, device=CUDA)
        scalar, rows = torch.empty((), device=CUDA), torch.empty(3072, 1, device=CUDA)
        monkeypatch.setattr(dequantize, "core_has_kernel", lambda function: function == "dequantize_per_tensor_fp8")
        monkeypatch.setattr(dequantize, "_triton_kernel", lambda device, dtype: by_triton)
        assert launches(weight, scalar) == (["comfy_kitchen.dequantize_fp8"], 3.0)
        assert launches(weight, None) == (["aten._to_copy"], 3.0)
        # Core's kernel takes one scale, and reads in parts of 8.
        assert not calls and launches(weight, rows)[0] == launches(weight[:, 3:], scalar)[0] == []
        assert launches(weight.flatten()[: 31 * 33].view(31, 33), scalar)[0] == []
        assert calls == [(3072, 1), (), ()]
        monkeypatch.setattr(dequantize, "core_has_kernel", lambda function: False)
        assert launches(weight, scalar)[0] == [] and len(calls) == 4
        monkeypatch.setattr(dequantize, "_triton_kernel", lambda device, dtype: None)
        assert launches(weight, scalar) == (["aten._to_copy", "aten._to_copy", "aten.mul"], 7.0)


@pytest.fixture
def on_this_device(kernel: Any, monkeypatch: Any) -> Iterator[list[tuple[int, ...]]]:
    """The CPU takes the kernel as a GPU would. Gives the shapes that it dequantised."""
    shapes: list[tuple[int, ...]] = []

    def dequantize_codes(codes: torch.Tensor, *args: Any) -> torch.Tensor:
        shapes.append(tuple(codes.shape))
        return kernel.dequantize_codes(codes, *args)

    monkeypatch.setitem(
        sys.modules,
        f"{dequantize.__package__}.dequantize_kernel",
        type("Module", (), {"dequantize_codes": dequantize_codes}),
    )
    monkeypatch.setattr(dequantize, "DEVICES", ("cpu",))
    dequantize._triton_kernel.cache_clear()
    yield shapes
    dequantize._triton_kernel.cache_clear()


@pytest.mark.parametrize("storage", ["mxfp8", "int8", "int8 by rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_for_which_comfyui_has_no_kernel_are_dequantised_to_its_values(
    storage: str, dtype: torch.dtype, on_this_device: list[Any]
) -> None:
    from tiny.memory.quantised import stored_layer

    frozen, _ = stored_layer(storage, torch.randn(31, 96), torch.randn(31))
    parts = (frozen.weight, *frozen.parts)
    actual = frozen_linear.dequantize_parts(parts, frozen.layout, dtype)
    assert len(on_this_device) == 2  # its trial, and this
    dequantize.DEVICES = ()
    assert equal(actual, frozen_linear.dequantize_parts(parts, frozen.layout, dtype).contiguous())
    assert len(on_this_device) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "compiles"), [(1, False), (31, False), (31, True), (33, False)])
def test_gradients_through_the_kernel_are_those_in_fp64(
    rows: int, dtype: torch.dtype, compiles: bool, on_this_device: list[Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(65, 33, generator=generator)
    scale = whole.abs().max() / 448
    weight = (whole / scale).to(torch.float8_e4m3fn)
    x, grad = torch.randn(rows, 33, generator=generator), torch.randn(rows, 65, generator=generator)
    x = x.to(dtype).requires_grad_()
    torch._dynamo.reset()
    run: Callable[..., Any] = torch.compile(stored_linear, backend="aot_eager") if compiles else stored_linear
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(x, weight, scale, None)
    y.backward(grad.to(dtype))
    assert {t.data_ptr() for t in saved} == {weight.data_ptr(), scale.data_ptr()}
    assert on_this_device == [(1, 256), (65, 33), (65, 33)]
    exact = weight.double() * scale.double()
    assert x.grad is not None
    for actual, expected in ((y, x.double() @ exact.T), (x.grad, grad.to(dtype).double() @ exact)):
        # Rounded: the weight and the result once each.
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(dtype).eps, error


@pytest.mark.parametrize("by_triton", [False, True])
def test_fp16_overflows_only_where_the_result_does(by_triton: bool, request: Any) -> None:
    """Scaled afterwards, these sums of 2^16 and more would be infinite."""
    if by_triton:
        request.getfixturevalue("on_this_device")
    weight, scale = torch.full((64, 256), 448.0).to(torch.float8_e4m3fn), torch.tensor(1 / 1024)
    x = torch.ones(3, 256, dtype=torch.float16)
    assert torch.isinf(x @ weight.to(torch.float16).T).all()
    assert torch.equal(stored_linear(x, weight, scale, None), torch.full((3, 64), 112.0, dtype=torch.float16))
    grad = torch.full((3, 64), 4.0, dtype=torch.float16)
    assert torch.isinf(grad @ weight.to(torch.float16)).all()
    assert torch.equal(stored_linear_input_grad(grad, weight, scale), torch.full((3, 256), 112.0, dtype=torch.float16))


def test_torch_dequantises_in_two_steps_if_triton_does_not_run(on_this_device: Any, monkeypatch: Any) -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler.")

    def wrong(codes: torch.Tensor, scale: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return codes.to(dtype) * 2

    codes, scale = codes_of(3, 5, torch.float8_e4m3fn), torch.tensor(0.3)
    for function in (fails, wrong):
        dequantize._triton_kernel.cache_clear()
        monkeypatch.setattr(sys.modules[f"{dequantize.__package__}.dequantize_kernel"], "dequantize_codes", function)
        actual = dequantize.dequantize(codes, scale, torch.bfloat16)
        assert torch.equal(actual, codes.bfloat16() * scale.bfloat16())


def compiled(kernel: Any, card: int, stored: int, scale: int, out: str) -> str:
    """The kernel's PTX for a card, built to the end by NVIDIA's assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {"FORMAT": stored, "SCALE": scale, "BLOCK": kernel.BLOCK}
    types = {"codes": "*u8", "scales": "*u8" if scale == kernel.MX.value else "*fp32", "out": f"*{out}"}
    types |= dict.fromkeys(("columns", "stride", "tiles"), "i32") | dict.fromkeys(constants, "constexpr")
    sixteens: Any = {(place,): [["tt.divisibility", 16]] for place in range(5)}  # as addresses and sizes of models are
    source = ASTSource(kernel._dequantize, types, constexprs=constants, attrs=sixteens)
    binary = triton.compile(source, target=GPUTarget("cuda", card, 32))
    assert binary.asm["cubin"]
    return binary.asm["ptx"]


@pytest.mark.parametrize("card", CARDS)
def test_the_kernel_is_compiled_for_every_card_and_moves_whole_words(
    card: int, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = loaded()
    for stored, scale in ((kernel.E4M3, kernel.ONE), (kernel.E5M2, kernel.ROWS), (kernel.E4M3, kernel.MX)):
        ptx = compiled(kernel, card, stored.value, scale.value, "bf16")
        assert "e4m3" not in ptx and "e5m2" not in ptx and "ftz" not in ptx
        assert card < 80 or "cvt.rn.bf16" in ptx
        # 8 codes and 8 results are one access each.
        assert re.findall(r"ld\.global\S*", ptx)[0].endswith("v2.b32"), ptx
        assert re.findall(r"st\.global\S*", ptx) == ["st.global.v4.b32"], ptx
