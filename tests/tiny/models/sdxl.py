"""A tiny SDXL UNet in Stability's names: three levels, transformers in the lower two, pooled text in addition to the
tokens."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..data.encoders import CLIP_WIDTH
from .injection import load_injected, sizes_metadata
from .weights import Shapes, fill, linear

SDXL_TEXT_WIDTH = 64
CHANNELS = 4
SIZE_EMBEDDINGS = 6 * 256  # height, width, crop and target size, as SDXL embeds them with the pooled text
LEVELS = (1, 2, 4)  # widths of the levels in model_channels; the first has no transformers


def _conv(shapes: Shapes, name: str, inputs: int, outputs: int, kernel: int = 3) -> None:
    shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
    shapes[f"{name}.bias"] = (outputs,)


def _norm(shapes: Shapes, name: str, width: int) -> None:
    shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)


def _res_block(shapes: Shapes, name: str, inputs: int, outputs: int, time: int) -> None:
    _norm(shapes, f"{name}.in_layers.0", inputs)
    _conv(shapes, f"{name}.in_layers.2", inputs, outputs)
    linear(shapes, f"{name}.emb_layers.1", time, outputs)
    _norm(shapes, f"{name}.out_layers.0", outputs)
    _conv(shapes, f"{name}.out_layers.3", outputs, outputs)
    if inputs != outputs:
        _conv(shapes, f"{name}.skip_connection", inputs, outputs, kernel=1)


def _transformer(shapes: Shapes, name: str, width: int, depth: int, text_dim: int) -> None:
    _norm(shapes, f"{name}.norm", width)
    linear(shapes, f"{name}.proj_in", width, width)
    for index in range(depth):
        block = f"{name}.transformer_blocks.{index}"
        for attention, source in (("attn1", width), ("attn2", text_dim)):
            linear(shapes, f"{block}.{attention}.to_q", width, width, bias=False)
            linear(shapes, f"{block}.{attention}.to_k", source, width, bias=False)
            linear(shapes, f"{block}.{attention}.to_v", source, width, bias=False)
            linear(shapes, f"{block}.{attention}.to_out.0", width, width)
        linear(shapes, f"{block}.ff.net.0.proj", width, 8 * width)
        linear(shapes, f"{block}.ff.net.2", 4 * width, width)
        for norm in ("norm1", "norm2", "norm3"):
            _norm(shapes, f"{block}.{norm}", width)
    linear(shapes, f"{name}.proj_out", width, width)


def sdxl_shapes(channels: int, res_blocks: int, depth: int, text_dim: int, pooled_dim: int) -> Shapes:
    """Names and shapes of the UNet's parameters. `depth` is the number of blocks in each transformer."""
    shapes: Shapes = {}
    time = 4 * channels
    linear(shapes, "time_embed.0", channels, time)
    linear(shapes, "time_embed.2", time, time)
    linear(shapes, "label_emb.0.0", pooled_dim + SIZE_EMBEDDINGS, time)
    linear(shapes, "label_emb.0.2", time, time)
    _conv(shapes, "input_blocks.0.0", CHANNELS, channels)
    width = channels
    skips = [channels]
    block = 1
    for level, multiple in enumerate(LEVELS):
        for _ in range(res_blocks):
            _res_block(shapes, f"input_blocks.{block}.0", width, multiple * channels, time)
            width = multiple * channels
            if level:
                _transformer(shapes, f"input_blocks.{block}.1", width, depth, text_dim)
            skips.append(width)
            block += 1
        if level < len(LEVELS) - 1:
            _conv(shapes, f"input_blocks.{block}.0.op", width, width)
            skips.append(width)
            block += 1
    _res_block(shapes, "middle_block.0", width, width, time)
    _transformer(shapes, "middle_block.1", width, depth, text_dim)
    _res_block(shapes, "middle_block.2", width, width, time)
    block = 0
    for level, multiple in reversed(list(enumerate(LEVELS))):
        for index in range(res_blocks + 1):
            _res_block(shapes, f"output_blocks.{block}.0", width + skips.pop(), multiple * channels, time)
            width = multiple * channels
            if level:
                _transformer(shapes, f"output_blocks.{block}.1", width, depth, text_dim)
                if index == res_blocks:
                    _conv(shapes, f"output_blocks.{block}.2.conv", width, width)
            block += 1
    _norm(shapes, "out.0", width)
    _conv(shapes, "out.2", channels, CHANNELS)
    return shapes


def write_sdxl(
    path: Path,
    *,
    channels: int = 32,
    res_blocks: int = 1,
    depth: int = 2,
    text_dim: int = SDXL_TEXT_WIDTH,
    pooled_dim: int = CLIP_WIDTH,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write an SDXL UNet by itself, as `UNETLoader` reads it: 6 res_blocks + 5 ResBlocks and 4 res_blocks + 3
    transformers of `depth` blocks, heads 64 wide."""
    if channels % 32:
        raise ValueError(f"channels is {channels}; the group norms need a multiple of 32.")
    tensors = fill(sdxl_shapes(channels, res_blocks, depth, text_dim, pooled_dim), seed)
    metadata = {"format": "pt"} | sizes_metadata("SDXL")
    save_file({name: t.to(dtype) for name, t in tensors.items()}, path, metadata)
    return path


def load_sdxl(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` would give for this file; `dtype` is its `weight_dtype`."""
    return load_injected(path, {} if dtype is None else {"dtype": dtype})
