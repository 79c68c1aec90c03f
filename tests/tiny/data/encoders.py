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

from ..models.qwen_image import QWEN_TEXT_WIDTH
from ..models.weights import Shapes, linear
from .spiece import VOCABULARY, spiece_model

# isort: split
from tessera_try_it.text_encoders import (
    CLIP_CONFIG,
    CLIP_SCALES,
    T5_CONFIG,
    T5_VOCABULARY,
    clip_shapes,
    scaled,
    t5_scales,
    t5_shapes,
)
from tessera_try_it.text_encoders import CLIP_WIDTH as CLIP_WIDTH
from tessera_try_it.text_encoders import T5_WIDTH as T5_WIDTH

UMT5_CONFIG = T5_CONFIG | {"vocab_size": VOCABULARY}
QWEN_CONFIG = {
    "hidden_size": QWEN_TEXT_WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
QWEN_VOCABULARY, QWEN_HEAD_SIZE = 152064, 128  # both fixed in ComfyUI


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
    tensors = scaled(shapes, scales, seed)
    save_file(
        {name: t.to(torch.float16) for name, t in tensors.items()} | (extra or {}),
        path,
        {"format": "pt", "tessera_tiny": json.dumps({option: config})},
    )
    return path


def write_clip_l(path: Path, *, seed: int = 0) -> Path:
    """A CLIP-L text encoder of width 32 and two layers in Hugging Face's names, fp16, about 3 MB."""
    return _write(path, clip_shapes(), CLIP_SCALES, "model_config", CLIP_CONFIG, seed)


def write_t5(path: Path, *, seed: int = 0) -> Path:
    """A T5 v1.1 encoder of width 64 and two layers in Hugging Face's names, fp16, about 4 MB."""
    return _write(path, t5_shapes(T5_VOCABULARY, 1), t5_scales(1), "t5xxl_model_config", T5_CONFIG, seed)


def write_umt5(path: Path, *, seed: int = 0) -> Path:
    """Wan's umT5 encoder of width 64 and two layers, with a tokenizer of single characters, fp16, 0.2 MB."""
    layers = T5_CONFIG["num_layers"]
    extra = {
        "spiece_model": torch.tensor(list(spiece_model()), dtype=torch.uint8),
        # ComfyUI knows the encoder by the width of its 24th layer, which here has no rows to read.
        "encoder.block.23.layer.1.DenseReluDense.wi_1.weight": torch.zeros(10240, 0, dtype=torch.float16),
    }
    shapes, scales = t5_shapes(VOCABULARY, layers), t5_scales(layers)
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
