"""A tiny Wan 2.1 text-to-video model: a MODEL of another family than FLUX."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .encoders import T5_WIDTH
from .weights import Shapes, fill, linear


def _wan_shapes(dim: int, ffn: int, layers: int, text_dim: int, channels: int) -> Shapes:
    shapes: Shapes = {"patch_embedding.weight": (dim, channels, 1, 2, 2), "patch_embedding.bias": (dim,)}
    linear(shapes, "text_embedding.0", text_dim, dim)
    linear(shapes, "text_embedding.2", dim, dim)
    linear(shapes, "time_embedding.0", 256, dim)
    linear(shapes, "time_embedding.2", dim, dim)
    linear(shapes, "time_projection.1", dim, 6 * dim)
    for index in range(layers):
        block = f"blocks.{index}"
        shapes[f"{block}.modulation"] = (1, 6, dim)
        shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (dim,)
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                linear(shapes, f"{block}.{attention}.{name}", dim, dim)
            shapes[f"{block}.{attention}.norm_q.weight"] = shapes[f"{block}.{attention}.norm_k.weight"] = (dim,)
        linear(shapes, f"{block}.ffn.0", dim, ffn)
        linear(shapes, f"{block}.ffn.2", ffn, dim)
    shapes["head.modulation"] = (1, 2, dim)
    linear(shapes, "head.head", dim, 4 * channels)
    return shapes


def write_wan(path: Path, *, dim: int = 128, layers: int = 1, seed: int = 0) -> Path:
    tensors = fill(_wan_shapes(dim, 2 * dim, layers, T5_WIDTH, 16), seed)
    for name in tensors:
        if name.endswith("modulation"):
            tensors[name] *= 8
    # The text width is not read from the weights; the real tiny exports carry it in this metadata as well.
    metadata = {"format": "pt", "config": json.dumps({"transformer": {"text_dim": T5_WIDTH}})}
    save_file({name: t.to(torch.float32) for name, t in tensors.items()}, path, metadata)
    return path


def load_wan(path: Path) -> Any:
    """The MODEL that `UNETLoader` gives for this file."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))
