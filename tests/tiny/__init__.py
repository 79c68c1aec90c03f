"""Tiny checkpoints with random weights from fixed seeds, in the formats that ComfyUI's own loaders read.

The `write_*` functions need only torch and safetensors; the `load_*` functions go through ComfyUI's real loaders.
"""

from pathlib import Path
from typing import Any

from .data.encoders import (
    CLIP_WIDTH,
    T5_WIDTH,
    load_clip,
    load_qwen_clip,
    load_sd1_clip,
    load_text_encoder,
    load_wan_clip,
    write_clip_l,
    write_qwen,
    write_t5,
    write_umt5,
)
from .data.taesd import load_vae, write_taesd
from .data.wan_vae import write_wan_vae
from .models.chroma import load_chroma, write_chroma
from .models.flux import load_flux, write_flux
from .models.flux2 import load_flux2, write_flux2
from .models.injection import tiny_detection
from .models.models_folder import FLUX_NAMES, QWEN_NAMES, WAN_NAMES, write_models, write_qwen_models, write_wan_models
from .models.qwen_image import QWEN_TEXT_WIDTH, load_qwen_image, write_qwen_image
from .models.sampling import INPUTS, conditioning, empty_latent, sample
from .models.sdxl import SDXL_TEXT_WIDTH, load_sdxl, write_sdxl
from .models.wan import WAN_CHANNELS, load_wan, wan_sample, write_wan
from .train.training import (
    check_gradients,
    fill_up_matrices,
    make_data,
    make_trainer,
    micro_batch,
    observe,
    reference_masters,
)

__all__ = [
    "CLIP_WIDTH",
    "FLUX_NAMES",
    "INPUTS",
    "LOADERS",
    "QWEN_NAMES",
    "QWEN_TEXT_WIDTH",
    "SDXL_TEXT_WIDTH",
    "T5_WIDTH",
    "WAN_CHANNELS",
    "WAN_NAMES",
    "conditioning",
    "empty_latent",
    "check_gradients",
    "fill_up_matrices",
    "load_chroma",
    "load_clip",
    "load_flux",
    "load_flux2",
    "load_model",
    "load_qwen_clip",
    "load_qwen_image",
    "load_sd1_clip",
    "load_sdxl",
    "load_text_encoder",
    "load_vae",
    "load_wan",
    "load_wan_clip",
    "make_data",
    "make_trainer",
    "reference_masters",
    "sample",
    "micro_batch",
    "observe",
    "tiny_detection",
    "wan_sample",
    "write_chroma",
    "write_clip_l",
    "write_flux",
    "write_flux2",
    "write_models",
    "write_qwen",
    "write_qwen_image",
    "write_qwen_models",
    "write_sdxl",
    "write_t5",
    "write_taesd",
    "write_umt5",
    "write_wan",
    "write_wan_models",
    "write_wan_vae",
]

LOADERS = {
    "flux": load_flux,
    "schnell": load_flux,
    "flux2": load_flux2,
    "wan": load_wan,
    "wan_vace": load_wan,
    "qwen_image": load_qwen_image,
    "sdxl": load_sdxl,
}


def load_model(name: str, path: Path) -> Any:
    """A fresh MODEL of the file that the fixture `tiny_files` names `name`."""
    return LOADERS[name](path)
