"""Outputs of a loader for a model that trains with ComfyUI's own forward: a tiny MODEL with the CLIP and the VAE
whose outputs it takes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..data import other_encoders
from ..data.encoders import T5_WIDTH
from ..data.taesd import load_vae, write_taesd
from ..data.video_vaes import LTX_CONFIG, load_hunyuan_video_15_vae, load_minimax_h3_vae, ltx_vae_tensors
from ..data.wan_vae import write_wan_vae
from ..models.ltx import load_ltx_2_3
from .row import NativeRow, build

KREA2_LAYERS = 12  # of its text encoder, which the model reads side by side


def _taesd(channels: int) -> Callable[[Path], Any]:
    return lambda folder: load_vae(write_taesd(folder / f"vae_{channels}.safetensors", channels=channels))


def _wan_vae(folder: Path) -> Any:
    return load_vae(write_wan_vae(folder / "wan_vae.safetensors"))


# The row, its sizes that follow from the encoders, their loader, and the loader of the VAE; LTX's file holds its own.
SIZES: dict[str, tuple[dict[str, Any], str, Callable[[Path], Any] | None]] = {
    "z-image": ({"cap_feat_dim": 32}, "z_image", _taesd(16)),
    "krea-2": ({"txtlayers": KREA2_LAYERS, "txtdim": 32, "txtheads": 1, "txtkvheads": 1}, "krea2", _wan_vae),
    "anima": ({}, "anima", _wan_vae),
    "sdxl": ({"context_dim": 32 + 64, "adm_in_channels": 64 + 6 * 256}, "sdxl", _taesd(4)),
    "hunyuan-video-1.5": ({"context_in_dim": 32}, "hunyuan_video_15", lambda _: load_hunyuan_video_15_vae()),
    "minimax-h3": ({"text_dim": 32}, "minimax_h3", lambda _: load_minimax_h3_vae()),
    "ltx-video": ({"caption_channels": T5_WIDTH}, "ltx", None),
}


def load_native(name: str, folder: Path) -> tuple[Any, ...]:
    """MODEL, CLIP and VAE of a row, of LTX-2.3 the VAE of its sound too; files are written into the folder."""
    from . import ROWS

    if name == "ltx-2.3":
        return load_ltx_2_3(next(row for row in ROWS if row.name == name), folder)
    unet, clip, vae = SIZES[name]
    (row,) = (row for row in ROWS if row.name == name)
    sizes = {
        part: {**sizes_of_part, "source_dim": 32} if "source_dim" in sizes_of_part else sizes_of_part
        for part, sizes_of_part in row.sizes.items()
    }
    row = replace(row, unet={**row.unet, **unet}, sizes=sizes)
    loaded = getattr(other_encoders, f"load_{clip}_clip")()
    if vae is None:
        model, checkpoint_state = _load_ltx_checkpoint(row, folder / "ltx.safetensors")
        return model, loaded, checkpoint_state
    return build(row), loaded, vae(folder)


def _load_ltx_checkpoint(row: NativeRow, path: Path) -> tuple[Any, Any]:
    """Write a checkpoint of LTX-Video, whose metadata hold its sizes, and load it as `CheckpointLoaderSimple` does."""
    import comfy.sd

    weights = build(row).model.diffusion_model.state_dict()
    tensors = {f"model.diffusion_model.{name}": tensor.clone() for name, tensor in weights.items()}
    tensors |= {f"vae.{name}": tensor for name, tensor in ltx_vae_tensors().items()}
    save_file(tensors, path, {"config": json.dumps({"transformer": dict(row.unet), "vae": LTX_CONFIG})})
    model, _, vae, *_ = comfy.sd.load_checkpoint_guess_config(str(path), output_clip=False)
    return model, vae
