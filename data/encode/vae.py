"""VAE and CLIP vision encoding of an image or video, exactly as ComfyUI's own nodes encode it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...common.core import end_of_node, without_tiled_encoding
from ...common.fingerprint import fingerprint, weights_fingerprint
from ...models.latents import LatentPolicy
from ..buckets.grids import Placement, crop_box
from ..cache import EncodeJob
from ..media.frames import Crop, Pixels
from .augmentation import PLAIN_VIEW, View
from .clip_vision import CLIP_H_WIDTH, HIDDEN_STATES, hidden_states

# Part of every key: raise it when the same inputs give other tensors than before.
VERSION = 2
BYTES = 4  # of a number in the cache: core's encoders give float32

# Numbers in CLIP-H's hidden states of one image for Wan 2.1: 257 tokens of its width.
_VISION_NUMBERS = 257 * CLIP_H_WIDTH


@dataclass(frozen=True)
class VaeEncoder:
    """Encode jobs of one VAE.

    vae: ComfyUI's VAE.
    policy: layout of its latents.
    """

    vae: Any
    policy: LatentPolicy

    def crop(self, pixels: Pixels, placement: Placement, view: View = PLAIN_VIEW) -> Crop:
        """Crop an image or video to its grid, at the grid's size in pixels."""
        pixels_per_token = self.policy.pixels_per_token
        box, (height, width) = crop_box(pixels.size, placement.grid, pixels_per_token, view.zoom, view.position)
        return Crop(pixels, box, height, width, view.flip)

    def latent(self, crop: Crop) -> EncodeJob:
        """Job of a latent: {"latent": (C, h, w)}, or (C, T, h, w) of a video VAE, which takes an image as one frame."""
        kind = "picture" if crop.pixels.frames == 1 else "clip"
        key = fingerprint(kind, VERSION, crop.pixels.key, *crop.region, self._key)
        shape = self._shape((self.policy.channels,), crop)
        return self._job(key, {"latent": shape}, partial(_encode_latent, self._whole, crop), crop)

    def start(self, crop: Crop) -> EncodeJob:
        """Job of a video's first frame as the start image, as core's WanImageToVideo encodes it.

        Its tensors are {"concat_latent_image": (1, C, T, h, w), "concat_mask": (1, 1, T, h, w)}.
        """
        key = fingerprint("start", VERSION, crop.first().key, crop.pixels.frames, self._key)
        shapes = {
            "concat_latent_image": self._shape((1, self.policy.channels), crop),
            "concat_mask": self._shape((1, 1), crop),
        }
        return self._job(key, shapes, partial(_encode_start, self._whole, crop), crop)

    def _job(self, key: str, shapes: Mapping[str, tuple[int, ...]], encode: Any, crop: Crop) -> EncodeJob:
        return EncodeJob(key, shapes, BYTES * sum(map(prod, shapes.values())), encode, crop.pixels.name)

    def _shape(self, leading: tuple[int, ...], crop: Crop) -> tuple[int, ...]:
        """Shape of a latent with these leading axes: (…, h, w), or (…, T, h, w) of a video VAE."""
        if self.policy.frames_per_latent:
            leading += (self.policy.latent_frames(crop.pixels.frames),)
        cell = self.policy.pixels_per_latent
        return leading + (crop.height // cell, crop.width // cell)

    @cached_property
    def _key(self) -> Any:
        return (weights_fingerprint(self.vae.patcher), str(self.vae.vae_dtype))

    @cached_property
    def _whole(self) -> Any:
        return _without_tiles(self.vae)


def vision_job(clip_vision: Any, crop: Crop) -> EncodeJob:
    """Job of the CLIP vision output of a video's first frame: {HIDDEN_STATES: (1, tokens, width)}.

    Equal to core's CLIPVisionEncode with crop center.
    """
    encoder = weights_fingerprint(clip_vision.patcher)
    key = fingerprint("vision", VERSION, crop.first().key, encoder)
    return EncodeJob(
        key,
        {HIDDEN_STATES: (1, None, None)},
        _VISION_NUMBERS * BYTES,
        partial(_encode_vision, clip_vision, crop),
        crop.pixels.name,
    )


class _NoTiles(Exception):
    """Out of memory in the VAE, upon which core would encode in tiles."""


def _without_tiles(vae: Any) -> Any:
    """Copy the VAE shallowly and disable its fallback to tiles, whose seams would stay in the cache."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise _NoTiles

    return without_tiled_encoding(vae, refuse)


@torch.inference_mode()
def _encode_latent(vae: Any, crop: Crop) -> dict[str, Tensor]:
    with _told_out_of_memory(crop):
        return {"latent": vae.encode(crop.load())[0]}


@torch.inference_mode()
def _encode_start(vae: Any, crop: Crop) -> dict[str, Tensor]:
    """Encode the first frame followed by grey (0.5) frames; the mask is 0 where a frame is given."""
    with _told_out_of_memory(crop):
        frames = torch.full((crop.pixels.frames, crop.height, crop.width, 3), 0.5)
        frames[:1] = crop.first().load()
        latent = vae.encode(frames)
    mask = torch.ones(1, 1, *latent.shape[2:])
    mask[:, :, :1] = 0.0
    return {"concat_latent_image": latent, "concat_mask": mask}


@torch.inference_mode()
def _encode_vision(clip_vision: Any, crop: Crop) -> dict[str, Tensor]:
    try:
        return {HIDDEN_STATES: hidden_states(clip_vision.encode_image(crop.first().load(), crop=True))}
    finally:
        end_of_node()


@contextmanager
def _told_out_of_memory(crop: Crop) -> Iterator[None]:
    """Convert the errors of a crop too large to load or encode untiled into core's out-of-memory error."""
    try:
        yield
    except (_NoTiles, MemoryError, RuntimeError) as error:
        # Torch's error for the computer's own memory has no class of its own.
        if not isinstance(error, (_NoTiles, MemoryError)) and "DefaultCPUAllocator" not in str(error):
            raise
        # Core's own exception class: core unloads all models when a node raises it.
        count = crop.pixels.frames
        frames = "" if count == 1 else f" and {count} frames"
        fix = "lower megapixels" if count == 1 else "lower megapixels or target_frames"
        raise comfy.model_management.OOM_EXCEPTION(
            f"The VAE ran out of memory encoding {crop.pixels.name!r} at {crop.width} x {crop.height} pixels{frames}; "
            f"{fix}, or close other programs on this GPU. What is encoded so far is saved."
        ) from None
    finally:
        end_of_node()
