"""Widening of stored weights: code · scale into the compute dtype, in one kernel on a GPU.

A cast and then a multiplication move 7 bytes for each one-byte code of a 16-bit result, one kernel 3. ComfyUI brings
such kernels for most formats where torch is built for CUDA 13; for the others, and elsewhere, there is one in Triton.
Without either it is the pair. The scale stays with the weight: inside such a kernel it costs nothing, on the product's
result it would be a pass over that, and in fp16 the product without it overflows.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from comfy import quant_ops
from torch import Tensor

_LOG = logging.getLogger(__name__)
Widen = Callable[..., Tensor]
DEVICES = ("cuda",)


def widened(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Widen a weight (out, in) to `dtype`. scale: fp32, a scalar or (out, 1)."""
    if scale is None:
        return codes.to(dtype)
    if codes.device.type in DEVICES:
        if _fits_core(codes, scale, dtype):
            return _comfy_kitchen().dequantize_per_tensor_fp8(codes, scale, dtype)
        rows, columns = codes.shape
        result = widened_by_triton(codes, scale, (rows, columns), dtype)
        if result is not None:
            return result
    return codes.to(dtype) * scale.to(dtype)


def widened_by_triton(
    codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype, mx: bool = False
) -> Tensor | None:
    """Widen in one kernel of ours to `shape`, (out, in), or return None where there is none.

    codes: fp8 or int8 of that shape, padded or not. scale: as in `widened`, with `mx` the block scales of mxfp8.
    """
    if codes.device.type not in DEVICES or codes.stride(-1) != 1 or not scale.is_contiguous():
        return None
    if not mx and (scale.dtype != torch.float32 or (scale.numel() != 1 and tuple(scale.shape) != (shape[0], 1))):
        return None
    widen = _triton_kernel(codes.device, dtype)
    return None if widen is None else widen(codes, scale, shape, dtype, mx)


def _comfy_kitchen() -> Any:
    return getattr(quant_ops, "ck", None)  # missing where comfy-kitchen is not installed


@functools.cache
def core_has_kernel(function: str) -> bool:
    """Return True if comfy-kitchen runs this function of its own on the GPU by more than torch's ops."""
    kitchen = _comfy_kitchen()
    backends = {} if kitchen is None else kitchen.list_backends()
    return any(
        backend["available"] and not backend["disabled"] and function in backend["capabilities"]
        for name, backend in backends.items()
        if name != "eager"
    )


def _fits_core(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Return True if core's kernel can take these: one scale, and codes that it reads in parts of 8, past the end if
    they do not come out even (`dequantize_fp8_tensor_kernel` of comfy-kitchen)."""
    even = bool(codes.numel() % 16 == 0 and codes.storage_offset() % 16 == 0 and codes.is_contiguous())
    known = dtype in (torch.float32, torch.float16, torch.bfloat16)
    return scale.numel() == 1 and even and known and core_has_kernel("dequantize_per_tensor_fp8")


@functools.cache
def _triton_kernel(device: torch.device, dtype: torch.dtype) -> Widen | None:
    """Return the Triton kernel if there is Triton and it gives the right values here."""
    try:
        from .widening_kernel import widen

        codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[None]
        found = widen(codes, torch.ones((), device=device), (1, 256), dtype)
        if torch.equal(found.nan_to_num(), codes.to(dtype).nan_to_num()):
            return widen
        _LOG.warning("Triton widens fp8 weights wrong on this GPU; torch does it in two steps.")
    except ImportError:
        pass
    except Exception as error:  # no C compiler, a GPU that this Triton does not know: anything
        _LOG.info("Triton does not run here (%s); torch widens stored weights in two steps.", error)
    return None
