"""FLUX's transformers written out from their formulas: the independent value that tests compare with.

Plain functions over a checkpoint's tensors in Black Forest Labs' names, without ComfyUI, modules or in-place
operations, in the dtype of the latent tokens (float64 for gradients). The semantics are those of
black-forest-labs/flux, src/flux/{model,math}.py and modules/layers.py, and black-forest-labs/flux2,
src/flux2/model.py; head size 128.

Sizes in the comments: B samples, N picture tokens, L text tokens, S = L + N, D hidden, H heads. The tokens of reference
pictures are picture tokens too: they come last, and the velocity that the callers look at is that of the others.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Lora = Mapping[str, tuple[Tensor, Tensor, float]]

ROPE, ROPE2 = ((16, 56, 56), 10_000.0), ((32, 32, 32, 32), 2_000.0)  # axes, theta
LAYER_NORM_EPS = 1e-6
# BFL writes 1e-6; ComfyUI 0.30 leaves torch's own, which is that of float32 in float32, bfloat16 and float16.
QK_NORM_EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Weights:
    """A checkpoint and a LoRA, cast to one dtype as they are read."""

    tensors: Mapping[str, Tensor]
    lora: Lora
    dtype: torch.dtype

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b, and scale · (x down^T) up^T if the LoRA has the layer."""
        y = x @ self.tensors[f"{name}.weight"].to(self.dtype).T
        if f"{name}.bias" in self.tensors:
            y = y + self.tensors[f"{name}.bias"].to(self.dtype)
        if name in self.lora:
            down, up, scale = self.lora[name]
            y = y + scale * ((x @ down.to(self.dtype).T) @ up.to(self.dtype).T)
        return y

    def qk_norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm over a head's 128 values: x / sqrt(mean(x²) + eps) · scale. ComfyUI calls the scale `weight`."""
        scale = self.tensors.get(f"{name}.scale", self.tensors.get(f"{name}.weight"))
        assert scale is not None, name
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + QK_NORM_EPS) * scale.to(self.dtype)

    def count(self, blocks: str) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.startswith(f"{blocks}.")})


def flux_forward(
    sd: Mapping[str, Tensor],
    latent_tokens: Tensor,
    img_ids: Tensor,
    txt: Tensor,
    pooled: Tensor,
    sigma: Tensor,
    guidance: Tensor | None,
    *,
    num_heads: int,
    lora: Lora | None = None,
) -> Tensor:
    """The velocity, (B, N, 64), in the dtype of `latent_tokens`.

    latent_tokens: (B, N, 64), 2×2 patches of the latent as (channel, row, column). img_ids: (B, N, 3), (0, row, column)
    of each. txt: (B, L, T5 width). pooled: (B, CLIP width). sigma: (B,), 0 to 1. guidance: (B,), not read by models
    that have no input for it. lora: module name to (down (r, in), up (out, r), scale).
    """
    dtype = latent_tokens.dtype
    w = Weights(sd, lora or {}, dtype)
    sigma = sigma.to(dtype)
    txt = txt.to(dtype)
    pooled = pooled.to(dtype)

    vec = embedder(w, "time_in", sinusoid(sigma)) + embedder(w, "vector_in", pooled)  # (B, D)
    if guidance is not None and "guidance_in.in_layer.weight" in sd:
        vec = vec + embedder(w, "guidance_in", sinusoid(guidance.to(dtype)))

    img = w.linear("img_in", latent_tokens)
    txt = w.linear("txt_in", txt)
    txt_ids = torch.zeros(*txt.shape[:2], 3, dtype=dtype, device=txt.device)
    angles = rope_angles(torch.cat([txt_ids, img_ids.to(dtype)], dim=1), *ROPE)  # (B, S, 64)

    for i in range(w.count("double_blocks")):
        name = f"double_blocks.{i}"
        mods = {s: w.linear(f"{name}.{s}_mod.lin", silu(vec))[:, None] for s in ("img", "txt")}
        img, txt = double_block(w, name, img, txt, mods, angles, num_heads, gelu_tanh)
    x = torch.cat([txt, img], dim=1)
    for i in range(w.count("single_blocks")):
        mod = w.linear(f"single_blocks.{i}.modulation.lin", silu(vec))[:, None]
        x = single_block(w, f"single_blocks.{i}", x, mod, angles, num_heads, gelu_tanh)

    shift, scale = w.linear("final_layer.adaLN_modulation.1", silu(vec))[:, None].chunk(2, dim=-1)
    return w.linear("final_layer.linear", modulate(x[:, txt.shape[1] :], shift, scale))


