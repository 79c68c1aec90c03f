"""The attention of the training forward, by the user's choice: torch's SDPA, cuDNN's kernel or flash-attn.

The last two compute in 16 bits. Checks run a 16-bit model in fp32 too; there SDPA stands in for both.

Models whose captions are padded take ragged attention: each sample of a batch sees its own first tokens and no pad.
Models that pad a few long captions only take a mask with them, which no kernel but SDPA's reads.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

import comfy.ldm.modules.attention
import torch
from torch import Tensor

from ...memory.host.to_device import to_device
from . import flash_attention as flash_kernels
from .flash_attention import PACKAGES, flash_attention, flash_package
from .ragged_attention import ragged_attention

Attention = Callable[..., Tensor]
"""(q, k, v, key_mask) → attended tokens, as `sdpa` does; without a mask if it is left out."""

# ComfyUI's functions that compute what torch's SDPA does. Others, such as SageAttention, round to 8 bits or less.
EXACT = frozenset(f"attention_{name}" for name in ("basic", "pytorch", "flash", "xformers", "sub_quad", "split"))


def sdpa(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Run torch's SDPA: q (B, T, H, D), k, v (B, S, H, D) → (B, T, H·D). Torch picks the kernel (flash, cuDNN,
    memory-efficient or math).

    key_mask: (B, 1, 1, S), False for the keys that no token attends to.

    The output has q's memory layout: for q in this order the heads of a token are contiguous, and nothing is copied.
    """
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=key_mask
    )
    return out.transpose(1, 2).flatten(2)


def cudnn(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Run `sdpa` on cuDNN's kernel: q (B, T, H, D), k, v (B, S, H, D) → (B, T, H·D).

    By its own op: SDPA would fall back to another if this one refuses. With a mask, or in fp32, it is `sdpa` itself.
    """
    if key_mask is not None or not _in_16_bits(q):
        return sdpa(q, k, v, key_mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]
    return out.transpose(1, 2).flatten(2)


@lru_cache  # one function for all runs: a graph is compiled for the function that it calls
def flash(package: str) -> Attention:
    """Make `sdpa` on the kernels of one of `flash_attention.PACKAGES`; fp16 or bf16 on a GPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if key_mask is not None or not _in_16_bits(q):
            return sdpa(q, k, v, key_mask)
        return flash_attention(q, k, v, None, package)[0].flatten(2)

    return attend


def _in_16_bits(q: Tensor) -> bool:
    return q.dtype in flash_kernels.DTYPES


def settle_kernel_order() -> None:
    """Make torch decide on its kernel order now, outside any order that ComfyUI sets.

    At a process's first attention on a GPU, torch puts cuDNN's kernel first if it is the fastest: twice as fast as
    flash on an H100. ComfyUI makes that call inside its own order (`comfy.ops`), which restores the previous order at
    its end, so that the decision is lost for the whole process, training included.
    """
    if not torch.cuda.is_available():
        return
    with contextlib.suppress(AttributeError, RuntimeError):  # private to torch; a broken GPU is reported elsewhere
        q = torch.zeros(1, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
        torch._fused_sdp_choice(q, q, q)


def attention_function(choice: str, device: torch.device, dtype: torch.dtype) -> Attention:
    """Return the attention of a choice: torch's SDPA for `auto` and `sdpa`. Raises ValueError if `cudnn` or
    `flash-attn` does not run here."""
    if choice == "flash-attn":
        return flash(flash_package(device, dtype))
    if choice == "cudnn":
        _check_cudnn(device, dtype)
        return cudnn
    return sdpa


def attention_notes(choice: str, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Name the package behind `flash-attn`, and ComfyUI's own attention if it is none that training can use."""
    if choice == "flash-attn":
        yield f"attention runs on {PACKAGES[flash_package(device, dtype)].title}."
    sampling = comfy.ldm.modules.attention.optimized_attention
    name = getattr(sampling, "__name__", type(sampling).__name__)
    if name not in EXACT:
        yield (
            f"ComfyUI samples with {name}, which can't be used for training: training runs another attention, so "
            "pictures can differ a little from what was trained."
        )


@lru_cache
def _check_cudnn(device: torch.device, dtype: torch.dtype) -> None:
    """Run cuDNN's kernel forward and backward once. Raises ValueError if that fails."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"attention is 'cudnn', which needs a GPU and fp16 or bf16, not {device.type} in {dtype}.")
    q, k, v = (torch.ones(1, 32, 2, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    try:
        with torch.enable_grad():
            cudnn(q, k, v).sum().backward()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0][:100]
        raise ValueError(f"attention is 'cudnn', which does not work here ({reason}); choose 'auto'.") from error


class RaggedAttention(NamedTuple):
    """Attention among the first tokens of each sample.

    bounds: (lengths, size, device) → the `bounds` of `attend`, once per batch, from lengths (B,), int64 on the CPU, and
        size T.
    attend: (q, k, v, bounds) → (B, T, H·D) from q, k, v (B, T, H, D). Its output beyond a sample's length is finite and
        does not affect the output before it.
    """

    bounds: Callable[[Tensor, int, torch.device], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ragged_attention_function(choice: str, device: torch.device, dtype: torch.dtype) -> RaggedAttention:
    """Return the attention of a choice like `attention_function`, for samples of different length."""
    if choice == "flash-attn":
        return RaggedAttention(pads_as_samples, ragged_flash(flash_package(device, dtype)))
    if choice == "cudnn":
        _check_cudnn(device, dtype)
    return RaggedAttention(lambda lengths, size, device: lengths, ragged_sdpa(choice == "cudnn"))


@lru_cache
def ragged_sdpa(only_cudnn: bool = False) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make ragged attention on torch's kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return ragged_attention(q, k, v, lengths, only_cudnn and _in_16_bits(q))[0].flatten(2)

    return attend


def pads_as_samples(lengths: Tensor, size: int, device: torch.device) -> Tensor:
    """Make the bounds of sequences in B·T rows, int32 (2·B + 1,): each sample, then its pads as a separate sequence."""
    starts = torch.arange(len(lengths), dtype=torch.int64) * size
    ends = torch.tensor([len(lengths) * size])
    return to_device(torch.cat((torch.stack((starts, starts + lengths), 1).flatten(), ends)).to(torch.int32), device)


@lru_cache
def ragged_flash(package: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make ragged attention on flash-attn's varlen kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        if not _in_16_bits(q):
            lengths = (bounds[1::2] - bounds[:-1:2]).to("cpu", torch.int64)
            return ragged_attention(q, k, v, lengths)[0].flatten(2)
        return flash_attention(q, k, v, bounds, package)[0].flatten(2)

    return attend
