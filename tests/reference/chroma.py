"""Chroma's transformer written out from its formulas: the independent value that tests compare with.

Blocks, norms and rotary positions are FLUX.1's (flux.py in this folder); this file has only Chroma's own parts. The
semantics are those of lodestones' Chroma (https://huggingface.co/lodestones/Chroma1-HD) as ComfyUI runs it: no pooled
text, no mask, and in place of each block's own modulation one network, the approximator, that gives all of them.

Sizes in the comments: B samples, N picture tokens, L text tokens, S = L + N, D hidden.
"""

import math
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

flux: dict[str, Any] = runpy.run_path(str(Path(__file__).parent / "flux.py"))
Lora = Mapping[str, tuple[Tensor, Tensor, float]]

VECTORS = 344  # of 38 single blocks 3 each, of 19 double blocks 6 for the picture and 6 for the text, and 2 of the end
APPROXIMATOR = "distilled_guidance_layer"


def chroma_forward(
    sd: Mapping[str, Tensor],
    latent_tokens: Tensor,
    img_ids: Tensor,
    txt: Tensor,
    sigma: Tensor,
    guidance: Tensor,
    *,
    num_heads: int,
    lora: Lora | None = None,
) -> Tensor:
    """The velocity, (B, N, 64), in the dtype of `latent_tokens`.

    latent_tokens: (B, N, 64), 2×2 patches of the latent as (channel, row, column). img_ids: (B, N, 3), (0, row, column)
    of each. txt: (B, L, T5 width), every token of which is seen. sigma: (B,), 0 to 1. guidance: (B,). lora: module name
    to (down (r, in), up (out, r), scale).
    """
    dtype = latent_tokens.dtype
    w = flux["Weights"](sd, lora or {}, dtype)
    double, single = w.count("double_blocks"), w.count("single_blocks")
    vectors = approximator(w, sigma.to(dtype), guidance.to(dtype))  # (B, 344, D)

    def modulation(first: int, count: int) -> Tensor:
        """`count` vectors side by side, (B, 1, count·D)."""
        return vectors[:, first : first + count].flatten(1)[:, None]

    img = w.linear("img_in", latent_tokens)
    txt = w.linear("txt_in", txt.to(dtype))
    txt_ids = torch.zeros(*txt.shape[:2], 3, dtype=dtype, device=txt.device)
    angles = flux["rope_angles"](torch.cat([txt_ids, img_ids.to(dtype)], dim=1), *flux["ROPE"])  # (B, S, 64)

    for i in range(double):
        mods = {"img": modulation(3 * single + 6 * i, 6), "txt": modulation(3 * single + 6 * double + 6 * i, 6)}
        img, txt = flux["double_block"](w, f"double_blocks.{i}", img, txt, mods, angles, num_heads, flux["gelu_tanh"])
    x = torch.cat([txt, img], dim=1)
    for i in range(single):
        mod = modulation(3 * i, 3)
        x = flux["single_block"](w, f"single_blocks.{i}", x, mod, angles, num_heads, flux["gelu_tanh"])

    shift, scale = modulation(VECTORS - 2, 2).chunk(2, dim=-1)
    return w.linear("final_layer.linear", flux["modulate"](x[:, txt.shape[1] :], shift, scale))


def approximator(w: Any, sigma: Tensor, guidance: Tensor) -> Tensor:
    """Every modulation vector, (B, 344, D), of a sigma and a guidance, (B,) each: five residual layers on the
    embeddings of time, guidance and the number of the vector."""
    batch = len(sigma)
    # In float32, whatever the dtype of the rest: at 1000·343 the model was trained with its rounding.
    index = sinusoid(torch.arange(VECTORS, dtype=torch.float32, device=sigma.device), 32).to(sigma.dtype)
    level = torch.cat([sinusoid(sigma, 16), sinusoid(guidance, 16)], dim=-1)
    x = torch.cat([level[:, None].expand(-1, VECTORS, -1), index.expand(batch, -1, -1)], dim=-1)  # (B, 344, 64)
    x = w.linear(f"{APPROXIMATOR}.in_proj", x)
    layers = len({name for name in w.tensors if name.startswith(f"{APPROXIMATOR}.norms.")})
    for i in range(layers):
        normed = w.qk_norm(f"{APPROXIMATOR}.norms.{i}", x)
        x = x + flux["embedder"](w, f"{APPROXIMATOR}.layers.{i}", normed)
    return w.linear(f"{APPROXIMATOR}.out_proj", x)


def sinusoid(t: Tensor, size: int) -> Tensor:
    """(B,) to (B, size): cos then sin of 1000·t · 10000^(−2i/size), i = 0 … size/2 − 1."""
    i = torch.arange(size // 2, dtype=t.dtype, device=t.device)
    args = (1000.0 * t)[:, None] * torch.exp(-math.log(10_000.0) * i / (size // 2))
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
