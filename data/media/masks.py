"""Loss masks: a mask image or an alpha channel, averaged over each token."""

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
from ...common.text import quantity, shortlist
from ..buckets.grids import Placement
from ..cache import EncodeJob
from .frames import Crop
from .images import inspect_image, load_mask
from .strips import mask_factor
from .videos import SAME_SHAPE

# Part of every key: raise it when the same mask gives other weights than before.
VERSION = 1
TOKENS = "mask"
# A mask whose maximum (0 to 1) is below this, but not 0, holds label numbers or is painted in near black.
FAINT = 0.02


@dataclass(frozen=True)
class Mask:
    """Mask of an image or video.

    path: mask image, or the image whose alpha channel is the mask.
    name: name in messages.
    digest: hash of the file's bytes.
    size: its own (height, width) in pixels.
    alpha: the mask is the alpha channel.
    """

    path: Path
    name: str
    digest: str
    size: tuple[int, int]
    alpha: bool

    @property
    def key(self) -> Any:
        """Content key of the mask, part of cache keys."""
        return (self.digest, "alpha" if self.alpha else "grey")

    def job(self, crop: Crop, placement: Placement) -> EncodeJob:
        """Job of the token means of a crop: {"mask": (rows, columns)}, 0 to 1.

        Each is the mean of the mask over the token's square.
        """
        down, across = self.size[0] / crop.pixels.size[0], self.size[1] / crop.pixels.size[1]
        left, top, right, bottom = crop.box
        box = (left * across, top * down, right * across, bottom * down)
        height, width = placement.grid.height, placement.grid.width
        key = fingerprint("mask", VERSION, self.key, box, (height, width), crop.flip)
        encode = partial(self._encode, box, height, width, crop.flip)
        return EncodeJob(key, {TOKENS: (height, width)}, 4 * height * width, encode, self.name)

    @property
    def faint(self) -> bool:
        """True if the brightest pixel is almost black; an entirely black mask does not count."""
        brightest = load_mask(self.path, alpha=self.alpha, digest=self.digest, name=self.name).max()
        return bool(0 < brightest < FAINT)

    def _encode(self, box: tuple[float, float, float, float], height: int, width: int, flip: bool) -> dict[str, Tensor]:
        whole = load_mask(self.path, alpha=self.alpha, digest=self.digest, name=self.name)
        factor = mask_factor(self.size)
        left, top, right, bottom = box
        mean = area_mean(whole, (left / factor, top / factor, right / factor, bottom / factor), height, width)
        return {TOKENS: mean.flip(1) if flip else mean}


def find_mask(picture: Path, mask: Path | None, name: str, size: tuple[int, int]) -> Mask:
    """Find the mask of an image or video.

    picture: the image or video file.
    mask: mask image; None for the alpha channel of the image.
    name: name of the image or video in messages.
    size: its (height, width) in pixels.
    Raises ValueError for a mask of another aspect.
    """
    if mask is None:
        facts = inspect_image(picture, name)
        return Mask(picture, name, facts.digest, facts.size, True)
    called = f"{mask.name} (mask)"
    facts = inspect_image(mask, called)
    if abs(log(facts.size[1] / facts.size[0]) - log(size[1] / size[0])) > SAME_SHAPE:
        raise ValueError(
            f"The mask {mask.name!r} is {facts.size[1]} x {facts.size[0]} pixels, but {name!r} is "
            f"{size[1]} x {size[0]}; give the mask the same size or the same shape."
        )
    return Mask(mask, called, facts.digest, facts.size, False)


def area_mean(mask: np.ndarray, box: tuple[float, float, float, float], height: int, width: int) -> Tensor:
    """Average a mask (H, W) over each of height x width equal parts of `box`: (height, width), fp32.

    box: (left, top, right, bottom) in pixels of the mask. A pixel on an edge counts by the fraction inside.
    """
    left, top, right, bottom = box
    rows, columns = _shares(top, bottom, height, mask.shape[0]), _shares(left, right, width, mask.shape[1])
    return torch.from_numpy(rows @ mask @ columns.T).float().clamp(0.0, 1.0)


def _shares(start: float, end: float, parts: int, pixels: int) -> np.ndarray:
    """Compute the fraction of each of `parts` equal intervals of start … end that is in each pixel: (parts, pixels).

    Each row sums to 1.
    """
    edges = np.linspace(start, end, parts + 1)
    pixel = np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    shares = overlap.clip(min=0.0)
    return shares / shares.sum(axis=1, keepdims=True)


def token_weights(mask: Tensor, placement: Placement, unmasked_weight: float) -> Tensor:
    """Compute the weight of each kept token, (tokens,): unmasked_weight + (1 − unmasked_weight) · mask.

    mask: (rows, columns) of the grid; the same for every frame of a video.
    """
    frame_tokens = placement.tokens // placement.grid.frames
    weights = unmasked_weight + (1.0 - unmasked_weight) * mask.flatten()[:frame_tokens]
    return weights.repeat(placement.grid.frames)


def check_alpha(names: Sequence[str], total: int) -> None:
    """Check that all images with alpha_mask have an alpha channel.

    names: images without one.
    total: number of images that need one.
    Raises ValueError if there are such images.
    """
    if names:
        pictures = quantity(total, "picture")
        raise ValueError(
            f"alpha_mask is on and {quantity(len(names), f'of {pictures} has', f'of {pictures} have')} no alpha "
            f"channel: {shortlist(names)}; save {'it' if len(names) == 1 else 'them'} as PNG with one, or use "
            "mask_folder instead."
        )


def check_masks(faint: Sequence[str], empty: Sequence[str]) -> None:
    """Check the masks by name.

    faint: masks whose brightest pixel is almost black.
    empty: masks that leave nothing to learn.
    Raises ValueError if there are any.
    """
    if faint:
        names = shortlist(list(dict.fromkeys(faint)))
        raise ValueError(
            f"These masks are almost black everywhere (below {FAINT:.0%} of white): {names}; paint what should be "
            "learnt white, 255 in 8 bits (opaque with alpha_mask), and don't use label numbers such as 1."
        )
    if empty:
        names = shortlist(list(dict.fromkeys(empty)))
        raise ValueError(
            f"Once cropped, the mask covers all of these, so there is nothing to learn: {names}; paint what should be "
            "learnt white (opaque with alpha_mask), raise unmasked_weight, or take the picture out of the folder."
        )


def mask_notes(counted: Sequence[float]) -> Iterator[str]:
    """Yield a note on the fraction of the masked images that counts.

    counted: mean token weight of each masked image or video, 0 to 1.
    """
    if counted:
        yield (
            f"{quantity(len(counted), 'picture or clip has a mask', 'pictures or clips have masks')}, and on average "
            f"{sum(counted) / len(counted):.0%} of {'it' if len(counted) == 1 else 'them'} counts."
        )
