"""Tiny text encoders whose vocabularies fit ComfyUI's tokenizers: CLIP-L, T5, Wan's umT5 and Qwen-Image's Qwen2.5-VL.

Their sizes cannot be read from the weights by ComfyUI, so each file carries its configuration in its metadata and
the `load_*` functions pass it on as model options.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .qwen_image import QWEN_TEXT_WIDTH
from .spiece import VOCABULARY, spiece_model
from .weights import Shapes, fill, linear

CLIP_WIDTH = 32
T5_WIDTH = 64

CLIP_CONFIG = {"hidden_size": CLIP_WIDTH, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
T5_CONFIG = {"d_model": T5_WIDTH, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2}
CLIP_VOCABULARY, CLIP_POSITIONS = 49408, 77
T5_VOCABULARY, T5_BUCKETS = 32128, 32
UMT5_CONFIG = T5_CONFIG | {"vocab_size": VOCABULARY}
QWEN_CONFIG = {
    "hidden_size": QWEN_TEXT_WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
QWEN_VOCABULARY, QWEN_HEAD_SIZE = 152064, 128  # both fixed in ComfyUI


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


def _t5_shapes(vocabulary: int, biases: int) -> Shapes:
    """`biases` is the number of layers, from the first, with a table of relative positions of their own."""
    width, mlp, heads = T5_CONFIG["d_model"], T5_CONFIG["d_ff"], T5_CONFIG["num_heads"]
    inner = heads * T5_CONFIG["d_kv"]
    shapes: Shapes = {"shared.weight": (vocabulary, width), "encoder.final_layer_norm.weight": (width,)}
    for index in range(T5_CONFIG["num_layers"]):
        attention, feed_forward = (f"encoder.block.{index}.layer.{i}" for i in (0, 1))
        for name in "qkv":
            linear(shapes, f"{attention}.SelfAttention.{name}", width, inner, bias=False)
        linear(shapes, f"{attention}.SelfAttention.o", inner, width, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wi_0", width, mlp, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wi_1", width, mlp, bias=False)
        linear(shapes, f"{feed_forward}.DenseReluDense.wo", mlp, width, bias=False)
        shapes[f"{attention}.layer_norm.weight"] = shapes[f"{feed_forward}.layer_norm.weight"] = (width,)
    for index in range(biases):
        bias = f"encoder.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
        shapes[bias] = (T5_BUCKETS, heads)
    return shapes


def _qwen_shapes() -> Shapes:
    width, mlp = QWEN_CONFIG["hidden_size"], QWEN_CONFIG["intermediate_size"]
    inner, keys = (QWEN_CONFIG[f"num_{name}_heads"] * QWEN_HEAD_SIZE for name in ("attention", "key_value"))
    shapes: Shapes = {"model.embed_tokens.weight": (QWEN_VOCABULARY, width), "model.norm.weight": (width,)}
    for index in range(QWEN_CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        linear(shapes, f"{layer}.self_attn.q_proj", width, inner)
        linear(shapes, f"{layer}.self_attn.k_proj", width, keys)
        linear(shapes, f"{layer}.self_attn.v_proj", width, keys)
        linear(shapes, f"{layer}.self_attn.o_proj", inner, width, bias=False)
        linear(shapes, f"{layer}.mlp.gate_proj", width, mlp, bias=False)
        linear(shapes, f"{layer}.mlp.up_proj", width, mlp, bias=False)
        linear(shapes, f"{layer}.mlp.down_proj", mlp, width, bias=False)
        shapes[f"{layer}.input_layernorm.weight"] = shapes[f"{layer}.post_attention_layernorm.weight"] = (width,)
    return shapes


def _write(
    path: Path,
    shapes: Shapes,
    scales: dict[str, float],
    option: str,
    config: dict,
    seed: int,
    extra: dict[str, Tensor] | None = None,
) -> Path:
    tensors = fill(shapes, seed)
    for name, scale in scales.items():
        tensors[name] *= scale
    save_file(
        {name: t.to(torch.float16) for name, t in tensors.items()} | (extra or {}),
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


def _t5_scales(biases: int) -> dict[str, float]:
    # T5 does not divide its attention scores by the root of the head size: the queries' weights make up for it.
    scales = {"shared.weight": T5_WIDTH**0.5}
    for index in range(T5_CONFIG["num_layers"]):
        attention = f"encoder.block.{index}.layer.0.SelfAttention"
        scales[f"{attention}.q.weight"] = T5_CONFIG["d_kv"] ** -0.5
        if index < biases:
            scales[f"{attention}.relative_attention_bias.weight"] = 2
    return scales


def write_t5(path: Path, *, seed: int = 0) -> Path:
    """A T5 v1.1 encoder of width 64 and two layers in Hugging Face's names, fp16, about 4 MB."""
    return _write(path, _t5_shapes(T5_VOCABULARY, 1), _t5_scales(1), "t5xxl_model_config", T5_CONFIG, seed)


