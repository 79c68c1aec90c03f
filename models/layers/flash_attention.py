"""FlashAttention 2, 3 and 4 (arXiv 2205.14135, 2307.08691, 2407.08608), each from its own package, as one op.

A compiler can't trace their kernels: the op is opaque to it, so that a block stays one graph. The packages' public
functions return the log-sum-exp with the result, and their backward kernels take it, as in their autograd functions.
"""

import importlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

DEVICES = ("cuda",)
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIM = 128


@torch.library.custom_op("tessera::flash_attention", mutates_args=())
def flash_attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, package: str) -> tuple[Tensor, Tensor]:
    """Run attention on the kernels of one of PACKAGES, named by its module.

    q: (B, T, H, D); k, v: (B, S, H, D) → (B, T, H, D) and the log-sum-exp of the scores, fp32 (B, H, T). bounds, int32
    (N + 1,): the B·T rows are N sequences that do not attend to one another; then S = T, and the log-sum-exp is (H,
    B·T).
    """
    out, lse = PACKAGES[package].forward(_module(package), *_rows(bounds, q, k, v), _sequences(bounds, q))
    return out.reshape(q.shape).contiguous(), lse.contiguous()


@torch.library.custom_op("tessera::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor | None, package: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `flash_attention` with respect to q, k and v, in their shapes."""
    rows = _rows(bounds, grad.contiguous(), q, k, v, out)
    dq, dk, dv = PACKAGES[package].backward(_module(package), *rows, lse, _sequences(bounds, q))
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _rows(bounds: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if bounds is None else tuple(x.flatten(0, 1) for x in tensors)


def _sequences(bounds: Tensor | None, q: Tensor) -> dict[str, Any]:
    """Return the varlen arguments of all three packages; none for a batch of equal lengths."""
    if bounds is None:
        return {}
    size = q.shape[1]
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": size, "max_seqlen_k": size}


@flash_attention.register_fake
def _(q, k, v, bounds, package):
    batch, size, heads, _ = q.shape
    shape = (batch, heads, size) if bounds is None else (heads, batch * size)
    return _like(q), q.new_empty(shape, dtype=torch.float32)


@flash_attention_backward.register_fake
def _(grad, q, k, v, out, lse, bounds, package):
    return _like(q), _like(k), _like(v)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    q, k, v, bounds, ctx.package = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, bounds)


def _backward(ctx, grad, _):
    if grad is None:
        return None, None, None, None, None
    return *flash_attention_backward(grad, *ctx.saved_tensors, ctx.package), None, None


flash_attention.register_autograd(_backward, setup_context=_save)


# The partitioner decides by these which outputs to save and which to recompute; an op without a formula counts as free.


def _flops(q_shape, k_shape, *_, out_shape=None, **__) -> int:
    """Count two matmuls of B·H·T·S·D."""
    return 4 * math.prod(q_shape) * k_shape[1]


def _backward_flops(grad_shape, q_shape, k_shape, *_, out_shape=None, **__) -> int:
    """Count five of them: the scores are recomputed."""
    return 10 * math.prod(grad_shape) * k_shape[1]


register_flop_formula(torch.ops.tessera.flash_attention)(_flops)
register_flop_formula(torch.ops.tessera.flash_attention_backward)(_backward_flops)


# The packages. All take tensors of (B, T, H, D), or (rows, H, D) with `sequences`.


def _forward_2(module: Any, q: Tensor, k: Tensor, v: Tensor, sequences: dict[str, Any]) -> tuple[Tensor, Tensor]:
    function = module.flash_attn_varlen_func if sequences else module.flash_attn_func
    return function(q, k, v, **sequences, return_attn_probs=True)[:2]


def _forward_4(module: Any, q: Tensor, k: Tensor, v: Tensor, sequences: dict[str, Any]) -> tuple[Tensor, Tensor]:
    function = module.flash_attn_varlen_func if sequences else module.flash_attn_func
    return function(q, k, v, **sequences, return_lse=True)[:2]


def _backward_2(module, grad, q, k, v, out, lse, sequences: dict[str, Any]) -> tuple[Tensor, ...]:
    """Call the backward of FlashAttention 2.7 or newer, whose window is two arguments."""
    function = module._flash_attn_varlen_backward if sequences else module._flash_attn_backward
    grads = {"dq": _like(q), "dk": _like(k), "dv": _like(v)}
    plain: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": q.shape[-1] ** -0.5, "causal": False, "softcap": 0.0}
    plain |= {"window_size_left": -1, "window_size_right": -1, "alibi_slopes": None, "deterministic": False}
    function(grad, q, k, v, out, lse, **grads, **sequences, **plain)
    return tuple(grads.values())


def _backward_3(module, grad, q, k, v, out, lse, sequences: dict[str, Any]) -> tuple[Tensor, ...]:
    grads = {"dq": _like(q), "dk": _like(k), "dv": _like(v)}
    plain = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "sequed_q", "sequed_k"))
    plain |= {"is_causal": False, "softmax_scale": q.shape[-1] ** -0.5} | sequences
    module._flash_attn_backward(grad, q, k, v, out, lse, **grads, **plain)
    return tuple(grads.values())


