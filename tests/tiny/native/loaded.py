"""Outputs of a loader for a model that trains with ComfyUI's own forward: a tiny MODEL with the CLIP and the VAE
whose outputs it takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import other_encoders
from ..taesd import load_vae, write_taesd
from ..wan_vae import write_wan_vae
from .row import build

KREA2_LAYERS = 12  # of its text encoder, which the model reads side by side
# The row, what of its sizes follows from the encoders, their loader, and the channels of the VAE; 0 is Wan's.
SIZES: dict[str, tuple[dict[str, Any], str, int]] = {
    "z-image": ({"cap_feat_dim": 32}, "z_image", 16),
    "krea-2": ({"txtlayers": KREA2_LAYERS, "txtdim": 32, "txtheads": 1, "txtkvheads": 1}, "krea2", 0),
    "anima": ({}, "anima", 0),
    "sdxl": ({"context_dim": 32 + 64, "adm_in_channels": 64 + 6 * 256}, "sdxl", 4),
}


def load_native(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """MODEL, CLIP and VAE of a row; the VAE's file is written into the folder."""
    from . import ROWS

    unet, clip, channels = SIZES[name]
    (row,) = (row for row in ROWS if row.name == name)
    sizes = {part: {**given, "source_dim": 32} if "source_dim" in given else given for part, given in row.sizes.items()}
    file = folder / f"vae_{channels}.safetensors"
    vae = write_taesd(file, channels=channels) if channels else write_wan_vae(file)
    loaded = getattr(other_encoders, f"load_{clip}_clip")()
    return build(replace(row, unet={**row.unet, **unet}, sizes=sizes)), loaded, load_vae(vae)
