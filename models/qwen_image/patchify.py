"""The inputs of one sample to Qwen-Image: the tokens of its image, references and caption, with their positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.ldm.common_dit
import torch
from torch import Tensor
from torch.nn import functional as F

from ..conditioning import model_conditioning
from ..family import NoisySample, Patches
from ..latents import WAN21

PATCH = WAN21.patch


@dataclass(frozen=True)
class SampleParts:
    """Inputs of one sample; N tokens, R of references, L of text, D features.

    tokens: (N, C·patch).
    references: (R, C·patch) or None.
    text: (L, D), padded.
    positions: (N + R + L, 3).
    length: tokens in all, without pads.
    clean_at_zero: whether the references see timestep 0.
    """

    tokens: Tensor
    references: Tensor | None
    text: Tensor
    positions: Tensor
    length: int
    clean_at_zero: bool


def sample_parts(model: Any, sample: NoisySample, guidance: float, device: torch.device) -> SampleParts:
    """Tokenise one sample. Raises ValueError for a conditioning that this forward does not run."""
    text = own_text(sample)
    conditioning = own_conditioning(sample)
    cond = model_conditioning(model, sample.latent, text, conditioning, guidance, device, {"ref_latents"})
    patches = first(patchify_image(sample.latent.to(model.get_dtype_inference())), sample.tokens)
    method = cond.get("ref_latents_method", model.diffusion_model.default_ref_method)
    references = patchify_references(latents, method) if (latents := cond.get("ref_latents")) else None
    # Text continues along the diagonal from the farther edge of the sample's own picture.
    start = max((side + PATCH // 2) // PATCH // 2 for side in sample.latent.shape[-2:])
    text_positions = torch.arange(start, start + sample.text_length, dtype=torch.float32, device=device)
    positions = [patches.positions, text_positions[:, None].expand(-1, 3)]
    if references is not None:
        positions.insert(1, references.positions)
    pads = sample.text_length - text.shape[1]
    assert pads >= 0, (sample.text_length, text.shape)
    return SampleParts(
        tokens=patches.tokens,
        references=None if references is None else references.tokens,
        text=F.pad(cond["c_crossattn"][0], (0, 0, 0, pads)),
        positions=torch.cat(positions),
        length=sum(map(len, positions)) - pads,
        clean_at_zero=method == "index_timestep_zero",
    )


def own_conditioning(sample: NoisySample) -> dict[str, Any]:
    """Return the conditioning without the mask of `own_text`, its reference latents as (1, C, 1, H, W)."""
    conditioning = {k: v for k, v in sample.conditioning.items() if k != "attention_mask"}
    if references := conditioning.get("reference_latents"):
        conditioning["reference_latents"] = [x.unsqueeze(2) if x.ndim == 4 else x for x in references]
    return conditioning


def own_text(sample: NoisySample) -> Tensor:
    """Return the caption, (1, L, D), without the tokens that an attention mask excludes at its end.

    Raises ValueError for any other mask.
    """
    mask = sample.conditioning.get("attention_mask")
    if mask is None:
        return sample.text
    # Core adds a float mask to the scores; other masks are 1 for valid tokens.
    attended = (mask == 0 if mask.is_floating_point() else mask != 0).flatten()
    length = int(attended.sum())
    masked = bool((mask.flatten()[~attended] <= -1e4).all()) if mask.is_floating_point() else True
    if attended.shape[0] != sample.text.shape[1] or not length or not attended[:length].all() or not masked:
        raise ValueError(
            "positive carries an attention mask that does more than leave out the end of the caption, which Qwen-Image "
            "training does not take; encode the caption with a CLIP Text Encode or Text Encode Qwen Image Edit node."
        )
    return sample.text[:, :length]


def patchify_image(latent: Tensor, index: int = 0, h_offset: int = 0, w_offset: int = 0) -> Patches:
    """Cut a latent (C, T, H, W) into tokens of 2×2 cells, (channel, row, column) inside each, with their positions
    (frame, row, column), rows and columns counted from the middle. A picture's frame is `index`; offsets are in cells.
    An odd side is padded as in core."""
    channels, frames = latent.shape[:2]
    latent = comfy.ldm.common_dit.pad_to_patch_size(latent[None], (1, PATCH, PATCH))[0]
    h, w = latent.shape[2] // PATCH, latent.shape[3] // PATCH
    patches = latent.reshape(channels, frames, h, PATCH, w, PATCH).permute(1, 2, 4, 0, 3, 5)
    t = torch.arange(frames, dtype=torch.float32) if frames > 1 else torch.tensor([float(index)])
    rows = _centred(h, h_offset, latent)
    columns = _centred(w, w_offset, latent)
    grid = torch.meshgrid(t.to(latent.device), rows, columns, indexing="ij")
    return Patches(patches.reshape(frames * h * w, -1), torch.stack(grid, dim=-1).reshape(-1, 3))


def first(patches: Patches, keep: int) -> Patches:
    return Patches(patches.tokens[:keep], patches.positions[:keep])


def _centred(count: int, offset: int, latent: Tensor) -> Tensor:
    """Return offset … offset + count − 1 tokens, minus half the count; computed in the latent's dtype, as in core."""
    first = (offset + PATCH // 2) // PATCH
    steps = torch.linspace(first, count - 1 + first, steps=count, dtype=latent.dtype, device=latent.device)
    return (steps - count // 2).float()


def patchify_references(latents: Sequence[Tensor], method: str) -> Patches:
    """Cut reference pictures, each (1, C, T, H, W), into tokens, one picture after the other.

    Positions as in core: `index` and `index_timestep_zero` count frames up from 1, `negative_index` down from −1, any
    other method puts them side by side in frame 1.
    """
    height = width = 0
    cut = []
    for number, latent in enumerate(latents, start=1):
        h_offset = w_offset = 0
        if method in ("index", "index_timestep_zero", "negative_index"):
            index = -number if method == "negative_index" else number
        else:
            index, (h, w) = 1, latent.shape[-2:]
            if h + height > w + width:
                w_offset = width
            else:
                h_offset = height
            height, width = max(height, h + h_offset), max(width, w + w_offset)
        cut.append(patchify_image(latent[0], index, h_offset, w_offset))
    return Patches(torch.cat([c.tokens for c in cut]), torch.cat([c.positions for c in cut]))
