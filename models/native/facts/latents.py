"""Latents of a model's pictures or video, by its latent format, or by its facts where that format counts sound too."""

from typing import Any

from ...latents import LatentPolicy, policy_of_latent
from .lookup import named_facts


def model_latents(model: Any) -> LatentPolicy:
    """Return the geometry of the latents of pictures or video that a ComfyUI BaseModel makes, whatever its family."""
    facts = named_facts(model)
    if facts is not None and facts.latents is not None:
        return facts.latents
    form = model.latent_format
    frames = int(getattr(form, "temporal_downscale_ratio", 1)) if form.latent_dimensions == 3 else 0
    return LatentPolicy(
        type(model).__name__ if facts is None else facts.title,
        "the VAE of the model",
        form.latent_channels,
        form.spacial_downscale_ratio,
        policy_of_latent(form.latent_channels).patch,
        frames,
    )


def silent_shape(model: Any, frames: int, frame_rate: float | None) -> tuple[int, ...] | None:
    """Return the shape (C, …) of the sound's latent beside a video; None for a model that makes no sound.

    frames: latent frames of the video. frame_rate: pictures a second, where the conditioning tells them.
    """
    facts = named_facts(model)
    return None if facts is None or facts.sound is None else facts.sound.shape(frames, frame_rate)