def write_umt5(path: Path, *, seed: int = 0) -> Path:
    """Wan's umT5 encoder of width 64 and two layers, with a tokenizer of single characters, fp16, 0.2 MB."""
    layers = T5_CONFIG["num_layers"]
    extra = {
        "spiece_model": torch.tensor(list(spiece_model()), dtype=torch.uint8),
        # ComfyUI knows the encoder by the width of its 24th layer, which here has no rows to read.
        "encoder.block.23.layer.1.DenseReluDense.wi_1.weight": torch.zeros(10240, 0, dtype=torch.float16),
    }
    shapes, scales = _t5_shapes(VOCABULARY, layers), _t5_scales(layers)
    return _write(path, shapes, scales, "umt5xxl_model_config", UMT5_CONFIG, seed, extra)


def write_qwen(path: Path, *, seed: int = 0) -> Path:
    """Qwen-Image's text encoder of width 64 and two layers, without its vision part, fp16, 20 MB of vocabulary."""
    scales = {"model.embed_tokens.weight": QWEN_TEXT_WIDTH**0.5}
    return _write(path, _qwen_shapes(), scales, "qwen25_7b_model_config", QWEN_CONFIG, seed)


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


def load_wan_clip(umt5: Path) -> Any:
    """A Wan CLIP, as `CLIPLoader` gives it for a file of the full size."""
    import comfy.sd

    return comfy.sd.load_clip([str(umt5)], clip_type=comfy.sd.CLIPType.WAN, model_options=_model_options(umt5))


def load_chroma_clip(t5: Path) -> Any:
    """A Chroma CLIP, as `CLIPLoader` gives it for a T5 of the full size, which ComfyUI knows by its 24th layer."""
    import comfy.sd
    import comfy.utils

    tensors = comfy.utils.load_torch_file(str(t5), safe_load=True)
    tensors["encoder.block.23.layer.1.DenseReluDense.wi_1.weight"] = torch.zeros(10240, 0)
    return comfy.sd.load_text_encoder_state_dicts(
        [tensors], clip_type=comfy.sd.CLIPType.CHROMA, model_options=_model_options(t5)
    )


def load_qwen_clip(qwen: Path, *, sees: bool = False) -> Any:
    """A Qwen-Image CLIP, as `CLIPLoader` gives it for a file of the full size, for text alone: it cannot see.

    sees: it keeps its vision model, whose weights the file does not hold.
    """
    import comfy.sd
    import comfy.text_encoders.qwen_vl as vision

    options = _model_options(qwen)
    if sees:
        return comfy.sd.load_clip([str(qwen)], clip_type=comfy.sd.CLIPType.QWEN_IMAGE, model_options=options)
    original = vision.Qwen2VLVisionTransformer
    vision.Qwen2VLVisionTransformer = lambda **_: torch.nn.Identity()  # its 0.7 billion weights have fixed sizes
    try:
        return comfy.sd.load_clip([str(qwen)], clip_type=comfy.sd.CLIPType.QWEN_IMAGE, model_options=options)
    finally:
        vision.Qwen2VLVisionTransformer = original


def load_text_encoder(path: Path) -> Any:
    """The CLIP of a tiny umT5, T5 (Chroma's) or Qwen2.5-VL file, whichever it is."""
    loaders = {"umt5xxl_model_config": load_wan_clip, "t5xxl_model_config": load_chroma_clip}
    (option,) = _model_options(path)
    return loaders.get(option, load_qwen_clip)(path)
