"""Write the tiny models into the folders of ComfyUI's loaders."""

from pathlib import Path

from ..data.encoders import write_clip_l, write_qwen, write_t5, write_umt5
from ..data.taesd import write_taesd
from ..data.wan_vae import write_wan_vae
from .flux import write_flux
from .qwen_image import write_qwen_image
from .wan import write_wan

FLUX_NAMES = {
    "unet_name": "tiny_flux.safetensors",
    "clip_name1": "tiny_clip_l.safetensors",
    "clip_name2": "tiny_t5xxl.safetensors",
    "vae_name": "tiny_vae.safetensors",
}
WAN_NAMES = {
    "unet_name": "tiny_wan21.safetensors",
    "clip_name": "tiny_umt5.safetensors",
    "vae_name": "tiny_wan_vae.safetensors",
}
QWEN_NAMES = {
    "unet_name": "tiny_qwen_image.safetensors",
    "clip_name": "tiny_qwen25_vl.safetensors",
    "vae_name": "tiny_qwen_vae.safetensors",
}
FOLDERS = {"unet_name": "diffusion_models", "clip_name": "text_encoders", "vae_name": "vae"}


def _file(models: Path, names: dict[str, str], kind: str) -> Path:
    path = models / FOLDERS[kind.rstrip("12")] / names[kind]
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_models(models: Path) -> dict[str, str]:
    """Put a tiny FLUX, its text encoders and VAE below ComfyUI's models folder; return the loaders' file names."""
    (models / "loras").mkdir(parents=True, exist_ok=True)
    write_flux(_file(models, FLUX_NAMES, "unet_name"), denoiser=True)
    write_clip_l(_file(models, FLUX_NAMES, "clip_name1"))
    write_t5(_file(models, FLUX_NAMES, "clip_name2"))
    write_taesd(_file(models, FLUX_NAMES, "vae_name"))
    return FLUX_NAMES


def write_wan_models(models: Path) -> dict[str, str]:
    """Put a tiny Wan, its text encoder and VAE below ComfyUI's models folder; return the loaders' file names."""
    write_wan(_file(models, WAN_NAMES, "unet_name"))
    write_umt5(_file(models, WAN_NAMES, "clip_name"))
    write_wan_vae(_file(models, WAN_NAMES, "vae_name"))
    return WAN_NAMES


def write_qwen_models(models: Path) -> dict[str, str]:
    """Put a tiny Qwen-Image, its text encoder and VAE below ComfyUI's models folder; return the loaders' file names.

    The server needs the fixture pack, whose detection knows the model's width.
    """
    write_qwen_image(_file(models, QWEN_NAMES, "unet_name"))
    write_qwen(_file(models, QWEN_NAMES, "clip_name"))
    write_wan_vae(_file(models, QWEN_NAMES, "vae_name"), seed=1)
    return QWEN_NAMES
