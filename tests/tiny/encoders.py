"""Tiny text encoders: a CLIP-L and a T5 that share the vocabularies of the real ones, so ComfyUI's tokenizers fit.

Their sizes cannot be read from the weights by ComfyUI, so each file carries its configuration in its metadata and
`load_clip` passes it on as model options.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .weights import Shapes, fill, linear

CLIP_WIDTH = 32
T5_WIDTH = 64

CLIP_CONFIG = {"hidden_size": CLIP_WIDTH, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
T5_CONFIG = {"d_model": T5_WIDTH, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
CLIP_VOCABULARY, CLIP_POSITIONS = 49408, 77
T5_VOCABULARY, T5_BUCKETS = 32128, 32


def _clip_shapes() -> Shapes:
    width, mlp = CLIP_CONFIG["hidden_size"], CLIP_CONFIG["intermediate_size"]
    shapes: Shapes = {
        "text_model.embeddings.token_embedding.weight": (CLIP_VOCABULARY, width),
        "text_model.embeddings.position_embedding.weight": (CLIP_POSITIONS, width),
        "text_model.final_layer_norm.weight": (width,),
        "text_model.final_layer_norm.bias": (width,),
    }
    for index in range(CLIP_CONFIG["num_hidden_layers"]):
        layer = f"text_model.encoder.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(shapes, f"{layer}.self_attn.{name}", width, width)
        linear(shapes, f"{layer}.mlp.fc1", width, mlp)
        linear(shapes, f"{layer}.mlp.fc2", mlp, width)
        for name in ("layer_norm1", "layer_norm2"):
            shapes[f"{layer}.{name}.weight"] = shapes[f"{layer}.{name}.bias"] = (width,)
    linear(shapes, "text_projection", width, width, bias=False)
    return shapes


def _t5_shapes() -> Shapes:
    width, mlp, heads = T5_CONFIG["d_model"], T5_CONFIG["d_ff"], T5_CONFIG["num_heads"]
    inner = heads * T5_CONFIG["d_kv"]
    shapes: Shapes = {"shared.weight": (T5_VOCABULARY, width), "encoder.final_layer_norm.weight": (width,)}
    for index in range(T5_CONFIG["num_layers"]):
        attention, feed_forward = (f"encoder.block.{index}.layer.{i}" for i in (0, 1))
        for name in "qkv":
            linear(shapes, f"{attention}.SelfAttention.{name}", width, inner, bias=False)
        linear(shapes, f"{attention}.SelfAttention.o", inner, width, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wi_0", width, mlp, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wi_1", width, mlp, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wo", mlp, width, bias=False)
        shapes[f"{attention}.layer_norm.weight"] = shapes[f"{feed_forward}.layer_norm.weight"] = (width,)
    shapes["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (T5_BUCKETS, heads)
    return shapes


def _write(path: Path, shapes: Shapes, scales: dict[str, float], option: str, config: dict, seed: int) -> Path:
    tensors = fill(shapes, seed)
    for name, scale in scales.items():
        tensors[name] *= scale
    save_file(
        {name: t.to(torch.float16) for name, t in tensors.items()},
        path,
        {"format": "pt", "tessera_tiny": json.dumps({option: config})},
    )
    return path


def write_clip_l(path: Path, *, seed: int = 0) -> Path:
    """A CLIP-L text encoder of width 32 and two layers in Hugging Face's names, fp16, about 3 MB."""
    # Embedding rows are filled with variance 1 / width; tokens are brought to one, positions to a half of that.
    scales = {
        "text_model.embeddings.token_embedding.weight": CLIP_WIDTH**0.5,
        "text_model.embeddings.position_embedding.weight": CLIP_WIDTH**0.5 / 2,
    }
    return _write(path, _clip_shapes(), scales, "model_config", CLIP_CONFIG, seed)


def write_t5(path: Path, *, seed: int = 0) -> Path:
    """A T5 v1.1 encoder of width 64 and two layers in Hugging Face's names, fp16, about 4 MB."""
    # T5 does not divide its attention scores by the root of the head size: the queries' weights make up for it.
    scales = {"shared.weight": T5_WIDTH**0.5, "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": 2}
    for index in range(T5_CONFIG["num_layers"]):
        scales[f"encoder.block.{index}.layer.0.SelfAttention.q.weight"] = T5_CONFIG["d_kv"] ** -0.5
    return _write(path, _t5_shapes(), scales, "t5xxl_model_config", T5_CONFIG, seed)


def _model_options(*paths: Path) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            options |= json.loads((file.metadata() or {})["tessera_tiny"])
    return options


def load_clip(clip_l: Path, t5: Path) -> Any:
    """A FLUX CLIP, as `DualCLIPLoader` gives it for files of the full size."""
    import comfy.sd

    return comfy.sd.load_clip(
        [str(clip_l), str(t5)], clip_type=comfy.sd.CLIPType.FLUX, model_options=_model_options(clip_l, t5)
    )


def load_sd1_clip(clip_l: Path) -> Any:
    """A CLIP of another family (Stable Diffusion 1: CLIP-L alone)."""
    import comfy.sd

    return comfy.sd.load_clip(
        [str(clip_l)], clip_type=comfy.sd.CLIPType.STABLE_DIFFUSION, model_options=_model_options(clip_l)
    )
