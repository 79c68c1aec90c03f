"""Latents and conditionings that core's nodes encoded, as training data."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..models.latents import FLUX
from .data import Sample, SampleTensors, TrainingData
from .dataset import shortlist
from .fingerprint import fingerprint
from .tokens import Grid, Placement, place_latents

Conditioning = list[Any]  # ComfyUI's: [[cond, {"pooled_output": …}], …]


def latents_to_data(
    latents: Sequence[Mapping[str, Any]], positive: Sequence[Conditioning], max_graphs: int
) -> TrainingData:
    """Training data from lists of ComfyUI's LATENT and CONDITIONING, as core's dataset nodes give them.

    latents: dicts whose "samples" are (C, H, W), (B, C, H, W) or (B, C, T, H, W); each picture of a batch is a sample.
    positive: one conditioning for each latent of the list (for a batch: one entry per picture, or one for all of it),
        or as many entries as there are pictures in all, or a single one for all.
    Latents of more than `max_graphs` token counts are cut in the middle to few counts, and an odd side loses one row or
    column of cells; notes say so. Noise masks are left out, with a note. Tensors are copied to the host so that they
    can be saved for backward.
    Raises ValueError where counts or shapes do not fit, and for values that are not finite.
    """
    batches = [_split(latent["samples"], index) for index, latent in enumerate(latents)]
    pictures = [picture for batch in batches for picture in batch]
    if not pictures:
        raise ValueError("latents is empty; connect the latents of Make Training Dataset or VAE Encode.")
    _check_channels(pictures)
    entries = _match(positive, [len(batch) for batch in batches])
    grids = [_grid(picture, index) for index, picture in enumerate(pictures)]
    placements = place_latents(grids, max_graphs)
    samples, names = [], []
    for index, (picture, entry, grid, placement) in enumerate(zip(pictures, entries, grids, placements, strict=True)):
        name = f"latent {index + 1}"
        tensors = _tensors(_cut(picture, grid, placement.grid), entry, name)
        names.append(fingerprint(tensors.latent, tensors.text, tensors.conditioning, placement.tokens))
        shape = (placement.grid.frames, placement.grid.height, placement.grid.width)
        known = frozenset(key for key, value in tensors.conditioning.items() if value is not None)
        samples.append(
            Sample(name, shape, placement.tokens, tensors.text.shape[1], partial(_given, tensors), conditioning=known)
        )
    notes = (*_mask_notes(latents, [len(batch) for batch in batches]), *_notes(pictures, grids, placements, samples))
    return TrainingData(tuple(samples), fingerprint(names), notes)


def _given(tensors: SampleTensors) -> SampleTensors:
    return tensors


def _split(samples: Tensor, index: int) -> list[Tensor]:
    """A latent as its pictures, (C, H, W), or clips, (C, T, H, W); a single frame is a picture."""
    if samples.ndim not in (3, 4, 5):
        raise ValueError(
            f"Latent {index + 1} has the shape {tuple(samples.shape)}; it must be (C, H, W), (B, C, H, W) or "
            f"(B, C, T, H, W)."
        )
    batch = samples[None] if samples.ndim == 3 else samples
    return [one.squeeze(1) if one.ndim == 4 and one.shape[1] == 1 else one for one in batch]


def _match(positive: Sequence[Conditioning], batches: list[int]) -> list[Any]:
    """One conditioning entry for each picture."""
    pictures = sum(batches)
    if len(positive) == len(batches) and all(len(p) in (1, size) for p, size in zip(positive, batches, strict=True)):
        return [
            entry
            for entries, size in zip(positive, batches, strict=True)
            for entry in (entries if len(entries) == size else entries * size)
        ]
    flat = [entry for entries in positive for entry in entries]
    if len(flat) == pictures:
        return flat
    if len(flat) == 1:
        return flat * pictures
    raise ValueError(
        f"positive has {len(flat)} conditionings and latents has {pictures} pictures; give one for each picture, or "
        f"one for all."
    )


def _check_channels(pictures: list[Tensor]) -> None:
    channels = [picture.shape[0] for picture in pictures]
    other = next((index for index, count in enumerate(channels) if count != channels[0]), None)
    if other is not None:
        raise ValueError(
            f"latents have different numbers of channels (latent 1 has {channels[0]}, latent {other + 1} has "
            f"{channels[other]}); encode all pictures with one VAE."
        )


def _grid(picture: Tensor, index: int) -> Grid:
    height, width = (side // FLUX.patch for side in picture.shape[-2:])
    if height < 1 or width < 1:
        raise ValueError(
            f"Picture {index + 1} of latents is {picture.shape[-2]} x {picture.shape[-1]} cells, too small for a "
            f"token of {FLUX.patch} x {FLUX.patch}; encode a larger picture."
        )
    return Grid(height, width, picture.shape[1] if picture.ndim == 4 else 1)


def _cut(picture: Tensor, grid: Grid, target: Grid) -> Tensor:
    """The middle of a latent, in whole tokens of its own grid."""
    top = (grid.height - target.height) // 2 * FLUX.patch
    left = (grid.width - target.width) // 2 * FLUX.patch
    return picture[..., top : top + target.height * FLUX.patch, left : left + target.width * FLUX.patch]


def _tensors(latent: Tensor, entry: Any, name: str) -> SampleTensors:
    cond, conditioning = entry[0], entry[1]
    if cond.ndim != 3 or cond.shape[0] != 1:
        shape = tuple(cond.shape)
        raise ValueError(f"The conditioning of {name} has the shape {shape}; it must be (1, tokens, width).")
    for what, tensor in ((name, latent), (f"The conditioning of {name}", cond)):
        if not torch.isfinite(tensor).all():
            raise ValueError(
                f"{what[0].upper()}{what[1:]} holds values that are not finite; encode it again, with the VAE or the "
                f"text encoders in a wider dtype (ComfyUI's --fp32-vae or --fp32-text-enc)."
            )
    return SampleTensors(
        _own(latent),
        _own(cond),
        {key: _own(value) if isinstance(value, Tensor) else value for key, value in conditioning.items()},
    )


def _own(tensor: Tensor) -> Tensor:
    """A copy on the host that autograd accepts: ComfyUI runs nodes in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _mask_notes(latents: Sequence[Mapping[str, Any]], sizes: list[int]) -> Iterator[str]:
    starts = accumulate(sizes, initial=1)
    masked = [
        f"latent {start + index}"
        for latent, start, size in zip(latents, starts, sizes, strict=False)
        if latent.get("noise_mask") is not None
        for index in range(size)
    ]
    if masked:
        yield f"The noise mask is left out, as training takes whole pictures, of {shortlist(masked)}."


def _notes(
    pictures: list[Tensor], grids: list[Grid], placements: list[Placement], samples: list[Sample]
) -> Iterator[str]:
    sides = [picture.shape[-2:] for picture in pictures]
    odd = [s.name for s, side in zip(samples, sides, strict=True) if any(cells % FLUX.patch for cells in side)]
    if odd:
        yield f"Cut to whole tokens, having an odd number of cells along a side: {shortlist(odd)}."
    cut = [
        f"{sample.name} (from {grid.width} x {grid.height} to {p.grid.width} x {p.grid.height} tokens, {p.crop:.1%})"
        for sample, grid, p in zip(samples, grids, placements, strict=True)
        if p.crop > 0
    ]
    if cut:
        counts = ", ".join(str(count) for count in sorted({p.tokens for p in placements}))
        yield f"Cropped to keep within max_graphs ({counts} tokens, ragged edge): {shortlist(cut)}."
    lengths = sorted({sample.text_length for sample in samples})
    if len(lengths) > 1:
        listed = ", ".join(map(str, lengths))
        yield f"The captions have {len(lengths)} lengths ({listed} tokens), each compiled on its own."
