"""The tiny FLUX, its text encoders and its VAE, through ComfyUI's own loaders."""

from typing import Any

import comfy.sd
import torch

from ...common.core import load_tensors, load_text_encoders
from .denoiser import make_denoiser
from .flux import flux_shapes
from .text_encoders import (
    CLIP_CONFIG,
    CLIP_SCALES,
    CLIP_WIDTH,
    T5_CONFIG,
    T5_VOCABULARY,
    T5_WIDTH,
    clip_shapes,
    scaled,
    t5_scales,
    t5_shapes,
)
from .vae import vae_tensors
from .weights import fill

HIDDEN = 128
DOUBLE_BLOCKS = 1
SINGLE_BLOCKS = 2
LATENT_VARIANCE = 1.0  # about that of the tiny VAE's latents


def load_clip(seed: int = 0) -> Any:
    """Load a CLIP-L and a T5 with random weights, which encode each text differently, as a CLIP in fp32.

    The T5 attends strongly and by distance, so that the pads after a text, most of its 256 tokens, differ: see
    `load_model`.
    """
    scales = t5_scales(1)
    for name in scales:
        scales[name] *= 8 if name.endswith("relative_attention_bias.weight") else 1
        scales[name] *= 3 if name.endswith("SelfAttention.q.weight") else 1
    scales |= {f"encoder.block.{n}.layer.0.SelfAttention.o.weight": 10 for n in range(T5_CONFIG["num_layers"])}
    clip_l = scaled(clip_shapes(), CLIP_SCALES, seed)
    t5 = scaled(t5_shapes(T5_VOCABULARY, 1), scales, seed)
    options = {"model_config": CLIP_CONFIG, "t5xxl_model_config": T5_CONFIG, "dtype": torch.float32}
    return load_text_encoders([clip_l, t5], comfy.sd.CLIPType.FLUX, options)


def load_model(clip: Any, seed: int = 0) -> Any:
    """Load a FLUX of a million random weights that removes noise but knows no pictures, as a MODEL in fp32.

    clip: the CLIP of `load_clip`, whose texts it reads.

    A picture token gets its position only through attention: FLUX has no positions other than those of queries and
    keys. With one head and random weights that signal is almost zero, and a LoRA on it learns ten times as slowly. So
    the model sees the differences between text tokens, not their common part, and its queries have a constant part,
    which RoPE rotates by position.
    """
    tensors = fill(flux_shapes(HIDDEN, DOUBLE_BLOCKS, SINGLE_BLOCKS, T5_WIDTH, CLIP_WIDTH, guidance=True), seed)
    make_denoiser(tensors, LATENT_VARIANCE)
    text = clip.encode_from_tokens(clip.tokenize(""))[0].float().cpu()
    common = text.mean(0)
    tensors["txt_in.weight"] /= (text - common).square().mean().sqrt()
    tensors["txt_in.bias"] -= tensors["txt_in.weight"] @ common
    source = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("norm.scale"):
            tensor *= 1.6
        elif name.endswith(("img_attn.qkv.bias", "linear1.bias")):
            tensor[:HIDDEN] += torch.randn(HIDDEN, generator=source)
        elif name.endswith("img_attn.proj.weight"):
            tensor *= 5
    return load_tensors("the tiny FLUX", tensors, None, {"dtype": torch.float32}, dynamic=False)


def load_vae() -> Any:
    """Load the trained VAE, with latents of 1/8 the size and FLUX's 16 channels."""
    return comfy.sd.VAE(sd=vae_tensors(), dtype=torch.float32)
