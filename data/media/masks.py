"""Masks of the loss: a mask image or an alpha channel as the mean over each token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.fingerprint import fingerprint
from ...common.text import shortlist
from ..buckets.grids import Placement
from ..cache import EncodeJob
from .frames import Crop
from .images import inspect_image, load_mask

# Part of every key: raise it when the same mask gives other weights than before.
VERSION = 1
# Shapes (width / height) of a mask and its picture that differ by no more are one, which is scaled.
SAME_SHAPE = 0.01
TOKENS = "mask"
# A mask that is nowhere brighter (0 to 1) and not black holds the numbers of labels, or is painted in near black.
FAINT = 0.02


@dataclass(frozen=True)
class Mask:
    """Mask of an image or video. path: of the mask picture, or of the picture whose alpha channel it is; size: its own
    (height, width) in pixels; wide: as of its ImageFacts."""

    path: Path
    name: str
    digest: str
    size: tuple[int, int]
    alpha: bool
    wide: bool = False

    @property
    def key(self) -> Any:
        return (self.digest, "alpha" if self.alpha else "by range" if self.wide else "grey")

    def job(self, crop: Crop, placement: Placement) -> EncodeJob:
        """{"mask": (rows, columns)} of the grid of `crop`, 0 to 1: the mean of the mask over each token's square."""
        down, across = self.size[0] / crop.pixels.size[0], self.size[1] / crop.pixels.size[1]
        left, top, right, bottom = crop.box
        box = (left * across, top * down, right * across, bottom * down)
        shape = (placement.grid.height, placement.grid.width)
        key = fingerprint("mask", VERSION, self.key, box, shape, crop.flip)
        encode = partial(self._encode, box, *shape, crop.flip)
        return EncodeJob(key, {TOKENS: shape}, 4 * shape[0] * shape[1], encode, self.name)

    @property
    def faint(self) -> bool:
        """Tell if its brightest pixel is all but black; an entirely black mask is not meant."""
        brightest = load_mask(self.path, alpha=self.alpha, digest=self.digest, name=self.name).max()
        return bool(0 < brightest < FAINT)

    def _encode(self, box: tuple[float, float, float, float], height: int, width: int, flip: bool) -> dict[str, Tensor]:
        whole = load_mask(self.path, alpha=self.alpha, digest=self.digest, name=self.name)
        mean = area_mean(whole, box, height, width)
        return {TOKENS: mean.flip(1) if flip else mean}


def find_mask(picture: Path, mask: Path | None, name: str, size: tuple[int, int]) -> Mask:
    """Find the mask of an image or video of `size`: a picture of its own, or without one the picture's alpha channel.

    Raises ValueError for a mask of another shape than its picture.
    """
    if mask is None:
        facts = inspect_image(picture, name)
        return Mask(picture, name, facts.digest, facts.size, True)
    called = f"{mask.name} (mask)"
    facts = inspect_image(mask, called)
    if abs(log(facts.size[1] / facts.size[0]) - log(size[1] / size[0])) > SAME_SHAPE:
        raise ValueError(
            f"The mask {mask.name!r} is {facts.size[1]} x {facts.size[0]} pixels and {name!r}, to which it belongs, "
            f"{size[1]} x {size[0]}; make the mask of the same size, or of the same shape."
        )
    return Mask(mask, called, facts.digest, facts.size, False, facts.wide)


def area_mean(mask: np.ndarray, box: tuple[float, float, float, float], height: int, width: int) -> Tensor:
    """Average `mask`, (H, W), over each of height x width equal parts of `box` (left, top, right, bottom): fp32,
    (height, width). A pixel that lies in a part by a fraction counts by that fraction."""
    left, top, right, bottom = box
    rows, columns = _shares(top, bottom, height, mask.shape[0]), _shares(left, right, width, mask.shape[1])
    return torch.from_numpy(rows @ mask @ columns.T).float().clamp(0.0, 1.0)


def _shares(start: float, end: float, parts: int, pixels: int) -> np.ndarray:
    """(parts, pixels): how much of each part of start … end lies in each pixel; each row sums to 1."""
    edges = np.linspace(start, end, parts + 1)
    pixel = np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    shares = overlap.clip(min=0.0)
    return shares / shares.sum(axis=1, keepdims=True)


def token_weights(mask: Tensor, placement: Placement, unmasked_weight: float) -> Tensor:
    """Compute the weight of each kept token, (tokens,): unmasked_weight + (1 − unmasked_weight) · mask, the same in
    every frame of a clip. mask: (rows, columns) of the grid."""
    kept = placement.tokens // placement.grid.frames
    weights = unmasked_weight + (1.0 - unmasked_weight) * mask.flatten()[:kept]
    return weights.repeat(placement.grid.frames)


def check_alpha(names: Sequence[str], of: int) -> None:
    """ValueError where pictures lack the alpha channel that is to be their mask. of: how many have to have one."""
    if names:
        raise ValueError(
            f"alpha_mask is on and {len(names)} of {of} pictures have no alpha channel: {shortlist(names)}; save them "
            f"as PNG with one, or take mask pictures with mask_folder."
        )


def check_masks(faint: Sequence[str], empty: Sequence[str]) -> None:
    """ValueError for masks, by their names, whose brightest pixel is all but black, and for those of which nothing
    counts."""
    if faint:
        named = shortlist(list(dict.fromkeys(faint)))
        raise ValueError(
            f"Masks whose brightest pixel is all but black, below {FAINT:.0%} of white: {named}; paint what "
            f"counts white, 255 of 8 bits (opaque with alpha_mask): 1 is the number of a label, not a brightness."
        )
    if empty:
        named = shortlist(list(dict.fromkeys(empty)))
        raise ValueError(
            f"Masked out whole, as it is cropped, which leaves nothing to learn: {named}; paint what is to be "
            f"learnt white (opaque with alpha_mask), raise unmasked_weight, or take the picture out of the folder."
        )


def mask_notes(counted: Sequence[float]) -> Iterator[str]:
    """counted: how much of each masked picture or clip counts, 0 to 1."""
    if counted:
        yield f"Masked: {len(counted)} pictures or clips, of which {sum(counted) / len(counted):.0%} count in the mean."
