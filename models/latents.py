"""Latent policies: the geometry of each VAE's latents, and how the VAE of a graph is recognised."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LatentPolicy:
    """The geometry from pixels to tokens under one VAE.

    family: the models that use the VAE, for messages.
    file: the VAE to load, for messages.
    channels: of the latent.
    pixels_per_latent: pixels along a side that become one latent cell.
    patch: latent cells along a side that become one token.
    frames_per_latent: frames of a video that become one latent frame; the first frame has one of its own. 0 for an
        image VAE.
    """

    family: str
    file: str
    channels: int
    pixels_per_latent: int
    patch: int
    frames_per_latent: int = 0

    @property
    def pixels_per_token(self) -> int:
        return self.pixels_per_latent * self.patch

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a video of `frames` frames; 1 for an image."""
        return 1 if frames == 1 else (frames - 1) // self.frames_per_latent + 1


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


def latent_policy(vae: Any) -> LatentPolicy:
    """Recognise the policy of a VAE. Raises ValueError for one that no family uses.

    A VAE of the same shape (SD3's is one of FLUX.1's) cannot be told apart by it; of video VAEs the class is known.
    """
    if (model := getattr(vae, "first_stage_model", None)) is None:
        raise ValueError("The VAE input holds no VAE; load the one of your model with Load VAE.")
    found = (vae.latent_channels, vae.latent_dim, vae.spacial_compression_encode())
    for policy in POLICIES:
        dimensions = 3 if policy.frames_per_latent else 2
        known = dimensions == 2 or ".wan." in type(model).__module__
        if known and found == (policy.channels, dimensions, policy.pixels_per_latent):
            return policy
    kind = {1: "an audio", 2: "a picture", 3: "a video"}.get(vae.latent_dim, "a")
    raise ValueError(
        f"The VAE is {kind} VAE with {found[0]} latent channels at 1/{found[2]} of the size, which no model that is "
        f"trained here uses; load one of these with Load VAE: {', '.join(policy.file for policy in POLICIES)}."
    )


def policy_of_latent(channels: int) -> LatentPolicy | None:
    """The policy of latents with that many channels, or None.

    Families of 16 channels share the size of a token.
    """
    return next((policy for policy in POLICIES if policy.channels == channels), None)
