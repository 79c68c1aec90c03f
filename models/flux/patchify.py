"""Latents as tokens with the positions from core's `comfy.ldm.flux.model.Flux.process_img` and `_forward`."""

from collections.abc import Sequence
from typing import Any

import comfy.ldm.common_dit
import torch
from torch import Tensor

from ..family import Patches

TIMESTEP_ZERO = "index_timestep_zero"


def patchify_image(
    latent: Tensor, patch: int, axes: int, index: float = 0.0, h_offset: int = 0, w_offset: int = 0
) -> Patches:
    """Cut a latent (C, H, W) into tokens of patch × patch cells in row order, (channel, row, column) inside each, with
    their positions (index, row, column, and 0 along further axes). Offsets are in cells. A side that is no whole number
    of patches is padded as in core."""
    latent = comfy.ldm.common_dit.pad_to_patch_size(latent[None], (patch, patch))[0]
    channels, height, width = latent.shape
    h, w = height // patch, width // patch
    patches = latent.reshape(channels, h, patch, w, patch).permute(1, 3, 0, 2, 4)
    rows, columns = (
        torch.arange(count, dtype=torch.float32, device=latent.device) + (offset + patch // 2) // patch
        for count, offset in ((h, h_offset), (w, w_offset))
    )
    row, column = (x.flatten() for x in torch.meshgrid(rows, columns, indexing="ij"))
    positions = torch.stack((torch.full_like(row, index), row, column, *[torch.zeros_like(row)] * (axes - 3)), dim=-1)
    return Patches(patches.reshape(h * w, channels * patch * patch), positions)


def patchify_references(latents: Sequence[Tensor], method: str, size: Sequence[int], params: Any) -> Patches:
    """Cut reference pictures, each (1, C, H, W), into tokens, one picture after the other. size: (H, W) of the sample's
    own latent; params: those of core's model.

    Positions follow ComfyUI's `reference_latents_method`: `index` and `index_timestep_zero` count along the first axis;
    `uxo` continues along the diagonal from the far corner of all previous pictures; any other (`offset`) puts them side
    by side at 1 of the first axis. Raises ValueError for latents of another VAE.
    """
    patch, index = params.patch_size, 0.0
    height = width = 0
    cut = []
    for latent in latents:
        if latent.ndim != 4:
            raise ValueError(
                f"A reference picture has the shape {tuple(latent.shape)}, as VAEs for video give it, and the model "
                "takes (1, channels, height, width); encode it with the model's own VAE."
            )
        channels, h, w = latent.shape[1:]
        if channels != params.in_channels:
            raise ValueError(
                f"A reference picture has {channels} latent channels and the model takes {params.in_channels}; encode "
                "it with the model's own VAE."
            )
        h_offset = w_offset = 0
        if method in ("index", TIMESTEP_ZERO):
            index += params.ref_index_scale
        elif method == "uxo":
            h_offset, w_offset = (
                -(-side // patch) * patch + past for side, past in zip(size, (height, width), strict=True)
            )
            height, width = height + h, width + w
        else:
            index = 1.0
            if h + height > w + width:
                w_offset = width
            else:
                h_offset = height
            height, width = max(height, h + h_offset), max(width, w + w_offset)
        cut.append(patchify_image(latent[0], patch, len(params.axes_dim), index, h_offset, w_offset))
    return Patches(torch.cat([c.tokens for c in cut]), torch.cat([c.positions for c in cut]))
