"""A tiny Qwen-Image in the checkpoint format that `UNETLoader` reads, with its width injected, and samples for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file

from .injection import load_injected, sizes_metadata
from .weights import Shapes, fill, linear

QWEN_TEXT_WIDTH = 64
CHANNELS, PATCH = 16, 4  # a token holds 2 x 2 cells


def qwen_image_shapes(heads: int, head_size: int, layers: int, text_dim: int) -> Shapes:
    """Names and shapes of Qwen-Image's parameters."""
    inner = heads * head_size
    shapes: Shapes = {"txt_norm.weight": (text_dim,)}
    linear(shapes, "img_in", PATCH * CHANNELS, inner)
    linear(shapes, "txt_in", text_dim, inner)
    linear(shapes, "time_text_embed.timestep_embedder.linear_1", 256, inner)
    linear(shapes, "time_text_embed.timestep_embedder.linear_2", inner, inner)
    for index in range(layers):
        block = f"transformer_blocks.{index}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            linear(shapes, f"{block}.attn.{name}", inner, inner)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{block}.attn.{name}.weight"] = (head_size,)
        for stream in ("img", "txt"):
            linear(shapes, f"{block}.{stream}_mod.1", inner, 6 * inner)
            linear(shapes, f"{block}.{stream}_mlp.net.0.proj", inner, 4 * inner)
            linear(shapes, f"{block}.{stream}_mlp.net.2", 4 * inner, inner)
    linear(shapes, "norm_out.linear", inner, 2 * inner)
    linear(shapes, "proj_out", inner, PATCH * CHANNELS)
    return shapes


def write_qwen_image(
    path: Path,
    *,
    heads: int = 2,
    head_size: int = 64,
    layers: int = 2,
    text_dim: int = QWEN_TEXT_WIDTH,
    timestep_zero: bool = False,
    layered: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a Qwen-Image checkpoint. `heads=24, head_size=128, text_dim=3584` is the real width; `timestep_zero` makes
    it an Edit-2511, `layered` a Qwen-Image-Layered."""
    if head_size % 16:
        raise ValueError(f"head_size is {head_size}; take a multiple of 16, which the rotary axes divide as 2 : 7 : 7.")
    tensors = fill(qwen_image_shapes(heads, head_size, layers, text_dim), seed)
    if timestep_zero:
        tensors["__index_timestep_zero__"] = torch.empty(0)
    if layered:
        tensors["time_text_embed.addition_t_embedding.weight"] = torch.zeros(2, heads * head_size)
    unit = head_size // 16
    sizes = {
        "num_attention_heads": heads,
        "attention_head_dim": head_size,
        "joint_attention_dim": text_dim,
        "axes_dims_rope": (2 * unit, 7 * unit, 7 * unit),
    }
    metadata = {"format": "pt"} | sizes_metadata("QwenImage", sizes)
    save_file({name: t.to(dtype) for name, t in tensors.items()}, path, metadata)
    return path


def load_qwen_image(path: Path, dtype: torch.dtype | None = None) -> Any:
    """The MODEL that `UNETLoader` would give for this file; `dtype` is its `weight_dtype`."""
    return load_injected(path, {} if dtype is None else {"dtype": dtype})


def qwen_sample(
    name: str,
    height: int,
    width: int,
    text_length: int = 16,
    references: Sequence[tuple[int, int]] = (),
    method: str | None = None,
    tokens: int | None = None,
    text_width: int = QWEN_TEXT_WIDTH,
) -> Any:
    """A sample of height x width tokens whose numbers are a function of its name. references: (height, width) of each
    in latent cells. The caption is padded as the family does."""
    from tessera.data.samples import Sample, SampleTensors
    from tessera.models.text import padded_length

    generator = torch.Generator().manual_seed(crc32(name.encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    conditioning: dict[str, Any] = {}
    tensors = SampleTensors(normal(16, 1, 2 * height, 2 * width), normal(1, text_length, text_width), conditioning)
    if references:
        conditioning["reference_latents"] = [normal(1, 16, 1, *side) for side in references]
    if method is not None:
        conditioning["reference_latents_method"] = method
    return Sample(
        name,
        (1, height, width),
        tokens or height * width,
        padded_length(text_length),
        lambda *_: tensors,
        references=tuple(-(-h // 2) * -(-w // 2) for h, w in references),
        conditioning=frozenset(conditioning),
    )
