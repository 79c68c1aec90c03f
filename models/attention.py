"""The attention of the training forward: torch's SDPA, or flash-attn where it is installed and asked for."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

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
