"""What a VAE's latents are to each model family, as far as the VAE tells."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LatentPolicy:
    """How pixels become tokens in one family.

    channels: of the latent.
    pixels_per_latent: pixels along a side that become one latent cell.
    patch: latent cells along a side that become one token.
    frames_per_latent: frames of a clip that become one latent frame; the first frame has one of its own. 0 for a VAE
        that knows pictures only.
    """

    family: str
    channels: int
    pixels_per_latent: int
    patch: int
    frames_per_latent: int = 0

    @property
    def pixels_per_token(self) -> int:
        return self.pixels_per_latent * self.patch


FLUX = LatentPolicy("FLUX.1", channels=16, pixels_per_latent=8, patch=2)
FLUX2 = LatentPolicy("FLUX.2", channels=128, pixels_per_latent=16, patch=1)
WAN21 = LatentPolicy("Wan 2.1 and Qwen-Image", channels=16, pixels_per_latent=8, patch=2, frames_per_latent=4)
WAN22 = LatentPolicy("Wan 2.2 5B", channels=48, pixels_per_latent=16, patch=2, frames_per_latent=4)


def latent_policy(vae: Any) -> LatentPolicy:
    """The policy of the family whose VAE this is; ValueError if no family that trains uses it.

    A VAE of the same shape (SD3's) cannot be told apart by it.
    """
    if getattr(vae, "first_stage_model", None) is None:
        raise ValueError("The VAE input holds no VAE; load ae.safetensors (FLUX.1's VAE) with Load VAE.")
    found = (vae.latent_channels, vae.latent_dim, vae.spacial_compression_encode())
    if found != (FLUX.channels, 2, FLUX.pixels_per_latent):
        kind = {1: "an audio", 2: "a picture", 3: "a video"}.get(vae.latent_dim, "a")
        raise ValueError(
            f"The VAE is {kind} VAE with {found[0]} latent channels at 1/{found[2]} of the size; {FLUX.family} takes a "
            f"picture VAE with {FLUX.channels} at 1/{FLUX.pixels_per_latent}: load ae.safetensors with Load VAE."
        )
    return FLUX
