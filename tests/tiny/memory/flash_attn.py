"""Stand-ins for the packages of FlashAttention 2, 3 and 4, which need a GPU: modules of the same names whose functions
have the same signatures and compute attention by its formula, on real tensors only, like the kernels."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

NAMES = {
    "2": "flash_attn.flash_attn_interface",
    "3": "flash_attn_interface",
    "4": "flash_attn.cute.interface",
}


EVERY_DTYPE = (torch.float32, torch.bfloat16, torch.float16)


class FakeKernels:
    """The kernels of one package, and how often each function was called.

    scale: what results are multiplied by, for a package whose values are wrong.
    dtypes: of the tensors that they take.
    """

    def __init__(self, scale: float = 1.0, dtypes: Sequence[torch.dtype] = EVERY_DTYPE) -> None:
        self.calls: list[str] = []
        self.scale, self.dtypes = scale, dtypes

    def forward(self, name: str, q: Tensor, k: Tensor, v: Tensor, *ragged: Any) -> tuple[Tensor, Tensor]:
        self.called(name, q, k, v)
        out, lse = q.new_empty(q.shape), torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
        for q_rows, k_rows in _sequences(q, k, *ragged):
            scores = _scores(q[q_rows], k[k_rows])
            out[q_rows] = _heads(scores.softmax(-1) @ _heads(v[k_rows]).float()).to(q.dtype) * self.scale
            lse[(*q_rows[:-1], slice(None), q_rows[-1])] = scores.logsumexp(-1)
        return out, lse

    def backward(self, name: str, dout, q, k, v, out, lse, *ragged: Any) -> list[Tensor]:
        """dV = Pᵀ·dO, dS = P ∘ (dO·Vᵀ − rowsum(dO ∘ O)), with P from the log-sum-exp that the forward gave."""
        self.called(name, dout, q, k, v, out, lse)
        scale, grads = q.shape[-1] ** -0.5, [torch.full_like(x, torch.nan) for x in (q, k, v)]
        for q_rows, k_rows in _sequences(q, k, *ragged):
            p = (_scores(q[q_rows], k[k_rows]) - lse[(*q_rows[:-1], slice(None), q_rows[-1])][..., None]).exp()
            grad, value, result = (_heads(x).float() for x in (dout[q_rows], v[k_rows], out[q_rows]))
            ds = p * (grad @ value.mT - (grad * result).sum(-1, keepdim=True)) * scale
            parts = ds @ _heads(k[k_rows]).float(), ds.mT @ _heads(q[q_rows]).float(), p.mT @ grad
            for whole, rows, part in zip(grads, (q_rows, k_rows, k_rows), parts, strict=True):
                whole[rows] = _heads(part).to(whole.dtype)
        return grads

    def called(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            assert tensor.stride(-1) == 1 and tensor.data_ptr() is not None  # a traced tensor has no address
        if tensors[0].dtype not in self.dtypes:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        self.calls.append(name)


def _heads(x: Tensor) -> Tensor:
    """(…, T, H, D) ↔ (…, H, T, D)."""
    return x.transpose(-3, -2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return _heads(q).float() @ _heads(k).float().mT * q.shape[-1] ** -0.5


def _sequences(q: Tensor, k: Tensor, cu_q: Any = None, cu_k: Any = None, max_q: Any = None, max_k: Any = None) -> Any:
    """The rows that see one another, as indices into q and into k."""
    if cu_q is None:
        assert q.ndim == k.ndim == 4 and len(q) == len(k)
        return [((slice(None), slice(None)), (slice(None), slice(None)))]
    assert q.ndim == k.ndim == 3 and cu_q.dtype == cu_k.dtype == torch.int32
    edges = [list(zip(cu.tolist(), cu.tolist()[1:], strict=False)) for cu in (cu_q, cu_k)]
    assert edges[0][-1][1] == len(q) and max(b - a for a, b in edges[0]) <= max_q
    assert edges[1][-1][1] == len(k) and max(b - a for a, b in edges[1]) <= max_k
    return [((slice(*a),), (slice(*b),)) for a, b in zip(*edges, strict=True)]


def _package_2(kernels: FakeKernels) -> dict[str, Callable[..., Any]]:
    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False,
    ):  # fmt: skip
        out, lse = kernels.forward("flash_attn_func", q, k, v)
        return (out, lse, None) if return_attn_probs else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = kernels.forward("flash_attn_varlen_func", q, k, v, *ragged)
        return (out, lse, None) if return_attn_probs else out

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, causal) == (0.0, q.shape[-1] ** -0.5, False)
        assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
        _fill((dq, dk, dv), kernels.backward("_flash_attn_backward", dout, q, k, v, out, softmax_lse))

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, causal) == (0.0, q.shape[-1] ** -0.5, False)
        assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        grads = kernels.backward("_flash_attn_varlen_backward", dout, q, k, v, out, softmax_lse, *ragged)
        _fill((dq, dk, dv), grads)

    return locals()


def _package_3(kernels: FakeKernels) -> dict[str, Callable[..., Any]]:
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        out, lse = kernels.forward("flash_attn_func", q, k, v)
        return (out, lse) if return_attn_probs else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = kernels.forward("flash_attn_varlen_func", q, k, v, *ragged)
        return (out, lse) if return_attn_probs else out

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k,
        dq, dk, dv, softmax_scale, is_causal, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert (sequed_q, sequed_k, softmax_scale, is_causal) == (None, None, q.shape[-1] ** -0.5, False)
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        name = "_flash_attn_backward" if cu_seqlens_q is None else "_flash_attn_backward of sequences"
        _fill((dq, dk, dv), kernels.backward(name, dout, q, k, v, out, softmax_lse, *ragged))

    return locals()


def _package_4(kernels: FakeKernels) -> dict[str, Callable[..., Any]]:
    def flash_attn_func(
        q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None),
        learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
        block_sparse_tensors_bwd=None, return_lse=False,
    ):  # fmt: skip
        out, lse = kernels.forward("flash_attn_func", q, k, v)
        return out, lse if return_lse else None

    def flash_attn_varlen_func(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
        softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
        block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None,
        seqlen_k_per_split=None, disable_scheduler_metadata=False,
    ):  # fmt: skip
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = kernels.forward("flash_attn_varlen_func", q, k, v, *ragged)
        return out, lse if return_lse else None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
        num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
        AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
        score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
        learnable_sink=None,
    ):  # fmt: skip
        assert softmax_scale == q.shape[-1] ** -0.5
        ragged = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        name = "_flash_attn_bwd" if cu_seqlens_q is None else "_flash_attn_bwd of sequences"
        return tuple(kernels.backward(name, dout, q, k, v, out, lse, *ragged))

    return locals()


def _fill(targets: tuple[Tensor, ...], grads: list[Tensor]) -> None:
    for tensor, value in zip(targets, grads, strict=True):
        assert tensor.is_contiguous()
        tensor.copy_(value)


_MADE_BY = {"2": _package_2, "3": _package_3, "4": _package_4}


@contextmanager
def installed(
    *versions: str, scale: float = 1.0, dtypes: Sequence[torch.dtype] = EVERY_DTYPE
) -> Iterator[dict[str, FakeKernels]]:
    """Install these versions, and no other, on the CPU and in these dtypes."""
    from tessera.models.layers import flash_attention

    monkeypatch = pytest.MonkeyPatch()
    kernels = {version: FakeKernels(scale, dtypes) for version in versions}
    for module in NAMES.values():
        for name in _parents(module):
            monkeypatch.setitem(sys.modules, name, None)
    for version in kernels:
        for name in _parents(NAMES[version]):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for version, fake in kernels.items():
        functions = {name: f for name, f in _MADE_BY[version](fake).items() if name != "kernels"}
        vars(sys.modules[NAMES[version]]).update(functions)
    monkeypatch.setattr(flash_attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(flash_attention, "DTYPES", tuple(dtypes))
    flash_attention.flash_package.cache_clear()
    try:
        yield kernels
    finally:
        flash_attention.flash_package.cache_clear()
        monkeypatch.undo()


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
