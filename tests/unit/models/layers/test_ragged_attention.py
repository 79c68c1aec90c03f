"""Attention over the first tokens of each sample: its values, its gradients, and that no length makes a graph."""

import pytest
import torch
from tessera.models.layers import ragged_attention as op
from tessera.models.layers.attention import RaggedAttention, pads_as_samples, ragged_attention_function
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZE = 40
LENGTHS = {
    "whole": (SIZE, SIZE, SIZE),
    "one length": (17, 17, 17),
    "different": (33, 40, 1),
    "runs": (20, 20, 31),
}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def make_tensors(dtype: torch.dtype, contiguous: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (3, SIZE, 2, 16) if contiguous else (3, 2, SIZE, 16)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    return [(x if contiguous else x.transpose(1, 2)).detach().requires_grad_() for x in tensors]


def expected(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], grad: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in fp64, each sample by itself; zeros behind its length."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = torch.zeros_like(wide[0])
    rows = []
    for b, length in enumerate(lengths):
        q_b, k_b, v_b = (x[b, :length].transpose(0, 1) for x in wide)
        weights = (q_b @ k_b.mT / q.shape[-1] ** 0.5).softmax(-1)
        rows.append(torch.nn.functional.pad((weights @ v_b).transpose(0, 1), (0, 0, 0, 0, 0, SIZE - length)))
    out = torch.stack(rows)
    return [out.detach(), *torch.autograd.grad(out, wide, grad.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("contiguous", [True, False], ids=["tokens first", "heads first"])
def test_values_and_gradients_are_those_of_each_sample_alone(kernel, lengths, dtype, contiguous):
    tensors = make_tensors(dtype, contiguous)
    grad = torch.randn(3, 2, SIZE, 16, generator=torch.Generator().manual_seed(1)).to(dtype).transpose(1, 2)
    with sdpa_kernel(kernel):
        out, _ = op.ragged_attention(*tensors, torch.tensor(lengths))
        actual = [out, *torch.autograd.grad(out, tensors, grad)]
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    for result, other in zip(actual, expected(*tensors, lengths, grad), strict=True):
        assert result.dtype == dtype and result.is_contiguous()
        assert (result.double() - other).norm() <= bound * other.norm()


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_tokens_behind_a_length_have_no_effect_and_get_no_gradient(lengths):
    tensors = make_tensors(torch.float32)
    lengths = torch.tensor(lengths)
    pads = torch.arange(SIZE) >= lengths[:, None]
    spoilt = [x.detach().masked_fill(pads[..., None, None], torch.nan).requires_grad_() for x in tensors]
    out, other = (op.ragged_attention(*x, lengths)[0] for x in (tensors, spoilt))
    assert torch.equal(out, other) and not out[pads].any()
    for x, gradient in zip(tensors, torch.autograd.grad(other.sum(), spoilt), strict=True):
        assert gradient.isfinite().all() and not gradient[pads].any()
        assert gradient.shape == x.shape


def test_the_op_keeps_torchs_rules_for_custom_ops():
    for lengths in LENGTHS.values():
        torch.library.opcheck(op.ragged_attention, (*make_tensors(torch.float32), torch.tensor(lengths)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_any_lengths_share_one_graph(backend):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    @torch.compile(backend=counter, fullgraph=True, dynamic=False)
    def attend(q, k, v, lengths):
        return op.ragged_attention(q * 1.5, k, v, lengths)[0].flatten(2).sin()

    torch._dynamo.reset()
    for lengths in LENGTHS.values():
        tensors, bounds = make_tensors(torch.float32), torch.tensor(lengths)
        out = attend(*tensors, bounds)
        q, k, v = tensors
        plain = op.ragged_attention(q * 1.5, k, v, bounds)[0].flatten(2).sin()
        assert torch.allclose(out, plain, atol=1e-6)
        for gradient, other in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (out, plain)), strict=True):
            assert torch.allclose(gradient, other, atol=1e-5)
    assert counter.frame_count == 1


def test_a_batch_of_full_length_is_one_call_of_the_kernel_without_a_copy(monkeypatch):
    calls = []
    kernel = op._OF_CPU[SDPBackend.FLASH_ATTENTION.value]

    def forward(*tensors):
        out, lse = kernel.forward(*tensors)
        calls.append(out.data_ptr())
        return out, lse

    monkeypatch.setitem(op._OF_CPU, SDPBackend.FLASH_ATTENTION.value, kernel._replace(forward=forward))
    tensors = [x.detach() for x in make_tensors(torch.float32)]
    out, _ = op.ragged_attention(*tensors, torch.tensor(LENGTHS["whole"]))
    assert calls == [out.data_ptr()]
    op.ragged_attention(*tensors, torch.tensor(LENGTHS["runs"]))
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_the_kernels_of_a_gpu_take_what_they_are_given(name):
    """On tensors without data, through torch's own description of each kernel."""
    kernel = op._OF_CUDA[getattr(SDPBackend, name).value]
    q, k, v = (torch.empty(2, 37, 3, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2) for _ in range(3))
    out, lse = kernel.forward(q, k, v)
    assert out.shape == q.shape and lse.shape[:2] == (2, 3) and 37 <= lse.shape[2] <= op._lse_width(37)
    logsumexp = torch.empty(2, 3, op._lse_width(100), device="meta")
    for gradient in kernel.backward(torch.empty_like(out), q, k, v, out, logsumexp):
        assert gradient.shape == q.shape and gradient.dtype == q.dtype


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_cudnn_by_name_takes_every_length(lengths, monkeypatch):
    """Its place is taken by the formulas: the kernel needs a GPU."""
    calls = []

    def counted(function):
        return lambda *arguments: (calls.append(function), function(*arguments))[1]

    kernel = op._Kernel(counted(op._math_forward), counted(op._math_backward))
    monkeypatch.setitem(op._OF_CUDA, SDPBackend.CUDNN_ATTENTION.value, kernel)
    tensors, lengths = make_tensors(torch.float64), torch.tensor(lengths)
    runs = len(op._runs(lengths, SIZE)[0])
    out, _ = op.ragged_attention(*tensors, lengths, True)
    grad = torch.ones_like(out)
    actual = [out, *torch.autograd.grad(out, tensors, grad)]
    assert calls == [op._math_forward] * runs + [op._math_backward] * runs
    for result, other in zip(actual, expected(*tensors, lengths.tolist(), grad), strict=True):
        assert torch.allclose(result, other)


def test_bounds_are_those_of_samples_and_of_their_pads():
    for lengths in LENGTHS.values():
        bounds = pads_as_samples(torch.tensor(lengths), SIZE, torch.device("cpu"))
        assert bounds.dtype == torch.int32 and bounds.tolist()[::2] == [0, SIZE, 2 * SIZE, 3 * SIZE]
        assert bounds.tolist()[1::2] == [SIZE * b + length for b, length in enumerate(lengths)]


def test_ragged_attention_is_what_auto_gives():
    assert isinstance(ragged_attention_function("auto", torch.device("cpu"), torch.float32), RaggedAttention)
