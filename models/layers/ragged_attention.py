"""Attention over the first tokens of each sample in a batch, as one op: static shapes outside, ragged inside.

A dense mask would rule out the fast kernels. The op runs them on the valid tokens, without a mask, and saves the
log-sum-exp of the scores for the backward, like torch's own SDPA.
"""

import math
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("tessera::ragged_attention", mutates_args=())
def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, only_cudnn: bool = False
) -> tuple[Tensor, Tensor]:
    """Run attention among the first lengths[b] tokens of sample b; the output after them is zero.

    q, k, v: (B, T, H, D); lengths: (B,), int64 on the CPU, so that reading them needs no sync and no graph depends on
    them; only_cudnn: use cuDNN's kernel, not SDPA's choice → (B, T, H, D) and the log-sum-exp of the scores, fp32
    (B, H, T or a little more), for the backward.
    """
    runs, whole = _runs(lengths, q.shape[1])
    kernel = _kernel(q, k, v, whole, only_cudnn)
    out = q if whole else _empty(q)
    lse = q.new_zeros(q.shape[0], q.shape[2], _lse_width(q.shape[1]), dtype=_wide(q.dtype))
    for rows, length in runs:
        part, part_lse = kernel.forward(*(x[rows, :length].transpose(1, 2) for x in (q, k, v)))
        lse[rows, :, : part_lse.shape[2]] = part_lse
        out = part.transpose(1, 2).contiguous() if whole else _filled(out, rows, length, part)
    return out, lse


