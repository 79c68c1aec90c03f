"""Frozen Linears multiply in int8 and fp8 from the stored bytes, forward and back: within what rounding x and dy costs
by the format, with nothing but those bytes saved for backward, alike eager, checkpointed, swapped and compiled."""

from typing import Any

import pytest
import torch
from tessera.memory.low_bit import hadamard, matmul
from tessera.memory.low_bit.matmul import FP8, FULL, INT8, LowBitMatmul
from tessera.memory.weights.frozen import FrozenWeights
from tessera.memory.weights.frozen_linear import FrozenLinear
from tessera.models.layers.lora_linear import LoraLinear
from thinned import one_in
from tiny.compile.compiling import Graphs
from tiny.memory.quantised import LAYER, core_layer, stored_layer
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

OUT, IN = 144, 192
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORED = {"int8": INT8, "int8 by rows": INT8, "int8 rotated": INT8, "fp8": FP8, "fp8 by rows": FP8, "plain fp8": FP8}
stored = pytest.mark.parametrize("storage", STORED)
ROWS = 33


def random(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(storage: str, dtype: torch.dtype = torch.float32, out: int = OUT, columns: int = IN) -> tuple[Any, Tensor]:
    """(the FrozenLinear, with its low-bit matmul; its weight in fp64)"""
    weight, bias = random(out, columns, std=0.1), random(out, seed=1)
    if storage == "plain fp8":
        codes = weight.to(torch.float8_e4m3fn)
        frozen, core = FrozenLinear(codes, None, bias.to(dtype)), codes.float()
    else:
        frozen, core = stored_layer(storage, weight, bias, dtype)
    return frozen._replace(low_bit=frozen.low_bit_matmul(STORED[storage])), core.double()


def rounding(x: Tensor, weight: Tensor, kind: str, size: int = 0) -> Tensor:
    """The most that x·Wᵀ may be off when x is rounded by rows, (rows, out), in fp64. weight: (out, in)."""
    if size:
        x, weight = hadamard.rotate(x, size), hadamard.rotate(weight, size)
    largest = x.abs().amax(-1, keepdim=True)
    if kind == INT8:
        return largest / 127 / 2 * weight.abs().sum(1)
    # e4m3: three bits after the leading one, and steps of 2^-9 below 2^-6.
    least = largest / 448 * 2**-10
    return (x.abs() * 2**-4 + least) @ weight.abs().T


# Of a sum's own rounding and of the results', as a part of Σ|x||W| and of |y|; twice, where fp8's go through bf16.
SUMS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@stored
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_matmuls_are_within_what_rounding_x_and_dy_may_cost(storage: str, dtype: torch.dtype) -> None:
    frozen, whole = layer(storage, dtype)
    kind, size = STORED[storage], frozen.low_bit.hadamard_size
    assert frozen.low_bit[:2] == (kind, kind) and (size > 0) == (storage == "int8 rotated")
    x, grad = random(ROWS, IN, seed=2).to(dtype).requires_grad_(), random(ROWS, OUT, seed=3).to(dtype)
    y = frozen.apply(x)
    y.backward(grad)
    assert y.dtype == x.grad.dtype == dtype
    wide = x.detach().double()
    bias = frozen.bias.double()
    slack = SUMS[dtype]
    expected = wide @ whole.T + bias
    # In 16 bits x is size and divided in them too, on a CPU.
    slack_bound = slack * (wide.abs() @ whole.abs().T + expected.abs())
    if size or dtype != torch.float32:
        slack_bound = slack_bound + 2 * slack * wide.norm(dim=1, keepdim=True) * whole.norm(dim=1)
    assert ((y.double() - expected).abs() <= rounding(wide, whole, kind, size) + slack_bound).all()
    assert (y.double() - expected).norm() > 1e-4 * expected.norm()  # it is not the full matmul
    wide, expected = grad.double(), grad.double() @ whole
    scale = frozen.scale if frozen.layout is None else frozen.parts[0]
    by_row = torch.ones(()).double() if scale is None else scale.double().view(-1)
    codes = whole / by_row.view(-1, 1) if scale is not None else whole
    bound = rounding(wide * by_row, hadamard.rotate(codes, size).T if size else codes.T, kind)
    if size:  # each is a sum of a group's, by 1/√size
        bound = bound.unflatten(-1, (-1, size)).sum(-1, keepdim=True).expand(-1, -1, size).flatten(1) / size**0.5
    slack_bound = (
        2 * slack * (wide.abs() @ whole.abs() + expected.abs() + wide.norm(dim=1, keepdim=True) * whole.norm(dim=0))
    )
    assert ((x.grad.double() - expected).abs() <= bound + slack_bound).all()
    assert (x.grad.double() - expected).norm() > 1e-4 * expected.norm()


@pytest.mark.parametrize("storage", ["int8", "int8 by rows", "int8 rotated"])
def test_int8_is_exact_but_for_the_rounding_of_x_and_dy(storage: str) -> None:
    frozen, _ = layer(storage)
    size = frozen.low_bit.hadamard_size
    scale = frozen.parts[0].reshape(1, -1)
    codes = frozen.weight.long()
    x, grad = random(ROWS, IN, seed=2).requires_grad_(), random(ROWS, OUT, seed=3)

    def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
        steps = rows.abs().amax(-1, keepdim=True) / 127
        return (rows / steps).round().clamp(-128, 127).long(), steps

    y = frozen.apply(x)
    y.backward(grad)
    levels, steps = rounded(hadamard.rotate(x.detach(), size) if size else x.detach())
    assert torch.equal(y, (levels @ codes.T).float() * (steps * scale) + frozen.bias)
    one_scale = scale.numel() == 1
    levels, steps = rounded(grad if one_scale else grad * scale)
    dx = (levels @ codes).float() * (steps * scale if one_scale else steps)
    assert torch.equal(x.grad, hadamard.rotate(dx, size) if size else dx)
    other = matmul.torch_int8_matmul(x.detach(), frozen.weight, scale, frozen.bias, size, torch.float32)
    torch.testing.assert_close(other, y.detach(), rtol=1e-6, atol=1e-6)


@stored
@pytest.mark.parametrize("rows", [1, 31, 33])
def test_few_rows_multiply_in_full(storage: str, rows: int) -> None:
    frozen, _ = layer(storage)
    full = frozen._replace(low_bit=None)
    x, grad = random(rows, IN, seed=2).requires_grad_(), random(rows, OUT, seed=3)
    y = frozen.apply(x)
    y.backward(grad)
    mine, x.grad = x.grad, None
    full.apply(x).backward(grad)
    assert torch.equal(y, full.apply(x)) == torch.equal(mine, x.grad) == (rows < 32)


@pytest.mark.parametrize("storage", ["int8 by rows", "int8 rotated", "fp8 by rows"])
def test_spread_of_the_output_channels_scales_costs_dx_nothing(storage: str) -> None:
    """By powers of two, from 1e-3 to 1e3, which change nothing else: dy / spread on spread · W is dy on W."""
    frozen, _ = layer(storage)
    spread = torch.tensor(2.0) ** torch.randint(-10, 11, (OUT, 1), generator=torch.Generator().manual_seed(5))
    assert spread.max() / spread.min() == 2**20
    uneven = frozen._replace(parts=(frozen.parts[0] * spread,))
    grads = []
    for linear, grad in ((frozen, random(ROWS, OUT, seed=3)), (uneven, random(ROWS, OUT, seed=3) / spread.T)):
        x = random(ROWS, IN, seed=2).requires_grad_()
        linear.apply(x).backward(grad)
        grads.append(x.grad)
    assert torch.equal(*grads)


@stored
@pytest.mark.parametrize("compiled", [False, True])
def test_the_stored_bytes_wait_for_backward_and_nothing_else(storage: str, compiled: bool) -> None:
    frozen, _ = layer(storage, torch.bfloat16)
    x = random(ROWS, IN, seed=2).bfloat16().requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(lambda frozen, x: frozen.apply(x), backend="aot_eager") if compiled else type(frozen).apply
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = run(frozen, x)
    scale = frozen.scale if frozen.layout is None else frozen.parts[0]
    inputs = [frozen.weight] if scale is None else [frozen.weight, scale]
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in inputs} and len(saved) == len(inputs)
    y.backward(torch.ones_like(y))
    assert x.grad is not None and x.grad.abs().max() > 0


