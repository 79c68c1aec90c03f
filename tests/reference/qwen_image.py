"""Qwen-Image's transformer written out from its formulas: the independent value that tests compare with.

Plain functions over a checkpoint's tensors, for one sample without padding, without ComfyUI, modules or in-place
operations, in the dtype of the latent (float64 for gradients). The semantics are those of diffusers'
models/transformers/transformer_qwenimage.py, with the placing of references as ComfyUI 0.30 has it; RoPE's axes divide
a head as 2 : 7 : 7.

Sizes in the comments: N picture tokens, R reference tokens, L text tokens, S = L + N + R, D hidden, H heads.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Lora = Mapping[str, tuple[Tensor, Tensor, float]]

EPS = 1e-6


@dataclass(frozen=True)
class Weights:
    """A checkpoint and a LoRA, cast to one dtype as they are read."""

    tensors: Mapping[str, Tensor]
    lora: Lora
    dtype: torch.dtype

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x W^T + b, and scale · (x down^T) up^T if the LoRA has the layer."""
        y = x @ self.tensors[f"{name}.weight"].to(self.dtype).T + self.tensors[f"{name}.bias"].to(self.dtype)
        if name in self.lora:
            down, up, scale = self.lora[name]
            y = y + scale * ((x @ down.to(self.dtype).T) @ up.to(self.dtype).T)
        return y

    def rms_norm(self, name: str, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"].to(self.dtype)


def qwen_image_forward(
    sd: Mapping[str, Tensor],
    latent: Tensor,
    text: Tensor,
    sigma: float,
    *,
    references: Sequence[Tensor] = (),
    method: str = "index",
    keep: int | None = None,
    heads: int = 2,
    lora: Lora | None = None,
) -> Tensor:
    """The velocity of the first `keep` tokens of the picture, (N, 64), in the dtype of `latent`.

    latent: (16, 2h, 2w). text: (L, encoder width), no pads. sigma: 0 to 1. references: (16, 2h, 2w) each. lora: module
    name to (down (r, in), up (out, r), scale).
    """
    dtype = latent.dtype
    w = Weights(sd, lora or {}, dtype)
    tokens, ids = to_tokens(latent)
    tokens, ids = tokens[:keep], ids[:keep]
    picture_tokens = len(tokens)
    for place, reference in zip(places(references, method), references, strict=True):
        reference_tokens, reference_ids = to_tokens(reference.to(dtype), *place)
        tokens, ids = torch.cat([tokens, reference_tokens]), torch.cat([ids, reference_ids])

    # The caption goes on along the diagonal from half the longer side of the picture.
    start = max(latent.shape[-2] // 2, latent.shape[-1] // 2) // 2
    text_ids = (start + torch.arange(len(text), dtype=torch.float64))[:, None].expand(-1, 3)
    angles = rope_angles(torch.cat([text_ids, ids]), sd["transformer_blocks.0.attn.norm_q.weight"].shape[0])

    img = w.linear("img_in", tokens)
    txt = w.linear("txt_in", w.rms_norm("txt_norm", text.to(dtype)))
    reference_sigma = 0.0 if method == "index_timestep_zero" else sigma
    temb, temb_ref = (time_embedding(w, s) for s in (sigma, reference_sigma))

    for i in range(len({name.split(".")[1] for name in sd if name.startswith("transformer_blocks.")})):
        img, txt = block(w, f"transformer_blocks.{i}", img, txt, temb, temb_ref, picture_tokens, angles, heads)
    scale, shift = w.linear("norm_out.linear", silu(temb)).chunk(2)
    return w.linear("proj_out", modulate(img[:picture_tokens], shift, scale))


def block(
    w: Weights,
    name: str,
    img: Tensor,
    txt: Tensor,
    temb: Tensor,
    temb_ref: Tensor,
    picture_tokens: int,
    angles: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Pictures and text with their own weights that meet in one attention, text first."""
    # Six values for each token, (T, 6·D).
    picture_mod, reference_mod = (w.linear(f"{name}.img_mod.1", silu(t)) for t in (temb, temb_ref))
    is_own = (torch.arange(len(img)) < picture_tokens)[:, None]
    mods = {
        "img": torch.where(is_own, picture_mod, reference_mod).chunk(6, dim=-1),
        "txt": w.linear(f"{name}.txt_mod.1", silu(temb))[None].chunk(6, dim=-1),
    }
    layers = {"txt": ("add_q_proj", "add_k_proj", "add_v_proj"), "img": ("to_q", "to_k", "to_v")}
    norms = {"txt": ("norm_added_q", "norm_added_k"), "img": ("norm_q", "norm_k")}
    streams = {"txt": txt, "img": img}
    joint: list[list[Tensor]] = [[], [], []]
    for s, x in streams.items():
        shift, scale, *_ = mods[s]
        x = modulate(x, shift, scale)
        q, k, v = (w.linear(f"{name}.attn.{layer}", x).unflatten(-1, (heads, -1)) for layer in layers[s])
        q, k = (w.rms_norm(f"{name}.attn.{norm}", y) for norm, y in zip(norms[s], (q, k), strict=True))
        for whole, part in zip(joint, (q, k, v), strict=True):
            whole.append(part)
    q, k, v = (torch.cat(parts).transpose(0, 1) for parts in joint)  # (H, S, head)
    q, k = rotate(q, angles), rotate(k, angles)
    weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1)
    attended = (weights @ v).transpose(0, 1).flatten(-2)
    parts = {"txt": attended[: len(txt)], "img": attended[len(txt) :]}

    out = {}
    for s, x in streams.items():
        _, _, gate, shift, scale, gate_mlp = mods[s]
        x = x + gate * w.linear(f"{name}.attn.{'to_out.0' if s == 'img' else 'to_add_out'}", parts[s])
        activated = gelu_tanh(w.linear(f"{name}.{s}_mlp.net.0.proj", modulate(x, shift, scale)))
        out[s] = x + gate_mlp * w.linear(f"{name}.{s}_mlp.net.2", activated)
    return out["img"], out["txt"]


def to_tokens(latent: Tensor, frame: int = 0, down: int = 0, right: int = 0) -> tuple[Tensor, Tensor]:
    """(16, 2h, 2w) to tokens (h·w, 64), each (channel, row, column), and ids (h·w, 3): frame, row and column, the
    middle of the picture at (0, 0) before it is moved `down` and `right`."""
    channels, height, width = latent.shape
    h, w = height // 2, width // 2
    tokens = latent.reshape(channels, h, 2, w, 2).permute(1, 3, 0, 2, 4).reshape(h * w, 4 * channels)
    ids = [[frame, r - h // 2 + down, c - w // 2 + right] for r in range(h) for c in range(w)]
    return tokens, torch.tensor(ids, dtype=torch.float64)


def places(references: Sequence[Tensor], method: str) -> list[tuple[int, int, int]]:
    """(frame, down, right) of each reference, in tokens."""
    if method in ("index", "index_timestep_zero"):
        return [(i + 1, 0, 0) for i in range(len(references))]
    if method == "negative_index":
        return [(-i - 1, 0, 0) for i in range(len(references))]
    # Side by side: below the others, or right of them if that is shorter.
    positions = []
    tall = 0
    wide = 0
    for reference in references:
        h, w = reference.shape[-2] // 2, reference.shape[-1] // 2
        place = (0, wide) if h + tall > w + wide else (tall, 0)
        positions.append((1, *place))
        tall, wide = max(tall, h + place[0]), max(wide, w + place[1])
    return positions


def time_embedding(w: Weights, sigma: float) -> Tensor:
    """(D,): cos then sin of 1000·sigma · 10000^(−i/128), i = 0 … 127, through two layers."""
    i = torch.arange(128, dtype=w.dtype)
    args = 1000.0 * sigma * torch.exp(-math.log(10_000.0) * i / 128)
    name = "time_text_embed.timestep_embedder"
    return w.linear(f"{name}.linear_2", silu(w.linear(f"{name}.linear_1", torch.cat([args.cos(), args.sin()]))))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) · LayerNorm(x) + shift, the norm without weights of its own."""
    centred = x - x.mean(-1, keepdim=True)
    return (1 + scale) * centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPS) + shift


def rope_angles(ids: Tensor, head: int) -> Tensor:
    """(S, 3) to (S, head / 2): position · 10000^(−2j/d), j = 0 … d/2 − 1, for each axis of d values, axis by axis."""
    parts = []
    for axis, size in enumerate((head // 8, 7 * head // 16, 7 * head // 16)):
        omega = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        parts.append(ids[:, axis, None] * omega)
    return torch.cat(parts, dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair of neighbours (x[2j], x[2j+1]) of (H, S, head) by its angle."""
    cos, sin = (f(angles).to(x.dtype) for f in (torch.cos, torch.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], dim=-1).flatten(-2)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
