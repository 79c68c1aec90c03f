"""A tiny Wan 2.1 text-to-video model, with VACE's control blocks where asked for."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .encoders import T5_WIDTH
from .weights import Shapes, fill, linear

CHANNELS = 16
VACE_CHANNELS = 96  # the control video's two latents and its mask of 8 x 8 pixels a cell


def _block(shapes: Shapes, block: str, dim: int, ffn: int) -> None:
    shapes[f"{block}.modulation"] = (1, 6, dim)
    shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (dim,)
    for attention in ("self_attn", "cross_attn"):
        for name in "qkvo":
            linear(shapes, f"{block}.{attention}.{name}", dim, dim)
        shapes[f"{block}.{attention}.norm_q.weight"] = shapes[f"{block}.{attention}.norm_k.weight"] = (dim,)
    linear(shapes, f"{block}.ffn.0", dim, ffn)
    linear(shapes, f"{block}.ffn.2", ffn, dim)


def wan_shapes(dim: int, ffn: int, layers: int, vace_layers: int, text_dim: int) -> Shapes:
    """Names and shapes of Wan's parameters. Detection takes the number of heads as dim / 128."""
    shapes: Shapes = {"patch_embedding.weight": (dim, CHANNELS, 1, 2, 2), "patch_embedding.bias": (dim,)}
    linear(shapes, "text_embedding.0", text_dim, dim)
    linear(shapes, "text_embedding.2", dim, dim)
    linear(shapes, "time_embedding.0", 256, dim)
    linear(shapes, "time_embedding.2", dim, dim)
    linear(shapes, "time_projection.1", dim, 6 * dim)
    for index in range(layers):
        _block(shapes, f"blocks.{index}", dim, ffn)
    if vace_layers:
        shapes["vace_patch_embedding.weight"] = (dim, VACE_CHANNELS, 1, 2, 2)
        shapes["vace_patch_embedding.bias"] = (dim,)
        linear(shapes, "vace_blocks.0.before_proj", dim, dim)
    for index in range(vace_layers):
        _block(shapes, f"vace_blocks.{index}", dim, ffn)
        linear(shapes, f"vace_blocks.{index}.after_proj", dim, dim)
    shapes["head.modulation"] = (1, 2, dim)
    linear(shapes, "head.head", dim, 4 * CHANNELS)
    return shapes


def write_wan(
    path: Path,
    *,
    dim: int = 128,
    layers: int = 2,
    vace_layers: int = 0,
    text_dim: int = T5_WIDTH,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Writes a Wan checkpoint. `vace_layers` (a divisor of `layers`) makes it a VACE model."""
    if vace_layers and layers % vace_layers:
        raise ValueError(f"vace_layers is {vace_layers}; take a divisor of layers ({layers}), as ComfyUI spreads them.")
    tensors = fill(wan_shapes(dim, 2 * dim, layers, vace_layers, text_dim), seed)
    for name in tensors:
        if name.endswith("modulation"):
            tensors[name] *= 8
    # The text width is not read from the weights; the real tiny exports carry it in this metadata as well.
    metadata = {"format": "pt", "config": json.dumps({"transformer": {"text_dim": text_dim}})}
    save_file({name: t.to(dtype) for name, t in tensors.items()}, path, metadata)
    return path


def load_wan(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` gives for this file; `dtype` is its `weight_dtype`."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options={} if dtype is None else {"dtype": dtype})
