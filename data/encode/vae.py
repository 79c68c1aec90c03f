"""What the VAE and the CLIP vision model encode of a picture or clip, exactly as ComfyUI's own nodes encode it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...common.fingerprint import fingerprint, weights_fingerprint
from ...models.latents import LatentPolicy
from ..buckets.grids import Placement, crop_box
from ..cache import Job
from ..media.frames import Cut, Pixels
from .augmentation import PLAIN_VIEW, View
from .clip_vision import SEEN, WIDTH, seen_by

# Part of every key: raise it when the same inputs give other tensors than before.
VERSION = 2
BYTES = 4  # of a number in the cache: core's encoders give float32

# What CLIP-H gives of a picture for Wan 2.1: 257 tokens of its width.
_VISION_NUMBERS = 257 * WIDTH


@dataclass(frozen=True)
class PictureEncoder:
    """Jobs for one VAE. policy: of its latents."""

    vae: Any
    policy: LatentPolicy

    def cut(self, pixels: Pixels, placement: Placement, view: View = PLAIN_VIEW) -> Cut:
        pixels_per_token = self.policy.pixels_per_token
        box, (height, width) = crop_box(pixels.size, placement.grid, pixels_per_token, view.zoom, view.at)
        return Cut(pixels, box, height, width, view.flip)

    def latent(self, cut: Cut) -> Job:
        """{"latent": (C, h, w)}, or (C, T, h, w) of a VAE for video, which takes a picture as one frame."""
        kind = "picture" if cut.pixels.frames == 1 else "clip"
        key = fingerprint(kind, VERSION, cut.pixels.key, *cut.place, self._key)
        shape = (self.policy.channels, *self._cells(cut))
        return self._job(key, {"latent": shape}, partial(_encode_latent, self._whole, cut), cut)

    def start(self, cut: Cut) -> Job:
        """What an image-to-video model is told of a clip's first frame, {"concat_latent_image": (1, C, T, h, w),
        "concat_mask": (1, 1, T, h, w)}, as core's WanImageToVideo makes it of that frame alone."""
        key = fingerprint("start", VERSION, cut.first().key, cut.pixels.frames, self._key)
        cells = self._cells(cut)
        shapes = {"concat_latent_image": (1, self.policy.channels, *cells), "concat_mask": (1, 1, *cells)}
        return self._job(key, shapes, partial(_encode_start, self._whole, cut), cut)

    def _job(self, key: str, shapes: Mapping[str, tuple[int, ...]], encode: Any, cut: Cut) -> Job:
        return Job(key, shapes, BYTES * sum(map(prod, shapes.values())), encode, cut.pixels.name)

    def _cells(self, cut: Cut) -> tuple[int, ...]:
        cells = (cut.height // self.policy.pixels_per_latent, cut.width // self.policy.pixels_per_latent)
        return (self.policy.latent_frames(cut.pixels.frames), *cells) if self.policy.frames_per_latent else cells

    @cached_property
    def _key(self) -> Any:
        return (weights_fingerprint(self.vae.patcher), str(self.vae.vae_dtype))

    @cached_property
    def _whole(self) -> Any:
        return _without_tiles(self.vae)


def vision_job(clip_vision: Any, cut: Cut) -> Job:
    """{SEEN: (1, tokens, width)} of a clip's first frame, as core's CLIPVisionEncode gives them
    with crop center."""
    encoder = weights_fingerprint(clip_vision.patcher)
    key = fingerprint("vision", VERSION, cut.first().key, encoder)
    return Job(
        key,
        {SEEN: (1, None, None)},
        _VISION_NUMBERS * BYTES,
        partial(_encode_vision, clip_vision, cut),
        cut.pixels.name,
    )


class _NoTiles(Exception):
    """The VAE ran out of memory, where core would encode in tiles."""


def _without_tiles(vae: Any) -> Any:
    """The VAE as a shallow copy that raises where core goes on in tiles: their seams would stay in the cache."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise _NoTiles

    whole = copy.copy(vae)
    for name in ("encode_tiled_", "encode_tiled_1d", "encode_tiled_3d", "_encode_tiled_owned"):
        setattr(whole, name, refuse)
    return whole


@torch.inference_mode()
def _encode_latent(vae: Any, cut: Cut) -> dict[str, Tensor]:
    return {"latent": _encode(vae, cut.load(), cut)[0]}


@torch.inference_mode()
def _encode_start(vae: Any, cut: Cut) -> dict[str, Tensor]:
    """The first frame and grey (0.5) after it; the mask is 0 where a frame is given."""
    frames = torch.full((cut.pixels.frames, cut.height, cut.width, 3), 0.5)
    frames[:1] = cut.first().load()
    latent = _encode(vae, frames, cut)
    mask = torch.ones(1, 1, *latent.shape[2:])
    mask[:, :, :1] = 0.0
    return {"concat_latent_image": latent, "concat_mask": mask}


@torch.inference_mode()
def _encode_vision(clip_vision: Any, cut: Cut) -> dict[str, Tensor]:
    return {SEEN: seen_by(clip_vision.encode_image(cut.first().load(), crop=True))}


def _encode(vae: Any, pixels: Tensor, cut: Cut) -> Tensor:
    try:
        return vae.encode(pixels)
    except _NoTiles:
        # Of core's own kind, upon which core unloads all models.
        frames = "" if len(pixels) == 1 else f" and {len(pixels)} frames"
        fix = "lower megapixels" if len(pixels) == 1 else "lower megapixels or target_frames"
        raise comfy.model_management.OOM_EXCEPTION(
            f"The VAE ran out of memory encoding {cut.pixels.name!r} at {cut.width} x {cut.height} pixels{frames}; "
            f"{fix}, or close what else uses the device's memory. What is encoded is kept."
        ) from None