@stored
@pytest.mark.parametrize("sides", [(FULL, None), (None, FULL)])
def test_one_direction_alone_can_be_full(storage: str, sides: tuple[str | None, str | None]) -> None:
    frozen, _ = layer(storage)
    matmul = frozen.low_bit
    mixed = LowBitMatmul(sides[0] or matmul.forward, sides[1] or matmul.backward, matmul.hadamard_size)
    results = {}
    for name, low_bit in {"low": matmul, "mixed": mixed, "full": None}.items():
        x = random(ROWS, IN, seed=2).requires_grad_()
        y = frozen._replace(low_bit=low_bit).apply(x)
        y.backward(random(ROWS, OUT, seed=3))
        results[name] = y, x.grad
    for number, side in enumerate(sides):
        matching, other = ("full", "low") if side == FULL else ("low", "full")
        assert torch.equal(results["mixed"][number], results[matching][number])
        assert not torch.equal(results["mixed"][number], results[other][number])


# No file has plain fp8 so that core reads it without a cast; inductor takes seconds, and shows the same in each format.
IN_GRAPHS = [(storage, "aot_eager") for storage in STORED if storage != "plain fp8"]
IN_GRAPHS += one_in(2, [("int8 rotated", "inductor"), ("fp8", "inductor")])


@pytest.mark.parametrize(("storage", "backend"), IN_GRAPHS)
def test_layers_that_are_stored_alike_share_one_whole_graph(storage: str, backend: str) -> None:
    models = [core_layer(storage, random(OUT, IN, seed=seed, std=0.1), random(OUT, seed=seed)) for seed in (1, 2)]
    linears = [LoraLinear(FrozenWeights(model, CPU, torch.float32), LAYER) for model in models]
    torch._dynamo.reset()
    graphs = Graphs()
    run = torch.compile(lambda linear, x: linear(x), backend=backend, fullgraph=True, dynamic=False)
    for linear in linears:
        full = linear.storage
        low = linear.frozen().low_bit_matmul(STORED[storage])
        linear.set_low_bit(low)
        assert linear.storage != full
        x, grad = random(2, ROWS, IN, seed=3).requires_grad_(), random(2, ROWS, OUT, seed=4)
        y = run(linear, x)
        y.backward(grad)
        mine, x.grad = x.grad, None
        expected = linear(x)
        expected.backward(grad)
        # A row's largest number is not split: one step of x or dy on one weight is the most that two roundings differ.
        largest = linear.frozen().full().abs().max()
        for actual, reference, rounded in ((y, expected, x), (mine, x.grad, grad)):
            step = rounded.detach().abs().amax() * (2**-3 if STORED[storage] == FP8 else 2 / 127)
            exact = backend == "aot_eager"
            assert torch.equal(actual, reference) if exact else (actual - reference).abs().max() <= step * largest
    assert graphs() == 1 and graphs.breaks == 0 and linears[0].storage == linears[1].storage


