"""Latents that sampling starts from, also of models that make sound with their video."""

from collections.abc import Mapping
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from torch import Tensor

from ...models.catalogue.registry import model_latents, silent_shape


def pictures_of(samples: Any) -> Tensor:
    """Return the pictures or video, (1, C, …), of a latent that may be a nested pair of video and sound."""
    pictures: Tensor = samples.unbind()[0] if getattr(samples, "is_nested", False) else samples
    return pictures


def check_latent(latent: Mapping[str, Any]) -> None:
    """Raise ValueError for a latent_image that is not a single latent of a picture or a clip."""
    samples = pictures_of(latent["samples"])
    if samples.ndim not in (4, 5):
        raise ValueError("latent_image isn't a latent of a picture or a clip; connect an empty latent of the model.")
    if len(samples) != 1:
        raise ValueError(f"latent_image holds {len(samples)} latents; make it of batch size 1 and raise seeds.")


def check_latent_fits(latent: Mapping[str, Any], model: ModelPatcher) -> None:
    """Raise ValueError if a latent_image is of another model, or lacks the sound that its model requires."""
    samples, channels = latent["samples"], model_latents(model.model).channels
    pictures = pictures_of(samples)
    if torch.count_nonzero(pictures) and pictures.shape[1] != channels:
        raise ValueError(
            f"latent_image has {pictures.shape[1]} channels and the model makes {channels}; connect a latent of the "
            "model."
        )
    # ComfyUI's format counts both if its forward takes nothing but the pair.
    if pictures is samples and model.get_model_object("latent_format").latent_channels != channels:
        raise ValueError(
            "latent_image has no sound, which this model makes beside its video; connect the model's empty latent of "
            "video and sound, or disconnect latent_image."
        )


def empty_latent(
    model: ModelPatcher, width: int, height: int, frames: int, frame_rate: float | None
) -> dict[str, Tensor | NestedTensor]:
    """Make the latent of core's empty latent node for the model: zeros, (1, C, H, W) or (1, C, T, H, W).

    A model that makes sound gets it too, in a nested pair, as core's nodes for it do.

    width, height: pixels.
    frames: frames of a video, 1 is a picture.
    frame_rate: frames per second, if the prompt sets it.
    """
    policy = model_latents(model.model)
    time = (policy.latent_frames(frames),) if policy.frames_per_latent else ()
    cell = policy.pixels_per_latent
    pictures = torch.zeros(1, policy.channels, *time, height // cell, width // cell)
    sound = silent_shape(model.model, time[0], frame_rate) if time else None
    return {"samples": pictures if sound is None else NestedTensor([pictures, torch.zeros(1, *sound)])}