@torch.library.custom_op("tessera::ragged_attention_backward", mutates_args=())
def ragged_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Tensor,
    only_cudnn: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `ragged_attention` with respect to q, k and v, each (B, T, H, D)."""
    runs, whole = _runs(lengths, q.shape[1])
    kernel = _kernel(q, k, v, whole, only_cudnn)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    dq, dk, dv = (q, k, v) if whole else (_empty(q), _empty(k), _empty(v))
    for rows, length in runs:
        dout, q_part, k_part, v_part, result = (x[rows, :length].transpose(1, 2) for x in (grad, q, k, v, out))
        parts = kernel.backward(dout, q_part, k_part, v_part, result, lse[rows])
        if whole:
            dq, dk, dv = (part.transpose(1, 2).contiguous() for part in parts)
        else:
            dq, dk, dv = (_filled(d, rows, length, p) for d, p in zip((dq, dk, dv), parts, strict=True))
    return dq, dk, dv


def _runs(lengths: Tensor, size: int) -> tuple[list[tuple[slice, int]], bool]:
    """Group neighbours of equal length. Also returns whether one group is the whole batch in full length."""
    runs: list[tuple[slice, int]] = []
    start = 0
    for length, group in groupby(lengths.tolist()):
        assert 0 < length <= size, (length, size)
        stop = start + len(list(group))
        runs.append((slice(start, stop), length))
        start = stop
    return runs, len(runs) == 1 and runs[0][1] == size


def _empty(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _filled(whole: Tensor, rows: slice, length: int, part: Tensor) -> Tensor:
    """Write part (b, H, length, D) into its rows, and zeros after it."""
    whole[rows, :length] = part.transpose(1, 2)
    whole[rows, length:] = 0
    return whole


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _lse_width(length: int) -> int:
    """Return the width of the log-sum-exp: CUDA's memory-efficient kernel rounds it up to a multiple of 32."""
    return length if torch.version.hip else -(-length // 32) * 32


@ragged_attention.register_fake
def _(q, k, v, lengths, only_cudnn=False):
    return _empty(q), q.new_empty(q.shape[0], q.shape[2], _lse_width(q.shape[1]), dtype=_wide(q.dtype))


@ragged_attention_backward.register_fake
def _(grad, q, k, v, out, lse, lengths, only_cudnn=False):
    return _empty(q), _empty(k), _empty(v)


def _save(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.only_cudnn = inputs[4]


def _backward(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    return *ragged_attention_backward(grad, *ctx.saved_tensors, ctx.only_cudnn), None, None


ragged_attention.register_autograd(_backward, setup_context=_save)


# The partitioner decides by these which outputs to save and which to recompute; an op without a formula counts as free.


def _flops(q_shape, *_, out_shape=None, **__) -> int:
    """Count two matmuls of B·H·T·T·D in full length."""
    return 4 * math.prod(q_shape) * q_shape[1]


def _backward_flops(grad_shape, *_, out_shape=None, **__) -> int:
    """Count five of them: the scores are recomputed."""
    return 10 * math.prod(grad_shape) * grad_shape[1]


register_flop_formula(torch.ops.tessera.ragged_attention)(_flops)
register_flop_formula(torch.ops.tessera.ragged_attention_backward)(_backward_flops)


# The kernels of torch, each as two functions over (B, H, T, D) without a mask.


class _Kernel(NamedTuple):
    """Forward and backward of one of torch's kernels, over q, k and v (B, H, T, D).

    forward: (q, k, v) → out, log-sum-exp (B, H, T or `_lse_width`).
    backward: (grad, q, k, v, out, log-sum-exp) → three gradients; its log-sum-exp may have more rows than q.
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _kernel(q: Tensor, k: Tensor, v: Tensor, whole: bool, only_cudnn: bool) -> _Kernel:
    """Return the kernel that torch's SDPA would choose on this device, or cuDNN's on request.

    cuDNN builds a new plan for each length, which costs more than it saves if captions differ: it is used for batches
    of full length only.
    """
    if only_cudnn:
        return _OF_CUDA[SDPBackend.CUDNN_ATTENTION.value]
    kernels = {"cpu": _OF_CPU, "cuda": _OF_CUDA}.get(q.device.type)
    if kernels is None:
        return _MATH
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    choice = torch._fused_sdp_choice(q, k, v)
    if choice == SDPBackend.CUDNN_ATTENTION.value and not whole:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            choice = torch._fused_sdp_choice(q, k, v)
    return kernels.get(choice, _MATH)


_aten = torch.ops.aten


def _unused(q: Tensor) -> Tensor:
    """Make a placeholder for the random state, which only dropout reads."""
    return q.new_empty(2, dtype=torch.int64)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)


def _cpu_backward(grad, q, k, v, out, lse):
    # It reads the log-sum-exp as (B, T, H) in memory.
    lse = lse[:, :, : q.shape[2]].transpose(1, 2).contiguous().transpose(1, 2)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, False)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention(q, k, v)[:2]


def _flash_backward(grad, q, k, v, out, lse):
    size, none = q.shape[2], _unused(q)
    lse = lse[:, :, :size].contiguous()
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, size, size, 0.0, False, none, none
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[:2]


def _efficient_backward(grad, q, k, v, out, lse):
    lse, none = lse[:, :, : _lse_width(q.shape[2])].contiguous(), _unused(q)
    needed = [True, True, True, False]
    grads = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, none, none, 0.0, needed
    )
    return grads[:3]


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    return out, lse.reshape(*q.shape[:3])


def _cudnn_backward(grad, q, k, v, out, lse):
    size, none = q.shape[2], _unused(q)
    lse = lse[:, :, :size, None].contiguous()
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, none, none, None, None, None, size, size, 0.0, False
    )


def _math_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute softmax(q·kᵀ / sqrt(D))·v."""
    scores = _scores(q, k)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.to(lse.dtype)).to(q.dtype), lse


def _math_backward(grad, q, k, v, out, lse):
    """Compute, with P the softmax, dV = Pᵀ·dO and dS = P ∘ (dO·Vᵀ − rowsum(dO ∘ O)) (arXiv 2205.14135, appendix
    B.2)."""
    wide, scale = lse.dtype, q.shape[-1] ** -0.5
    p = (_scores(q, k) - lse[:, :, : q.shape[2], None]).exp()
    dout = grad.to(wide)
    ds = p * (dout @ v.to(wide).mT - (dout * out.to(wide)).sum(-1, keepdim=True)) * scale
    dq = ds @ k.to(wide)
    dk = ds.mT @ q.to(wide)
    dv = p.mT @ dout
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    wide = _wide(q.dtype)
    return q.to(wide) @ k.to(wide).mT * q.shape[-1] ** -0.5


_MATH = _Kernel(_math_forward, _math_backward)
_OF_CPU = {SDPBackend.FLASH_ATTENTION.value: _Kernel(_cpu_forward, _cpu_backward)}
_OF_CUDA = {
    SDPBackend.FLASH_ATTENTION.value: _Kernel(_flash_forward, _flash_backward),
    SDPBackend.EFFICIENT_ATTENTION.value: _Kernel(_efficient_forward, _efficient_backward),
    SDPBackend.CUDNN_ATTENTION.value: _Kernel(_cudnn_forward, _cudnn_backward),
}
