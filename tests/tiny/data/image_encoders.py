"""Tiny encoders of core's own classes that no file of core's loaders describes so small: their sizes are handed in.

FLUX.2's text encoders (Mistral of dev, Qwen3 of klein), Qwen2.5-VL with eyes, Qwen3-VL, which answers too, the VAEs of
FLUX.2 and of Wan 2.2 5B, and the CLIP vision model of Wan 2.1. All weights are random, from fixed seeds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from ..models.weights import fill
from .encoders import load_qwen_clip

_LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
MISTRAL_CONFIG = _LAYERS | {"num_hidden_layers": 31, "vocab_size": 300}
QWEN3_CONFIG = _LAYERS | {"num_hidden_layers": 28}
VISION_CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "projection_dim": 16,
    "image_size": 224,
    "patch_size": 14,
    "num_channels": 3,
    "hidden_act": "gelu",
    "model_type": "clip_vision_model",
}


@contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace an attribute of a module."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _fill(module: torch.nn.Module, seed: int = 0) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    module.load_state_dict(fill({name: shape for name, shape in shapes.items() if shape}, seed), strict=False)


def make_clip(encoder: type, tokenizer: type, options: dict[str, Any]) -> Any:
    """A CLIP of core's classes; options hold the sizes of its encoders."""
    from types import SimpleNamespace

    import comfy.sd

    clip = comfy.sd.CLIP(SimpleNamespace(params={}, clip=encoder, tokenizer=tokenizer), model_options=options)
    _fill(clip.cond_stage_model)
    return clip


def load_klein_clip() -> Any:
    """FLUX.2 klein's CLIP, as `CLIPLoader` gives it for qwen_3_4b, of width 32."""
    import comfy.text_encoders.flux as flux

    options = {"qwen3_4b_model_config": QWEN3_CONFIG}
    return make_clip(flux.klein_te(model_type="qwen3_4b"), flux.KleinTokenizer, options)


def load_mistral_clip() -> Any:
    """FLUX.2 dev's CLIP, as `CLIPLoader` gives it for mistral_3_small_flux2, of width 32, with a tokenizer of bytes."""
    import comfy.text_encoders.flux as flux
    from transformers import LlamaTokenizerFast

    options = {"mistral3_24b_model_config": MISTRAL_CONFIG}
    tokenizer: Any = _byte_tokenizer()
    # Newer releases pass it on; older ones make transformers' class of it.
    if "tokenizer_object" in signature(flux.MistralTokenizerClass.from_pretrained).parameters:
        tokenizer = LlamaTokenizerFast(tokenizer_object=tokenizer, legacy=False)
    with replaced(flux, "load_mistral_tokenizer", lambda data: {"tokenizer_object": tokenizer}):
        return make_clip(flux.flux2_te(), flux.Flux2Tokenizer, options)


def _byte_tokenizer() -> Any:
    """Tekken's special tokens at their places, and a token for each byte after them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(5, 11)), "<pad>"]
    special += [f"<SPECIAL_{i}>" for i in range(12, 17)] + ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *bytes_])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def load_seeing_qwen_clip(qwen: Path) -> Any:
    """Qwen-Image's CLIP of a tiny file, with a vision model of two layers and width 32."""
    import comfy.text_encoders.qwen_vl as vision

    real = vision.Qwen2VLVisionTransformer

    def tiny(hidden_size: int, **sizes: Any) -> Any:
        return real(hidden_size=32, intermediate_size=64, num_heads=2, num_layers=2, **sizes)

    with replaced(vision, "Qwen2VLVisionTransformer", tiny):
        clip = load_qwen_clip(qwen, sees=True)
    _fill(clip.cond_stage_model.qwen25_7b.transformer.visual)
    return clip


def load_qwen3vl_clip() -> Any:
    """Qwen3-VL 4B, as `CLIPLoader` gives it with any type but flux2: two layers and two of its eyes, of width 32."""
    import comfy.text_encoders.qwen3vl as qwen3vl

    eyes = {"hidden_size": 32, "intermediate_size": 64, "depth": 2, "deepstack_visual_indexes": [0]}
    name = "qwen3vl_4b"
    options = {f"{name}_model_config": _LAYERS | {"num_hidden_layers": 2}}
    with (
        replaced(qwen3vl, "QWEN3VL_VISION", {name: eyes}),
        replaced(qwen3vl, "QWEN3VL_VISION_COMMON", qwen3vl.QWEN3VL_VISION_COMMON | {"num_heads": 2}),
    ):
        return make_clip(qwen3vl.te(model_type=name), qwen3vl.tokenizer(model_type=name), options)


def load_wan22_vae() -> Any:
    """The VAE of Wan 2.2 5B: 48 channels, 16 x 16 pixels and four frames a cell."""
    import comfy.ldm.wan.vae2_2 as wan

    real = wan.WanVAE

    def tiny(**sizes: Any) -> Any:
        return real(**sizes | {"dim": 8, "dec_dim": 8})

    with replaced(wan, "WanVAE", tiny):
        return make_vae(tiny(dim_mult=[1, 2, 4, 4], z_dim=48, temperal_downsample=[False, True, True]))


def load_flux2_vae() -> Any:
    """The VAE of FLUX.2: 128 channels, 16 x 16 pixels a cell."""
    import comfy.ldm.models.autoencoder as autoencoder
    import comfy.sd

    real = autoencoder.AutoencoderKL

    def tiny(ddconfig: dict[str, Any], embed_dim: int, **_: Any) -> Any:
        return real(ddconfig={**ddconfig, "ch": 32, "num_res_blocks": 1}, embed_dim=embed_dim)

    sizes = {"double_z": True, "z_channels": 32, "resolution": 256, "in_channels": 3, "out_ch": 3}
    sizes |= {"ch_mult": [1, 2, 4, 4], "attn_resolutions": [], "dropout": 0.0, "batch_norm_latent": True}
    with replaced(comfy.sd, "AutoencoderKL", tiny):
        return make_vae(tiny(sizes, 32))


def make_vae(model: torch.nn.Module) -> Any:
    """A VAE that core knows by the names in this model's weights."""
    import comfy.sd

    _fill(model)
    for name, tensor in model.state_dict().items():
        if name.endswith("gamma"):
            tensor.mul_(0.1).add_(1)
        elif name.endswith("running_var"):
            tensor.abs_().add_(0.5)
    return comfy.sd.VAE(sd=dict(model.state_dict()))


def load_clip_vision(width: int = 32) -> Any:
    """A CLIP vision model of three layers; it sees 257 tokens as the real one does, whose width is 1280."""
    import comfy.clip_vision

    vision = comfy.clip_vision.ClipVisionModel(VISION_CONFIG | {"hidden_size": width})
    _fill(vision.model)
    return vision
