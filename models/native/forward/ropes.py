"""Rotary position embedding (arXiv 2104.09864) like comfy-kitchen's, in plain torch, since comfy-kitchen has no
backward.

Each function has the arguments and values of the kernel of its name. Tensors of heads are (B, H, T, D) or (B, T, H, D);
tables of rotations are (…, D/2, 2, 2), which broadcast against them, and rows after T are ignored.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def apply_rope1(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), … of the last dimension, in the dtype of the table."""
    pairs = x.to(freqs_cis.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    if x.ndim > 2 and freqs_cis.ndim > 2 and x.shape[2] != 1:
        freqs_cis = freqs_cis[:, :, : x.shape[2]]
    rotated = torch.addcmul(freqs_cis[..., 0] * pairs[..., 0], freqs_cis[..., 1], pairs[..., 1])
    return rotated.reshape(x.shape).to(x.dtype)


def apply_rope_split_half1(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate the pairs (0, D/2), (1, D/2 + 1), … of the last dimension, in the dtype of the table."""
    pairs = x.to(freqs_cis.dtype).reshape(*x.shape[:-1], 2, -1).movedim(-2, -1).unsqueeze(-2)
    rotated = freqs_cis[..., 0] * pairs[..., 0] + freqs_cis[..., 1] * pairs[..., 1]
    return rotated.movedim(-1, -2).reshape(x.shape).to(x.dtype)


def apply_rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `apply_rope1` to queries and keys, (B, H, T, D) or (B, T, H, D)."""
    return apply_rope1(xq, freqs_cis), apply_rope1(xk, freqs_cis)


def apply_rope_split_half(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `apply_rope_split_half1` to queries and keys, (B, H, T, D) or (B, T, H, D)."""
    return apply_rope_split_half1(xq, freqs_cis), apply_rope_split_half1(xk, freqs_cis)


def rms_rope1(x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Apply `apply_rope1` after an RMS norm of the last dimension. scale: (D,)."""
    return apply_rope1(_norm(x, scale, epsilon), freqs_cis)


def rms_rope_split_half1(x: Tensor, freqs_cis: Tensor, scale: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Apply `apply_rope_split_half1` after an RMS norm of the last dimension. scale: (D,)."""
    return apply_rope_split_half1(_norm(x, scale, epsilon), freqs_cis)


def rms_rope(
    q: Tensor, k: Tensor, freqs_cis: Tensor, q_scale: Tensor, k_scale: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Apply `rms_rope1` to queries and keys, with `q_scale`, (D,), for both if there is no `k_scale`, (D,)."""
    k_scale = q_scale if k_scale is None else k_scale
    return rms_rope1(q, freqs_cis, q_scale, epsilon), rms_rope1(k, freqs_cis, k_scale, epsilon)


def rms_rope_split_half(
    q: Tensor,
    k: Tensor,
    freqs_cis: Tensor,
    q_scale: Tensor,
    k_scale: Tensor | None = None,
    epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Apply `rms_rope_split_half1` to queries and keys, with `q_scale`, (D,), for both if there is no `k_scale`, (D,).

    rot_dim: the number of leading entries of the last dimension to rotate; 0 for all. The norm is over all.
    """
    k_scale = q_scale if k_scale is None else k_scale
    q, k = _norm(q, q_scale, epsilon), _norm(k, k_scale, epsilon)
    return _partly_rotated(q, freqs_cis, rot_dim), _partly_rotated(k, freqs_cis, rot_dim)


def _partly_rotated(x: Tensor, freqs_cis: Tensor, rot_dim: int) -> Tensor:
    if rot_dim in (0, x.shape[-1]):
        return apply_rope_split_half1(x, freqs_cis)
    return torch.cat((apply_rope_split_half1(x[..., :rot_dim], freqs_cis), x[..., rot_dim:]), dim=-1)


def _norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), scale, epsilon)


# By the names of the kernels.
ROPES: dict[str, Callable[..., Any]] = {
    "apply_rope": apply_rope,
    "apply_rope1": apply_rope1,
    "apply_rope_split_half": apply_rope_split_half,
    "apply_rope_split_half1": apply_rope_split_half1,
    "rms_rope": rms_rope,
    "rms_rope1": rms_rope1,
    "rms_rope_split_half": rms_rope_split_half,
    "rms_rope_split_half1": rms_rope_split_half1,
}
