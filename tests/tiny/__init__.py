"""Tiny checkpoints with random weights from fixed seeds, in the formats that ComfyUI's own loaders read.

The `write_*` functions need only torch and safetensors; the `load_*` functions go through ComfyUI's real loaders.
"""

from .encoders import CLIP_WIDTH, T5_WIDTH, load_clip, load_sd1_clip, write_clip_l, write_t5
from .flux import load_flux, write_flux
from .taesd import load_vae, write_taesd
from .wan import load_wan, write_wan

__all__ = [
    "CLIP_WIDTH",
    "T5_WIDTH",
    "load_clip",
    "load_flux",
    "load_sd1_clip",
    "load_vae",
    "load_wan",
    "write_clip_l",
    "write_flux",
    "write_t5",
    "write_taesd",
    "write_wan",
]