def _backward_4(module, grad, q, k, v, out, lse, sequences: dict[str, Any]) -> tuple[Tensor, ...]:
    return module._flash_attn_bwd(q, k, v, out, grad, lse, softmax_scale=q.shape[-1] ** -0.5, **sequences)


class Package(NamedTuple):
    """One of the packages.

    title: name for the user.
    generations: NVIDIA compute capabilities (major) that it has specialised kernels for.
    forward: (module, q, k, v, sequences) → result, log-sum-exp.
    backward: (module, grad, q, k, v, result, log-sum-exp, sequences) → three gradients.
    """

    title: str
    generations: tuple[int, ...]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]


# By the module that holds both the public functions and their backward kernel. `flash_attn` itself won't do: if only
# FlashAttention 4 is installed it is an empty namespace.
PACKAGES = {
    "flash_attn_interface": Package("FlashAttention 3", (9,), _forward_2, _backward_3),
    "flash_attn.cute.interface": Package("FlashAttention 4", (9, 10, 11, 12), _forward_4, _backward_4),
    "flash_attn.flash_attn_interface": Package("FlashAttention 2", (8,), _forward_2, _backward_2),
}


def _module(package: str) -> Any:
    return importlib.import_module(package)


@lru_cache
def flash_package(device: torch.device, dtype: torch.dtype) -> str:
    """Choose the package to run on this device: the first that is installed and computes correct values there.

    Those with kernels for its generation are tried first. Raises ValueError if there is none.
    """
    generation = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    faults = []
    for name in sorted(PACKAGES, key=lambda name: generation not in PACKAGES[name].generations):
        fault = _import_fault(name)
        if fault == "":
            continue
        if device.type not in DEVICES or dtype not in DTYPES:
            raise ValueError(
                f"attention is 'flash-attn', which needs a GPU and fp16 or bf16, not {device.type} in {dtype}."
            )
        fault = fault or _kernel_fault(name, device, dtype)
        if fault is None:
            return name
        faults.append(f"{PACKAGES[name].title}: {fault}")
    if faults:
        raise ValueError(f"attention is 'flash-attn', which does not work here ({'; '.join(faults)}); choose 'auto'.")
    raise ValueError("attention is 'flash-attn', which is not installed here; choose 'auto', or install flash-attn.")


def _import_fault(package: str) -> str | None:
    """Import a package. Returns its fault, "" if it is not installed, None if it imports."""
    try:
        _module(package)
    except Exception as error:  # one built for another torch or CUDA fails in any way
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        return "" if missing and f"{package}.".startswith(f"{missing}.") else _first_line(error)
    return None


def _kernel_fault(package: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run a package on a small batch, whole and as sequences, one of them empty. Returns the fault, or None."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 32, 2, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(4)]
    whole, sequences = (
        torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 32, 64], [0, 32, 32, 48, 64])
    )
    try:
        for bounds, op_bounds in ((whole, None), (sequences, sequences)):
            q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
            with torch.enable_grad():
                results = flash_attention(q, k, v, op_bounds, package)[0], _plain(q, k, v, bounds)
                actual, expected = ([out, *torch.autograd.grad(out, (q, k, v), tensors[3])] for out in results)
            # Written so that NaN fails the comparison.
            near = ((x - y).float().norm() <= 0.05 * y.float().norm() for x, y in zip(actual, expected, strict=True))
            if not all(near):
                return "its values are not those of attention"
    except Exception as error:
        return _first_line(error)
    return None


def _plain(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Compute attention within each sequence, in fp32."""
    owner = torch.bucketize(torch.arange(q.shape[0] * q.shape[1], device=q.device), bounds, right=True)
    q_rows, k_rows, v_rows = (x.flatten(0, 1).transpose(0, 1).float() for x in (q, k, v))
    scores = (q_rows @ k_rows.mT * q.shape[-1] ** -0.5).masked_fill(owner[:, None] != owner, -torch.inf)
    out = scores.softmax(-1) @ v_rows
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0][:100] if lines else ''}"
