"""Tiny checkpoints with random weights from fixed seeds, in the formats that ComfyUI's own loaders read.

The `write_*` functions need only torch and safetensors; the `load_*` functions go through ComfyUI's real loaders.
"""

from pathlib import Path

from .encoders import CLIP_WIDTH, T5_WIDTH, load_clip, load_sd1_clip, write_clip_l, write_t5
from .flux import load_flux, write_flux
from .taesd import load_vae, write_taesd
from .training import fill_up_matrices, make_data, make_trainer
from .wan import load_wan, write_wan

__all__ = [
    "CLIP_WIDTH",
    "T5_WIDTH",
    "fill_up_matrices",
    "load_clip",
    "load_flux",
    "load_sd1_clip",
    "load_vae",
    "load_wan",
    "make_data",
    "make_trainer",
    "write_clip_l",
    "write_flux",
    "write_models",
    "write_t5",
    "write_taesd",
    "write_wan",
]


def write_models(models: Path) -> dict[str, str]:
    """Puts a tiny FLUX, its text encoders and VAE below ComfyUI's models folder; returns the loaders' file names."""
    for folder in ("diffusion_models", "text_encoders", "vae", "loras"):
        (models / folder).mkdir(parents=True, exist_ok=True)
    return {
        "unet_name": write_flux(models / "diffusion_models" / "tiny_flux.safetensors", denoiser=True).name,
        "clip_name1": write_clip_l(models / "text_encoders" / "tiny_clip_l.safetensors").name,
        "clip_name2": write_t5(models / "text_encoders" / "tiny_t5xxl.safetensors").name,
        "vae_name": write_taesd(models / "vae" / "tiny_vae.safetensors").name,
    }