def flux2_forward(
    sd: Mapping[str, Tensor],
    latent_tokens: Tensor,
    img_ids: Tensor,
    txt: Tensor,
    sigma: Tensor,
    guidance: Tensor | None,
    *,
    num_heads: int,
    lora: Lora | None = None,
) -> Tensor:
    """FLUX.2's velocity, (B, N, 128), in the dtype of `latent_tokens`.

    latent_tokens: (B, N, 128). img_ids: (B, N, 4). txt: (B, L, text width), padded as the model takes it. sigma: (B,
    N), of each picture token; text has the sigma of the first one. The rest as in `flux_forward`.
    """
    dtype = latent_tokens.dtype
    w = Weights(sd, lora or {}, dtype)
    length = txt.shape[1]
    sigma = torch.cat([sigma[:, :1].expand(-1, length), sigma], dim=1).to(dtype)  # (B, S)
    vec = embedder(w, "time_in", sinusoid(sigma.flatten())).unflatten(0, sigma.shape)  # (B, S, D)
    if guidance is not None and "guidance_in.in_layer.weight" in sd:
        vec = vec + embedder(w, "guidance_in", sinusoid(guidance.to(dtype)))[:, None]
    vec = silu(vec)

    img = w.linear("img_in", latent_tokens)
    txt = w.linear("txt_in", txt.to(dtype))
    txt_ids = torch.zeros(*txt.shape[:2], 4, dtype=dtype, device=txt.device)
    txt_ids[..., 3] = torch.arange(length)
    angles = rope_angles(torch.cat([txt_ids, img_ids.to(dtype)], dim=1), *ROPE2)

    mods = {
        "img": w.linear("double_stream_modulation_img.lin", vec[:, length:]),
        "txt": w.linear("double_stream_modulation_txt.lin", vec[:, :length]),
    }
    for i in range(w.count("double_blocks")):
        img, txt = double_block(w, f"double_blocks.{i}", img, txt, mods, angles, num_heads, silu_gated)
    x = torch.cat([txt, img], dim=1)
    mod = w.linear("single_stream_modulation.lin", vec)
    for i in range(w.count("single_blocks")):
        x = single_block(w, f"single_blocks.{i}", x, mod, angles, num_heads, silu_gated)

    shift, scale = w.linear("final_layer.adaLN_modulation.1", vec[:, length:]).chunk(2, dim=-1)
    return w.linear("final_layer.linear", modulate(x[:, length:], shift, scale))


def double_block(
    w: Weights,
    name: str,
    img: Tensor,
    txt: Tensor,
    mods: Mapping[str, Tensor],
    angles: Tensor,
    num_heads: int,
    activation: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Two streams with their own weights that meet in one attention, text first. mods: (B, 1 or tokens, 6·D) each."""
    streams = {"txt": txt, "img": img}
    parts = {s: mods[s].chunk(6, dim=-1) for s in streams}
    qkv = {}
    for s, x in streams.items():
        shift, scale, *_ = parts[s]
        q, k, v = heads(w.linear(f"{name}.{s}_attn.qkv", modulate(x, shift, scale)), num_heads)
        norm = f"{name}.{s}_attn.norm"
        qkv[s] = (w.qk_norm(f"{norm}.query_norm", q), w.qk_norm(f"{norm}.key_norm", k), v)
    joint = [torch.cat(pair, dim=2) for pair in zip(qkv["txt"], qkv["img"], strict=True)]
    attended = attention(*joint, angles)
    attended_by_stream = {"txt": attended[:, : txt.shape[1]], "img": attended[:, txt.shape[1] :]}

    out = {}
    for s, x in streams.items():
        _, _, gate_attn, shift, scale, gate_mlp = parts[s]
        x = x + gate_attn * w.linear(f"{name}.{s}_attn.proj", attended_by_stream[s])
        activated = activation(w.linear(f"{name}.{s}_mlp.0", modulate(x, shift, scale)))
        out[s] = x + gate_mlp * w.linear(f"{name}.{s}_mlp.2", activated)
    return out["img"], out["txt"]


def single_block(
    w: Weights,
    name: str,
    x: Tensor,
    mod: Tensor,
    angles: Tensor,
    num_heads: int,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Attention and MLP side by side over text and picture as one sequence. mod: (B, 1 or S, 3·D)."""
    width = x.shape[-1]
    shift, scale, gate = mod.chunk(3, dim=-1)
    y = w.linear(f"{name}.linear1", modulate(x, shift, scale))
    qkv, mlp = y[..., : 3 * width], y[..., 3 * width :]
    q, k, v = heads(qkv, num_heads)
    q, k = w.qk_norm(f"{name}.norm.query_norm", q), w.qk_norm(f"{name}.norm.key_norm", k)
    attended = attention(q, k, v, angles)
    return x + gate * w.linear(f"{name}.linear2", torch.cat([attended, activation(mlp)], dim=-1))


def sinusoid(t: Tensor) -> Tensor:
    """(B,) to (B, 256): cos then sin of 1000·t · 10000^(−i/128), i = 0 … 127."""
    i = torch.arange(128, dtype=t.dtype, device=t.device)
    args = (1000.0 * t)[:, None] * torch.exp(-math.log(10_000.0) * i / 128)
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def embedder(w: Weights, name: str, x: Tensor) -> Tensor:
    return w.linear(f"{name}.out_layer", silu(w.linear(f"{name}.in_layer", x)))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) · LayerNorm(x) + shift, the norm without weights of its own."""
    centred = x - x.mean(-1, keepdim=True)
    norm = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + LAYER_NORM_EPS)
    return (1 + scale) * norm + shift


def heads(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S, 3·D), ordered as (q k v, head, 128), to three of (B, H, S, 128)."""
    q, k, v = qkv.chunk(3, dim=-1)
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    return q, k, v


def rope_angles(ids: Tensor, axes: tuple[int, ...], theta: float) -> Tensor:
    """(B, S, axes) to (B, S, 64): position · theta^(−2j/d), j = 0 … d/2 − 1, for each axis of d values, axis by axis.

    The frequencies are float64, the angles too, whatever the dtype of the rest.
    """
    parts = []
    for axis, size in enumerate(axes):
        omega = theta ** (-torch.arange(0, size, 2, dtype=torch.float64, device=ids.device) / size)
        parts.append(ids[..., axis, None].double() * omega)
    return torch.cat(parts, dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair of neighbours (x[2j], x[2j+1]) of (B, H, S, 128) by its angle."""
    cos, sin = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], dim=-1).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(128)) v of the rotated q and k, without a mask; (B, H, S, 128) to (B, S, D)."""
    q, k = rotate(q, angles), rotate(k, angles)
    weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
    return (weights @ v).transpose(1, 2).flatten(-2)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_gated(x: Tensor) -> Tensor:
    """SiLU of the first half times the second (Shazeer 2020, arXiv 2002.05202)."""
    gate, value = x.chunk(2, dim=-1)
    return silu(gate) * value


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
