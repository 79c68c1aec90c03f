"""Latent policies: the geometry of each VAE's latents, and recognition of a graph's VAE."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LatentPolicy:
    """The geometry from pixels to tokens under one VAE.

    family: the models that use the VAE, for messages.
    file: the VAE to load, for messages.
    channels: channels of the latent.
    pixels_per_latent: pixels along a side that become one latent cell.
    patch: latent cells along a side that become one token.
    frames_per_latent: frames of a video that become one latent frame; the first frame has its own. 0 for an image VAE.
    frames_to_latent: ComfyUI's formula from frames to latent frames; None if `frames_per_latent` gives them.
    latent_to_frames: its inverse; None if `frames_per_latent` gives them.
    stills_only: the latents have a frame axis, but the VAE takes one image at a time.
    whole_grids: the models run ComfyUI's own forward, which takes no ragged edge.
    tells_frame_rate: the models take a clip's frames per second, as `LTXVConditioning` sets them.
    """

    family: str
    file: str
    channels: int
    pixels_per_latent: int
    patch: int
    frames_per_latent: int = 0
    frames_to_latent: Callable[[int], int] | None = field(default=None, compare=False)
    latent_to_frames: Callable[[int], int] | None = field(default=None, compare=False)
    stills_only: bool = False
    whole_grids: bool = False
    tells_frame_rate: bool = False

    @property
    def makes_video(self) -> bool:
        return self.frames_per_latent > 0 and not self.stills_only

    @property
    def pixels_per_token(self) -> int:
        return self.pixels_per_latent * self.patch

    def latent_frames(self, frames: int) -> int:
        """Return the latent frames of a video of `frames` frames; 1 for an image."""
        if frames == 1:
            return 1
        if self.frames_to_latent is not None:
            return self.frames_to_latent(frames)
        return (frames - 1) // self.frames_per_latent + 1

    def whole_frames(self, frames: int) -> int:
        """Return how many frames of a video of `frames` frames fill latent frames; the VAE drops the rest."""
        if self.latent_to_frames is None:
            return frames if frames == 1 else (self.latent_frames(frames) - 1) * self.frames_per_latent + 1
        return self.latent_to_frames(self.latent_frames(frames))


FLUX = LatentPolicy("FLUX.1", "ae.safetensors for FLUX.1", channels=16, pixels_per_latent=8, patch=2)
FLUX2 = LatentPolicy("FLUX.2", "flux2-vae.safetensors for FLUX.2", channels=128, pixels_per_latent=16, patch=1)
WAN21 = LatentPolicy(
    "Wan 2.1 and Qwen-Image",
    "wan_2.1_vae.safetensors for Wan 2.1 and 2.2 14B, qwen_image_vae.safetensors for Qwen-Image",
    channels=16,
    pixels_per_latent=8,
    patch=2,
    frames_per_latent=4,
)
WAN22 = LatentPolicy(
    "Wan 2.2 5B",
    "wan2.2_vae.safetensors for Wan 2.2 5B",
    channels=48,
    pixels_per_latent=16,
    patch=2,
    frames_per_latent=4,
)
POLICIES = (FLUX, FLUX2, WAN21, WAN22)

# Latent cells along a side that become one token, by the channels of the latent, if it isn't USUAL_PATCH: as the models
# of such a VAE take them. A U-Net halves its input three times, so its sides are whole in cells of 8.
PATCHES = {
    3: 32,  # pixels: Chroma Radiance and PixelDiT (16), HiDream-O1 (32)
    4: 8,  # SD1.5, SDXL
    32: 1,  # HunyuanVideo 1.5
    64: 1,  # HunyuanImage
    128: 1,  # FLUX.2's and LTX's
}
USUAL_PATCH = 2


def latent_policy(vae: Any) -> LatentPolicy:
    """Recognise the policy of a VAE, or make one from its geometry. Raises ValueError for audio and 3D.

    VAEs of equal shape can't be distinguished by it (SD3's has FLUX.1's); of video VAEs the class is checked too.
    """
    if (model := getattr(vae, "first_stage_model", None)) is None:
        raise ValueError("The VAE input holds no VAE; load your model's VAE with Load VAE.")
    geometry = (vae.latent_channels, vae.latent_dim, vae.spacial_compression_encode())
    for policy in POLICIES:
        dimensions = 3 if policy.frames_per_latent else 2
        class_matches = dimensions == 2 or ".wan." in type(model).__module__
        if class_matches and geometry == (policy.channels, dimensions, policy.pixels_per_latent):
            return policy
    # Some audio VAEs have latents of two axes as well; their channels of sound are mono or stereo.
    audio = vae.output_channels < 3
    if audio or vae.latent_dim not in (2, 3):
        raise ValueError(
            f"The VAE is {'an audio' if audio else 'a 3D'} VAE with {geometry[0]} latent channels at 1/{geometry[2]} "
            "of the size, which no model that can be trained here uses; load the VAE of a picture or video model with "
            f"Load VAE, such as one of these: {', '.join(policy.file for policy in POLICIES)}."
        )
    return _own_geometry(vae, type(model).__name__)


def _own_geometry(vae: Any, name: str) -> LatentPolicy:
    channels, pixels = vae.latent_channels, vae.spacial_compression_encode()
    family = f"{name} ({channels} channels, 1/{pixels})"
    patch = PATCHES.get(channels, USUAL_PATCH)
    if vae.latent_dim == 2:
        return LatentPolicy(family, "", channels, pixels, patch, whole_grids=True)
    return LatentPolicy(
        family,
        "",
        channels,
        pixels,
        patch,
        frames_per_latent=vae.downscale_index_formula[0],
        frames_to_latent=vae.downscale_ratio[0],
        latent_to_frames=vae.upscale_ratio[0],
        stills_only=vae.not_video,
        whole_grids=True,
        tells_frame_rate=".lightricks." in type(vae.first_stage_model).__module__,
    )


def policy_of_latent(channels: int) -> LatentPolicy:
    """Return the policy of latents with that many channels, which determine the size of a token.

    Families of 16 channels share that size. For other latents nothing else is known: pixels_per_latent is 0.
    """
    matches = (policy for policy in POLICIES if policy.channels == channels)
    patch = PATCHES.get(channels, USUAL_PATCH)
    return next(matches, LatentPolicy(f"{channels} channels", "", channels, 0, patch, whole_grids=True))


def policy_of_format(family: str, form: Any) -> LatentPolicy:
    """Make the policy of a model's latents from its latent format in ComfyUI. family: for messages."""
    frames = int(getattr(form, "temporal_downscale_ratio", 1)) if form.latent_dimensions == 3 else 0
    patch = policy_of_latent(form.latent_channels).patch
    cell = form.spacial_downscale_ratio
    return LatentPolicy(family, "the VAE of the model", form.latent_channels, cell, patch, frames)
