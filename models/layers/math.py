"""Formulas that transformers of several families share."""

import math
from collections.abc import Sequence

import comfy.model_management
import torch
from torch import Tensor
from torch.nn import functional as F


def rope(positions: Tensor, axes_dim: Sequence[int], theta: int) -> Tensor:
    """Compute the tables of rotary position embedding (arXiv 2104.09864), one part of the head per axis.

    positions: (B, T, axes) → (B, T, 1, D/2, 2): cosine and sine, fp32. The angles are computed in fp64 like ComfyUI's,
    on the CPU if the device has no fp64.
    """
    device = positions.device if comfy.model_management.supports_fp64(positions.device) else torch.device("cpu")
    angles = []
    for axis, dim in enumerate(axes_dim):
        scale = torch.linspace(0, (dim - 2) / dim, steps=dim // 2, dtype=torch.float64, device=device)
        angles.append(positions[..., axis, None].to(device, torch.float64) / theta**scale)
    angle = torch.cat(angles, dim=-1)
    return torch.stack((angle.cos(), angle.sin()), dim=-1).float().unsqueeze(2).to(positions.device)


def rotate(x: Tensor, pe: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of the head dimension. x: (B, T, H, D), pe: (B, T, 1, D/2, 2) → as x.

    Both forms round alike. Eager torch writes each op's result, and one complex multiplication writes the least;
    inductor, which does not fuse complex numbers, writes only the result of the other form.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        cos, sin = pe.unsqueeze(-2).unbind(-1)
        sign = 2 * torch.arange(2, device=x.device) - 1
        rotated = pairs * cos + pairs.flip(-1) * sin * sign
    else:
        rotated = torch.view_as_real(_complex(pairs) * _complex(pe))
    return rotated.flatten(-2).to(x.dtype)


def _complex(pairs: Tensor) -> Tensor:
    """View (…, 2) as complex numbers, which needs contiguous pairs; those of any other layout are copied."""
    *outer, inner = pairs.stride()
    together = inner == 1 and not any(stride % 2 for stride in (*outer, pairs.storage_offset()))
    return torch.view_as_complex(pairs if together else pairs.clone(memory_format=torch.contiguous_format))


def timestep_embedding(t: Tensor, dim: int = 256, max_period: float = 10000.0) -> Tensor:
    """Compute the sinusoidal embedding of 1000·t: t (B,) → (B, dim), in the dtype of t. Core casts guidance first, so
    in bf16 a guidance of 3.5 embeds as 3504; training does the same as inference."""
    t = 1000.0 * t
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) / half
    angle = t[:, None].float() * torch.exp(-math.log(max_period) * exponent)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(t.dtype)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Apply adaptive layer norm: LN(x)·(1 + scale) + shift. x: (B, T, D), shift and scale: (B, 1, D)."""
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale)


def modulate_parts(x: Tensor, shift: Tensor, scale: Tensor, split_at: int) -> Tensor:
    """Apply `modulate` with a shift and scale that may have a second row, (B, 2, D), for the tokens from `split_at`
    on."""
    if shift.shape[1] == 1:
        return modulate(x, shift, scale)
    parts = (x[:, :split_at], shift[:, :1], scale[:, :1]), (x[:, split_at:], shift[:, 1:], scale[:, 1:])
    return torch.cat([modulate(*part) for part in parts], dim=1)


def gate_parts(x: Tensor, y: Tensor, gate: Tensor, split_at: int) -> Tensor:
    """Compute x + gate·y, with rows of the gate as in `modulate_parts`. x, y: (B, T, D)."""
    if gate.shape[1] == 1:
        return torch.addcmul(x, gate, y)
    return x + torch.cat((y[:, :split_at] * gate[:, :1], y[:, split_at:] * gate[:, 1:]), dim=1)


def finite_in_fp16(x: Tensor) -> Tensor:
    """Clamp overflow in fp16, of a tensor of any shape, as core does, so that training sees the same values."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
