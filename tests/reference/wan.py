"""Wan's transformer written out from its formulas: the independent value that tests compare with.

Plain functions over a checkpoint's tensors in Wan-Video's names, without ComfyUI, modules or in-place operations, in
the dtype of the tokens (float64 for gradients). The semantics are those of Wan-Video/Wan2.1 and Wan2.2,
wan/modules/model.py; head size 128, RoPE axes 44 / 42 / 42.

Every token has a timestep of its own here, which covers 5B's clean frames; elsewhere they are all the same.
Sizes in the comments: B samples, N tokens of the clip, L text tokens, I tokens of CLIP vision, D hidden, H heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Lora = Mapping[str, tuple[Tensor, Tensor, float]]

ROPE_AXES = (44, 42, 42)
ROPE_THETA = 10_000.0
EPS = 1e-6
IMAGE_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Weights:
    """A checkpoint and a LoRA, cast to one dtype as they are read."""

    tensors: Mapping[str, Tensor]
    lora: Lora
    dtype: torch.dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name].to(self.dtype)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b, and scale · (x down^T) up^T if the LoRA has the layer."""
        y = x @ self[f"{name}.weight"].T + self[f"{name}.bias"]
        if name in self.lora:
            down, up, scale = self.lora[name]
            y = y + scale * ((x @ down.to(self.dtype).T) @ up.to(self.dtype).T)
        return y

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * self[f"{name}.weight"]

    def layer_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return layer_norm(x, eps) * self[f"{name}.weight"] + self[f"{name}.bias"]

    def depth(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.startswith("blocks.")})


def wan_forward(
    sd: Mapping[str, Tensor],
    tokens: Tensor,
    positions: Tensor,
    text: Tensor,
    timestep: Tensor,
    *,
    image: Tensor | None = None,
    num_heads: int,
    lora: Lora | None = None,
) -> Tensor:
    """The velocity, (B, N, 4·channels), in the dtype of `tokens`.

    tokens: (B, N, 4·channels in), 2×2 patches as (row, column, channel), the output's order too. positions: (B, N, 3),
    (frame, row, column). text: (B, L, T5 width), padded. timestep: (B, N), 0 to 1000. image: (B, I, 1280). lora: module
    name to (down (r, in), up (out, r), scale).
    """
    w = Weights(sd, lora or {}, tokens.dtype)
    kernel = w["patch_embedding.weight"].squeeze(2)  # (D, C, 2, 2)
    patches = tokens.unflatten(-1, (2, 2, -1))
    x = torch.einsum("bnrsc,dcrs->bnd", patches, kernel) + w["patch_embedding.bias"]

    e = w.linear("time_embedding.2", silu(w.linear("time_embedding.0", sinusoid(timestep.to(tokens.dtype)))))
    projected = w.linear("time_projection.1", silu(e)).unflatten(-1, (6, -1))  # (B, N, 6, D)
    text = w.linear("text_embedding.2", gelu_tanh(w.linear("text_embedding.0", text.to(tokens.dtype))))
    if image is not None:
        image = image_embedding(w, image.to(tokens.dtype))
    angles = rope_angles(positions)
    for i in range(w.depth()):
        x = block(w, f"blocks.{i}", x, projected, text, image, angles, num_heads)

    shift, scale = (w["head.modulation"] + e[:, :, None]).unbind(2)
    return w.linear("head.head", layer_norm(x, EPS) * (1 + scale) + shift)


def block(
    w: Weights,
    name: str,
    x: Tensor,
    projected: Tensor,
    text: Tensor,
    image: Tensor | None,
    angles: Tensor,
    num_heads: int,
) -> Tensor:
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (w[f"{name}.modulation"] + projected).unbind(2)

    self_attention, y = f"{name}.self_attn", layer_norm(x, EPS) * (1 + scale) + shift
    q, k = (
        rotate(heads(w.rms_norm(f"{self_attention}.norm_{n}", w.linear(f"{self_attention}.{n}", y)), num_heads), angles)
        for n in "qk"
    )
    v = heads(w.linear(f"{self_attention}.v", y), num_heads)
    x = x + gate * w.linear(f"{self_attention}.o", attention(q, k, v))

    cross, y = f"{name}.cross_attn", w.layer_norm(f"{name}.norm3", x, EPS)
    q = heads(w.rms_norm(f"{cross}.norm_q", w.linear(f"{cross}.q", y)), num_heads)
    k = heads(w.rms_norm(f"{cross}.norm_k", w.linear(f"{cross}.k", text)), num_heads)
    attended = attention(q, k, heads(w.linear(f"{cross}.v", text), num_heads))
    if image is not None:
        k = heads(w.rms_norm(f"{cross}.norm_k_img", w.linear(f"{cross}.k_img", image)), num_heads)
        attended = attended + attention(q, k, heads(w.linear(f"{cross}.v_img", image), num_heads))
    x = x + w.linear(f"{cross}.o", attended)

    y = layer_norm(x, EPS) * (1 + ffn_scale) + ffn_shift
    return x + ffn_gate * w.linear(f"{name}.ffn.2", gelu_tanh(w.linear(f"{name}.ffn.0", y)))


def image_embedding(w: Weights, image: Tensor) -> Tensor:
    if "img_emb.emb_pos" in w.tensors:
        image = image + w["img_emb.emb_pos"][:, : image.shape[1]]
    features = w.linear("img_emb.proj.1", w.layer_norm("img_emb.proj.0", image, IMAGE_NORM_EPS))
    features = 0.5 * features * (1 + torch.erf(features / math.sqrt(2)))
    return w.layer_norm("img_emb.proj.4", w.linear("img_emb.proj.3", features), IMAGE_NORM_EPS)


def sinusoid(t: Tensor) -> Tensor:
    """(…) to (…, 256): cos then sin of t · 10000^(−i/128), i = 0 … 127."""
    i = torch.arange(128, dtype=t.dtype)
    args = t[..., None] * 10_000.0 ** (-i / 128)
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, S, D) to (B, H, S, 128)"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def rope_angles(positions: Tensor) -> Tensor:
    """(B, N, 3) to (B, N, 64): position · theta^(−2j/d), j = 0 … d/2 − 1, for each axis of d values, in float64."""
    parts = []
    for axis, size in enumerate(ROPE_AXES):
        omega = ROPE_THETA ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        parts.append(positions[..., axis, None].double() * omega)
    return torch.cat(parts, dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair of neighbours (x[2j], x[2j+1]) of (B, H, N, 128) by its angle."""
    cos, sin = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], dim=-1).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(128)) v without a mask; (B, H, S, 128) to (B, S, D)."""
    weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
    return (weights @ v).transpose(1, 2).flatten(-2)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