@stored
def test_a_stored_weight_costs_the_partitioner_as_much_as_a_plain_one(storage: str) -> None:
    frozen, whole = layer(storage)
    x = random(2, ROWS, IN).requires_grad_()

    def flops(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        return counter.get_total_flops()

    assert flops(lambda: frozen.apply(x)) == flops(lambda: torch.nn.functional.linear(x, whole.float()))


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_weights_stored_otherwise_have_no_such_matmul(storage: str) -> None:
    frozen, _ = layer(storage)
    other = {INT8: FP8, FP8: INT8}[STORED[storage]]
    assert frozen.low_bit_matmul(other) is None
    plain = FrozenLinear(random(OUT, IN), None, None)
    assert plain.low_bit_matmul(INT8) is None and plain.low_bit_matmul(FP8) is None
    mx, _ = stored_layer("mxfp8", random(OUT, IN), random(OUT))
    assert mx.low_bit_matmul(INT8) is None and mx.low_bit_matmul(FP8) is None


@stored
def test_a_row_of_zeros_stays_zero_and_what_is_not_finite_is_not_lost(storage: str) -> None:
    frozen, _ = layer(storage)
    frozen = frozen._replace(bias=None)
    x = random(ROWS, IN)
    x[0], x[1, 3] = 0.0, torch.inf
    y = frozen.apply(x)
    assert torch.equal(y[0], torch.zeros(OUT)) and not y[1].isfinite().all() and y[2:].isfinite().all()
