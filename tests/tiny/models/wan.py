"""Tiny Wan models: 2.1 and 2.2, text and image to video, and optionally with VACE's control blocks; samples for
them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import save_file

from ..data.encoders import T5_WIDTH
from .weights import Shapes, fill, linear

# Latent channels and those of the input; the rest of the input is a mask of 4 and a start picture.
WAN_CHANNELS = {"2.1-t2v": (16, 16), "2.1-i2v": (16, 36), "2.2-i2v-14b": (16, 36), "2.2-5b": (48, 48)}
VISION_TOKENS = 257
VISION_WIDTH = 1280  # of CLIP vision's states, fixed in ComfyUI
VACE_CHANNELS = 96  # the control video's two latents and its mask of 8 x 8 pixels a cell


def _block(shapes: Shapes, block: str, dim: int, ffn: int, with_image: bool = False) -> None:
    shapes[f"{block}.modulation"] = (1, 6, dim)
    shapes[f"{block}.norm3.weight"] = shapes[f"{block}.norm3.bias"] = (dim,)
    for attention in ("self_attn", "cross_attn"):
        for name in "qkvo":
            linear(shapes, f"{block}.{attention}.{name}", dim, dim)
        shapes[f"{block}.{attention}.norm_q.weight"] = shapes[f"{block}.{attention}.norm_k.weight"] = (dim,)
    if with_image:
        for name in ("k_img", "v_img"):
            linear(shapes, f"{block}.cross_attn.{name}", dim, dim)
        shapes[f"{block}.cross_attn.norm_k_img.weight"] = (dim,)
    linear(shapes, f"{block}.ffn.0", dim, ffn)
    linear(shapes, f"{block}.ffn.2", ffn, dim)


def wan_shapes(
    dim: int, ffn: int, layers: int, vace_layers: int, text_dim: int, variant: str = "2.1-t2v", pictures: int = 1
) -> Shapes:
    """Names and shapes of Wan's parameters. Detection takes the number of heads as dim / 128."""
    channels, channels_in = WAN_CHANNELS[variant]
    with_image = variant == "2.1-i2v"
    shapes: Shapes = {"patch_embedding.weight": (dim, channels_in, 1, 2, 2), "patch_embedding.bias": (dim,)}
    linear(shapes, "text_embedding.0", text_dim, dim)
    linear(shapes, "text_embedding.2", dim, dim)
    linear(shapes, "time_embedding.0", 256, dim)
    linear(shapes, "time_embedding.2", dim, dim)
    linear(shapes, "time_projection.1", dim, 6 * dim)
    if with_image:
        for norm, width in (("0", VISION_WIDTH), ("4", dim)):
            shapes[f"img_emb.proj.{norm}.weight"] = shapes[f"img_emb.proj.{norm}.bias"] = (width,)
        linear(shapes, "img_emb.proj.1", VISION_WIDTH, VISION_WIDTH)
        linear(shapes, "img_emb.proj.3", VISION_WIDTH, dim)
        if pictures > 1:
            shapes["img_emb.emb_pos"] = (1, 257 * pictures, VISION_WIDTH)
    for index in range(layers):
        _block(shapes, f"blocks.{index}", dim, ffn, with_image)
    if vace_layers:
        shapes["vace_patch_embedding.weight"] = (dim, VACE_CHANNELS, 1, 2, 2)
        shapes["vace_patch_embedding.bias"] = (dim,)
        linear(shapes, "vace_blocks.0.before_proj", dim, dim)
    for index in range(vace_layers):
        _block(shapes, f"vace_blocks.{index}", dim, ffn)
        linear(shapes, f"vace_blocks.{index}.after_proj", dim, dim)
    shapes["head.modulation"] = (1, 2, dim)
    linear(shapes, "head.head", dim, 4 * channels)
    return shapes


def write_wan(
    path: Path,
    *,
    variant: str = "2.1-t2v",
    dim: int = 128,
    layers: int = 2,
    vace_layers: int = 0,
    pictures: int = 1,
    text_dim: int = T5_WIDTH,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Write a Wan checkpoint. `vace_layers` (a divisor of `layers`) makes it a VACE model; two `pictures` make a 2.1
    I2V model one for the first and the last frame."""
    if vace_layers and layers % vace_layers:
        raise ValueError(f"vace_layers is {vace_layers}; take a divisor of layers ({layers}), as ComfyUI spreads them.")
    tensors = fill(wan_shapes(dim, 2 * dim, layers, vace_layers, text_dim, variant, pictures), seed)
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


def wan_sample(
    name: str,
    grid: tuple[int, int, int],
    variant: str = "2.1-t2v",
    *,
    keep: int | None = None,
    text: int = 7,
    text_length: int = 10,
    clean_frames: int = 0,
    repeats: int = 1,
    scale: float = 1.0,
    pictures: int = 1,
) -> Any:
    """A sample whose numbers are a function of its name. grid: (frames, height, width) in tokens; keep: tokens kept of
    each frame; text: tokens of the caption, text_length: its padded length; pictures: number of pictures that CLIP
    vision encoded."""
    from tessera.data.samples import Sample, SampleTensors

    frames, height, width = grid
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    channels, channels_in = WAN_CHANNELS[variant]
    size = (frames, 2 * height, 2 * width)
    latent = scale * torch.randn(channels, *size, generator=generator)
    encoded = torch.randn(1, text, T5_WIDTH, generator=generator)
    conditioning: dict[str, Any] = {"pooled_output": None}
    if channels_in > channels:
        # The mask of core's WanImageToVideo: one over the frames that are not given.
        mask = torch.ones(1, 1, *size)
        mask[:, :, :1] = 0
        picture = torch.randn(1, channels, *size, generator=generator)
        conditioning |= {"concat_latent_image": picture, "concat_mask": mask}
    if variant == "2.1-i2v":
        states = torch.randn(1, pictures * VISION_TOKENS, VISION_WIDTH, generator=generator)
        conditioning["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=states)
    tensors = SampleTensors(latent, encoded, conditioning)
    return Sample(
        name,
        grid,
        frames * (keep or height * width),
        text_length,
        lambda *_: tensors,
        repeats,
        clean_frames=clean_frames,
        conditioning=frozenset(conditioning),
    )
