"""A tiny FLUX.1 in Black Forest Labs' checkpoint format, as `UNETLoader` reads it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .denoiser import make_denoiser
from .encoders import CLIP_WIDTH, T5_WIDTH
from .weights import Shapes, fill, linear

HEAD_SIZE = 128
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def flux_shapes(
    hidden: int, depth: int, depth_single: int, context_dim: int, vec_dim: int, guidance: bool, channels: int = 16
) -> Shapes:
    """Names and shapes of FLUX.1's parameters. Detection takes the number of heads as hidden / 128."""
    if hidden % HEAD_SIZE:
        raise ValueError(f"hidden is {hidden}; FLUX's heads are {HEAD_SIZE} wide, so take a multiple of {HEAD_SIZE}.")
    mlp = 4 * hidden
    shapes: Shapes = {}
    linear(shapes, "img_in", 4 * channels, hidden)
    linear(shapes, "txt_in", context_dim, hidden)
    for name, inputs in ({"time_in": 256, "vector_in": vec_dim} | ({"guidance_in": 256} if guidance else {})).items():
        linear(shapes, f"{name}.in_layer", inputs, hidden)
        linear(shapes, f"{name}.out_layer", hidden, hidden)
    for block in range(depth):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            linear(shapes, f"{prefix}_mod.lin", hidden, 6 * hidden)
            linear(shapes, f"{prefix}_attn.qkv", hidden, 3 * hidden)
            linear(shapes, f"{prefix}_attn.proj", hidden, hidden)
            shapes[f"{prefix}_attn.norm.query_norm.scale"] = (HEAD_SIZE,)
            shapes[f"{prefix}_attn.norm.key_norm.scale"] = (HEAD_SIZE,)
            linear(shapes, f"{prefix}_mlp.0", hidden, mlp)
            linear(shapes, f"{prefix}_mlp.2", mlp, hidden)
    for block in range(depth_single):
        prefix = f"single_blocks.{block}"
        linear(shapes, f"{prefix}.linear1", hidden, 3 * hidden + mlp)
        linear(shapes, f"{prefix}.linear2", hidden + mlp, hidden)
        linear(shapes, f"{prefix}.modulation.lin", hidden, 3 * hidden)
        shapes[f"{prefix}.norm.query_norm.scale"] = (HEAD_SIZE,)
        shapes[f"{prefix}.norm.key_norm.scale"] = (HEAD_SIZE,)
    linear(shapes, "final_layer.adaLN_modulation.1", hidden, 2 * hidden)
    linear(shapes, "final_layer.linear", hidden, 4 * channels)
    return shapes


def quantise_blocks(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Turns the block matrices into fp8 with one scale each, in place; returns the metadata that says so."""
    layers = {}
    for name in [n for n in tensors if n.endswith(".weight") and "_blocks." in n]:
        layer = name.removesuffix(".weight")
        scale = tensors[name].abs().max() / FP8_MAX
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{layer}.weight_scale"] = scale.float()
        layers[layer] = {"format": "float8_e4m3fn"}
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def write_flux(
    path: Path,
    *,
    hidden: int = 128,
    depth: int = 2,
    depth_single: int = 2,
    context_dim: int = T5_WIDTH,
    vec_dim: int = CLIP_WIDTH,
    guidance: bool = True,
    dtype: torch.dtype = torch.float32,
    fp8: bool = False,
    denoiser: bool = False,
    seed: int = 0,
) -> Path:
    """Writes a FLUX.1 checkpoint: dev-like, or schnell-like with `guidance=False`.

    `dtype` is stored for every tensor (torch.float8_e4m3fn gives a plain fp8 file). `fp8` gives ComfyUI's scaled fp8:
    the block matrices in fp8 with a scale each, the rest in `dtype`. `denoiser` gives a model that removes noise and
    has only pictures to learn, in place of a random one.
    """
    tensors = fill(flux_shapes(hidden, depth, depth_single, context_dim, vec_dim, guidance), seed)
    if denoiser:
        make_denoiser(tensors)
    metadata = {"format": "pt"}
    if fp8:
        metadata |= quantise_blocks(tensors)
    kept = (torch.float8_e4m3fn,) if fp8 else ()
    stored = {
        name: t if t.dtype in kept or name.endswith(".weight_scale") else t.to(dtype) for name, t in tensors.items()
    }
    save_file(stored, path, metadata)
    return path


def load_flux(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` gives for this file; `dtype` is its `weight_dtype`."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options={} if dtype is None else {"dtype": dtype})
