"""Tiny text encoders and VAEs of models without a family in the pack, of core's own classes with their sizes handed
in."""

from typing import Any

import torch

from .encoders import CLIP_CONFIG, T5_CONFIG
from .image_encoders import QWEN3_CONFIG, make_clip, make_vae, replaced

CLIP_L_CONFIG = CLIP_CONFIG | {"num_hidden_layers": 3}
LLAMA_CONFIG = QWEN3_CONFIG | {"num_hidden_layers": 4}


def load_sdxl_clip(width: int = 32, g_width: int = 64) -> Any:
    """SDXL's CLIP: CLIP-L and CLIP-G, the pooled text of the latter."""
    import comfy.sdxl_clip as sdxl

    g_config = {"hidden_size": g_width, "projection_dim": g_width}
    options = {
        "clip_l_model_config": CLIP_L_CONFIG | {"hidden_size": width},
        "clip_g_model_config": CLIP_L_CONFIG | g_config,
    }
    return make_clip(sdxl.SDXLClipModel, sdxl.SDXLTokenizer, options)


def load_z_image_clip(width: int = 32) -> Any:
    """Z-Image's CLIP: Qwen3 with the attention mask of its tokens."""
    import comfy.text_encoders.z_image as z_image

    options = {"qwen3_4b_model_config": LLAMA_CONFIG | {"hidden_size": width}}
    return make_clip(z_image.te(), z_image.ZImageTokenizer, options)


def load_ltx_clip() -> Any:
    """LTX-Video's CLIP: T5 of width 64 padded to 128 and masked."""
    import comfy.text_encoders.lt as lt

    return make_clip(lt.ltxv_te(), lt.LTXVT5Tokenizer, {"t5xxl_model_config": T5_CONFIG})


def load_mochi_clip() -> Any:
    """Mochi's CLIP: the encoder and the weights of LTX's, padded to 256."""
    import comfy.text_encoders.genmo as genmo

    return make_clip(genmo.mochi_te(), genmo.MochiT5Tokenizer, {"t5xxl_model_config": T5_CONFIG})


def load_anima_clip(width: int = 32) -> Any:
    """Anima's CLIP: Qwen3, and T5's tokens and weights as they are."""
    import comfy.text_encoders.anima as anima

    options = {"qwen3_06b_model_config": LLAMA_CONFIG | {"hidden_size": width}}
    return make_clip(anima.te(), anima.AnimaTokenizer, options)


def load_hidream_clip() -> Any:
    """HiDream's CLIP with CLIP-L and Llama alone: with the output of each layer of Llama."""
    import comfy.text_encoders.hidream as hidream

    options = {"clip_l_model_config": CLIP_L_CONFIG, "llama_model_config": LLAMA_CONFIG}
    return make_clip(hidream.hidream_clip(t5=False, clip_g=False), hidream.HiDreamTokenizer, options)


def load_hunyuan_video_vae() -> Any:
    """HunyuanVideo's VAE: 16 channels, 8 x 8 pixels and four frames a cell."""
    import comfy.ldm.models.autoencoder as autoencoder
    import comfy.sd

    real = autoencoder.AutoencoderKL

    def tiny(ddconfig: dict[str, Any], embed_dim: int, **_: Any) -> Any:
        return real(ddconfig={**ddconfig, "ch": 32, "num_res_blocks": 1}, embed_dim=embed_dim)

    sizes = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3}
    sizes |= {"ch_mult": [1, 2, 4, 4], "attn_resolutions": [], "dropout": 0.0, "conv3d": True, "time_compress": 4}
    with replaced(comfy.sd, "AutoencoderKL", tiny):
        return make_vae(tiny(sizes, 16))


def hollow_vae(class_path: str, weights: dict[str, tuple[int, ...]]) -> Any:
    """A VAE that core knows by these weights, with nothing inside: its geometry is core's."""
    from importlib import import_module

    import comfy.sd

    module, name = class_path.rsplit(".", 1)
    owner = comfy.sd if module == "comfy.sd" else import_module(module)

    def nothing(*_: Any, **__: Any) -> torch.nn.Module:
        return torch.nn.Module()

    with replaced(owner, name, nothing):
        return comfy.sd.VAE(sd={name: torch.zeros(shape) for name, shape in weights.items()})


def load_krea2_clip() -> Any:
    """Krea 2's CLIP: twelve layers of a Qwen3 of width 32 side by side; its eyes have one layer."""
    import comfy.text_encoders.krea2 as krea2
    import comfy.text_encoders.qwen3vl as qwen3vl

    eyes = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "deepstack_visual_indexes": []}
    with replaced(qwen3vl, "QWEN3VL_VISION", {"qwen3vl_4b": eyes}):
        options = {"qwen3vl_4b_model_config": LLAMA_CONFIG | {"num_hidden_layers": 36}}
        return make_clip(krea2.te(), krea2.Krea2Tokenizer, options)


def load_hunyuan_video_15_clip() -> Any:
    """HunyuanVideo 1.5's CLIP: a Qwen2.5-VL of width 32 without eyes, and ByT5 of width 32 for what captions quote."""
    import comfy.text_encoders.hunyuan_image as hunyuan_image
    import comfy.text_encoders.hunyuan_video as hunyuan_video
    import comfy.text_encoders.qwen_vl as vision

    real = hunyuan_image.ByT5SmallModel

    def byt5(model_options: dict[str, Any], **kwargs: Any) -> Any:
        glyphs = {"_model_config": {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}}
        return real(model_options=model_options | glyphs, **kwargs)

    options = {"qwen25_7b_model_config": LLAMA_CONFIG}
    with (
        replaced(hunyuan_image, "ByT5SmallModel", byt5),
        # Its 0.7 billion weights have fixed sizes.
        replaced(vision, "Qwen2VLVisionTransformer", lambda **_: torch.nn.Identity()),
    ):
        return make_clip(hunyuan_image.te(), hunyuan_video.HunyuanVideo15Tokenizer, options)


def load_minimax_h3_clip(width: int = 32) -> Any:
    """MiniMax H3's CLIP: a Qwen3-VL of this width; its eyes have one layer."""
    import comfy.text_encoders.minimax as minimax
    import comfy.text_encoders.qwen3vl as qwen3vl

    eyes = {"hidden_size": 32, "intermediate_size": 64, "depth": 1, "deepstack_visual_indexes": []}
    with replaced(qwen3vl, "QWEN3VL_VISION", {"qwen3vl_32b": eyes}):
        options = {"qwen3vl_32b_model_config": LLAMA_CONFIG | {"hidden_size": width}}
        return make_clip(minimax.te(), minimax.MiniMaxH3Tokenizer, options)
