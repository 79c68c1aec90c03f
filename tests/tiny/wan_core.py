"""What ComfyUI's own Wan says of a sample, for tests to compare with."""

from typing import Any

import torch
from torch import Tensor


def tokens_of(x: Tensor) -> Tensor:
    """(C, T, 2h, 2w) → (T, h·w, 4·C), ordered as (row, column, channel) inside a token."""
    c, t, height, width = x.shape
    return x.unfold(2, 2, 2).unfold(3, 2, 2).permute(1, 2, 3, 4, 5, 0).reshape(t, height * width // 4, 4 * c)


def padded_text(sample: Any) -> Tensor:
    """(1, L, D): zeros after the caption, as core's encoder gives them."""
    text = sample.load().text
    return torch.cat((text, text.new_zeros(1, sample.text_length - text.shape[1], text.shape[2])), dim=1)


def core_conds(model: Any, sample: Any, x: Tensor) -> dict[str, Any]:
    """What core's `extra_conds` makes of a sample whose noisy latent is x (1, C, T, H, W)."""
    read = sample.load()
    copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in read.conditioning.items()}
    made = model.model.extra_conds(noise=x, device=x.device, cross_attn=padded_text(sample), **copied)
    conds = {name: cond.cond for name, cond in made.items()}
    if sample.clean_frames:
        # What core's sampler passes on of a latent's noise mask.
        mask = torch.ones(1, 1, *x.shape[2:])
        mask[:, :, : sample.clean_frames] = 0
        conds["denoise_mask"] = mask
    return conds


def core_velocity(model: Any, sample: Any, sigma: float, x: Tensor | None = None) -> Tensor:
    """(1, N, 4·C) from `apply_model` on x (1, C, T, H, W), or on the sample's latent taken as the noisy one."""
    x = sample.load().latent[None] if x is None else x
    denoised = model.model.apply_model(x, torch.tensor([sigma]), **core_conds(model, sample, x))
    return tokens_of(((x.double() - denoised.double()) / sigma)[0]).flatten(0, 1)[None].float()


def core_on_kept_tokens(model: Any, sample: Any, sigma: float) -> Tensor:
    """The same from core's own modules, called one by one on just the tokens that a ragged edge keeps."""
    from comfy.ldm.wan.model import sinusoidal_embedding_1d

    core, x = model.model.diffusion_model, sample.load().latent[None]
    conds = core_conds(model, sample, x)
    if "c_concat" in conds:
        x = torch.cat((x, conds["c_concat"]), dim=1)
    frames, height, width = sample.grid
    kept = torch.arange(frames * height * width).reshape(frames, -1)[:, : sample.tokens // frames].flatten()
    h = core.patch_embedding(x).flatten(2).transpose(1, 2)[:, kept]
    freqs = core.rope_encode(*x.shape[2:], device=x.device, dtype=x.dtype)[:, kept]
    t = torch.full((frames,), 1000 * sigma)
    t[: sample.clean_frames] = 0
    t = t.repeat_interleave(sample.tokens // frames)
    e = core.time_embedding(sinusoidal_embedding_1d(core.freq_dim, t))[None]
    projected = core.time_projection(e).unflatten(2, (6, core.dim))
    context, image = core.text_embedding(conds["c_crossattn"]), conds.get("clip_fea")
    if image is not None:
        context = torch.cat((core.img_emb(image), context), dim=1)
    for block in core.blocks:
        h = block(h, e=projected, freqs=freqs, context=context, context_img_len=257)
    return core.head(h, e)
