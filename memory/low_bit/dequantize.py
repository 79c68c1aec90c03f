"""Dequantise stored weights: code · scale into the compute dtype, in one kernel on a GPU.

A cast followed by a multiplication moves 7 bytes per one-byte code of a 16-bit result, a single kernel 3. ComfyUI has
such kernels for most formats if torch is built for CUDA 13; for other formats and builds there is one in Triton.
Without either, both ops run. The scale is applied to the weight: inside such a kernel it costs nothing, on the matmul's
result it would take another pass, and in fp16 the matmul without it overflows.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from comfy import quant_ops
from torch import Tensor

_LOG = logging.getLogger(__name__)
Kernel = Callable[..., Tensor]
DEVICES = ("cuda",)


def dequantize(codes: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantise a weight (out, in) to `dtype`. scale: fp32, a scalar or (out, 1)."""
    if scale is None:
        return codes.to(dtype)
    if codes.device.type in DEVICES:
        if _fits_core(codes, scale, dtype):
            return _comfy_kitchen().dequantize_per_tensor_fp8(codes, scale, dtype)
        rows, columns = codes.shape
        result = dequantize_by_triton(codes, scale, (rows, columns), dtype)
        if result is not None:
            return result
    return codes.to(dtype) * scale.to(dtype)


def dequantize_by_triton(
    codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype, mx: bool = False
) -> Tensor | None:
    """Dequantise by our Triton kernel to `shape`, (out, in), or return None if it is not available.

    codes: fp8 or int8 of that shape, padded or not. scale: as in `dequantize`, with `mx` the block scales of mxfp8.
    """
    if codes.device.type not in DEVICES or codes.stride(-1) != 1 or not scale.is_contiguous():
        return None
    if not mx and (scale.dtype != torch.float32 or (scale.numel() != 1 and tuple(scale.shape) != (shape[0], 1))):
        return None
    kernel = _triton_kernel(codes.device, dtype)
    return None if kernel is None else kernel(codes, scale, shape, dtype, mx)


def _comfy_kitchen() -> Any:
    return getattr(quant_ops, "ck", None)  # missing where comfy-kitchen is not installed


@functools.cache
def core_has_kernel(function: str) -> bool:
    """Return True if comfy-kitchen has a GPU kernel for this function of its own, not only torch's ops."""
    kitchen = _comfy_kitchen()
    backends = {} if kitchen is None else kitchen.list_backends()
    return any(
        backend["available"] and not backend["disabled"] and function in backend["capabilities"]
        for name, backend in backends.items()
        if name != "eager"
    )


def _fits_core(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> bool:
    """Return True if core's kernel supports these: one scale, and codes in multiples of 16, since its
    reads would otherwise go past the end (`dequantize_fp8_tensor_kernel` of comfy-kitchen)."""
    even = bool(codes.numel() % 16 == 0 and codes.storage_offset() % 16 == 0 and codes.is_contiguous())
    dtype_supported = dtype in (torch.float32, torch.float16, torch.bfloat16)
    return scale.numel() == 1 and even and dtype_supported and core_has_kernel("dequantize_per_tensor_fp8")


@functools.cache
def _triton_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Return the Triton kernel if Triton is installed and its values are right on this device."""
    try:
        from .dequantize_kernel import dequantize_codes

        codes = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[None]
        decoded = dequantize_codes(codes, torch.ones((), device=device), (1, 256), dtype)
        if torch.equal(decoded.nan_to_num(), codes.to(dtype).nan_to_num()):
            return dequantize_codes
        _LOG.warning("Triton dequantises fp8 weights wrong on this GPU; torch does it in two steps.")
    except ImportError:
        pass
    except Exception as error:  # no C compiler, a GPU unknown to this Triton, or anything else
        _LOG.info("Triton does not run here (%s); torch dequantises stored weights in two steps.", error)
    return None
