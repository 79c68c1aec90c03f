"""The attention of the training forward: torch's SDPA, or flash-attn where it is installed and asked for.

Models whose captions are padded take ragged attention: each sample of a batch sees its own first tokens and no pad.
"""

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...memory.host.to_device import to_device
from .ragged_attention import ragged_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v: (B, H, T, D) → (B, T, H·D). Torch picks the kernel (flash, cuDNN, memory-efficient or plain)."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same on flash-attn's kernel. q, k, v: (B, H, T, D), fp16 or bf16 on a GPU → (B, T, H·D)."""
    from flash_attn import flash_attn_func

    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.flatten(2)


def attention_function(choice: str, device: torch.device, dtype: torch.dtype) -> Attention:
    """`auto` and `sdpa` take torch's SDPA; `flash-attn` needs the package, a GPU and a 16-bit dtype (ValueError)."""
    if choice != "flash-attn":
        return sdpa
    if importlib.util.find_spec("flash_attn") is None:
        raise ValueError(
            "attention is 'flash-attn', which is not installed here; choose 'auto', or install flash-attn."
        )
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"attention is 'flash-attn', which needs a GPU and fp16 or bf16, not {device.type} in {dtype}."
        )
    return flash


class RaggedAttention(NamedTuple):
    """Attention among the first tokens of each sample.

    bounds(lengths, size, device): from lengths (B,), int64 on the CPU, and T what `attend` takes, once per batch.
    attend(q, k, v, bounds): q, k, v (B, T, H, D) → (B, T, H·D). What it gives behind a sample's length is finite and
    takes part in nothing that it gives before it.
    """

    bounds: Callable[[Tensor, int, torch.device], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def ragged_attention_function(choice: str, device: torch.device, dtype: torch.dtype) -> RaggedAttention:
    """As `attention_function`, for samples of different length."""
    if attention_function(choice, device, dtype) is flash:
        return RaggedAttention(pads_as_samples, ragged_flash)
    return RaggedAttention(lambda lengths, size, device: lengths, ragged_sdpa)


def ragged_sdpa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return ragged_attention(q, k, v, lengths)[0].flatten(2)


def pads_as_samples(lengths: Tensor, size: int, device: torch.device) -> Tensor:
    """Bounds of sequences in B·T rows, int32 (2·B + 1,): each sample, then its pads as a sequence of their own."""
    starts = torch.arange(len(lengths), dtype=torch.int64) * size
    ends = torch.tensor([len(lengths) * size])
    return to_device(torch.cat((torch.stack((starts, starts + lengths), 1).flatten(), ends)).to(torch.int32), device)


def ragged_flash(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """On flash-attn's kernel for many sequences in one."""
    from flash_attn import flash_attn_varlen_func

    size = q.shape[1]
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(*rows, bounds, bounds, size, size)
    return out.unflatten(0, (-1, size)).flatten(2)
