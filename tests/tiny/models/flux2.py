"""A tiny FLUX.2 in Black Forest Labs' checkpoint format: one modulation for all blocks of a kind, no biases."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..data.encoders import T5_WIDTH
from .weights import Shapes, fill, linear

HEAD_SIZE = 128
CHANNELS = 128  # one latent cell is one token


def flux2_shapes(hidden: int, depth: int, depth_single: int, context_dim: int, guidance: bool) -> Shapes:
    """Names and shapes of FLUX.2's parameters. Detection takes the number of heads as hidden / 128."""
    if hidden % HEAD_SIZE:
        raise ValueError(f"hidden is {hidden}; FLUX's heads are {HEAD_SIZE} wide, so take a multiple of {HEAD_SIZE}.")
    mlp = 3 * hidden
    shapes: Shapes = {}

    def matrix(name: str, inputs: int, outputs: int) -> None:
        linear(shapes, name, inputs, outputs, bias=False)

    def query_key_norms(name: str) -> None:
        shapes[f"{name}.query_norm.scale"] = shapes[f"{name}.key_norm.scale"] = (HEAD_SIZE,)

    matrix("img_in", CHANNELS, hidden)
    matrix("txt_in", context_dim, hidden)
    for name in ("time_in", "guidance_in") if guidance else ("time_in",):
        matrix(f"{name}.in_layer", 256, hidden)
        matrix(f"{name}.out_layer", hidden, hidden)
    matrix("double_stream_modulation_img.lin", hidden, 6 * hidden)
    matrix("double_stream_modulation_txt.lin", hidden, 6 * hidden)
    matrix("single_stream_modulation.lin", hidden, 3 * hidden)
    for block in range(depth):
        for stream in ("img", "txt"):
            prefix = f"double_blocks.{block}.{stream}"
            matrix(f"{prefix}_attn.qkv", hidden, 3 * hidden)
            matrix(f"{prefix}_attn.proj", hidden, hidden)
            query_key_norms(f"{prefix}_attn.norm")
            matrix(f"{prefix}_mlp.0", hidden, 2 * mlp)  # gate and value of a gated SiLU
            matrix(f"{prefix}_mlp.2", mlp, hidden)
    for block in range(depth_single):
        prefix = f"single_blocks.{block}"
        matrix(f"{prefix}.linear1", hidden, 3 * hidden + 2 * mlp)
        matrix(f"{prefix}.linear2", hidden + mlp, hidden)
        query_key_norms(f"{prefix}.norm")
    matrix("final_layer.adaLN_modulation.1", hidden, 2 * hidden)
    matrix("final_layer.linear", hidden, CHANNELS)
    return shapes


def write_flux2(
    path: Path,
    *,
    hidden: int = 128,
    depth: int = 2,
    depth_single: int = 2,
    context_dim: int = T5_WIDTH,
    guidance: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a FLUX.2 checkpoint: dev-like, or klein-like with `guidance=False`."""
    tensors = fill(flux2_shapes(hidden, depth, depth_single, context_dim, guidance), seed)
    save_file({name: t.to(dtype) for name, t in tensors.items()}, path, {"format": "pt"})
    return path


def load_flux2(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` gives for this file; `dtype` is its `weight_dtype`."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path), model_options={} if dtype is None else {"dtype": dtype})
