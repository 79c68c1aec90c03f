"""Transformers that make videos, and pictures as videos of one frame."""

from types import SimpleNamespace
from typing import Any

import torch

from ..row import Draw, NativeRow
from .pictures import PREDICT2, TEXT, WIDTH, padded, pooled

HUNYUAN: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 24,
    "context_in_dim": WIDTH,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12],
    "theta": 256,
    "patch_size": [1, 2, 2],
    "qkv_bias": True,
    "guidance_embed": True,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow": False,
    "meanflow_sum": False,
    "byt5": False,
}
HUNYUAN_IMAGE: dict[str, Any] = HUNYUAN | {
    "in_channels": 64,
    "out_channels": 64,
    "vec_in_dim": None,
    "guidance_embed": False,
    "byt5": True,
    "patch_size": [1, 1],
    "axes_dim": [16, 16],
}
BYT5 = {
    "comfy.ldm.hunyuan_video.model.ByT5Mapper": {"in_dim": 32, "out_dim": 32, "hidden_dim": 32},
}
LTX = {
    "in_channels": 128,
    "cross_attention_dim": 64,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "caption_channels": WIDTH,
    "num_layers": 2,
    "positional_embedding_max_pos": [20, 2048, 2048],
}
LTX_WITH_SOUND: dict[str, Any] = LTX | {
    "audio_in_channels": 128,
    "audio_cross_attention_dim": 32,
    "audio_attention_head_dim": 16,
    "audio_num_attention_heads": 2,
    "connector_num_attention_heads": 2,
    "connector_num_layers": 1,
}
# Fields of the file of LTX-2.3 in addition to its sizes: gates in attention, text modulated by the noise level, and a
# text of each stream that its encoder projects.
LTX_2_3: dict[str, Any] = LTX_WITH_SOUND | {
    "connector_attention_head_dim": 32,
    "audio_connector_attention_head_dim": 16,
    "audio_connector_num_attention_heads": 2,
    "apply_gated_attention": True,
    "connector_apply_gated_attention": True,
    "caption_proj_before_connector": True,
    "caption_projection_first_linear": False,
    "caption_projection_second_linear": False,
    "cross_attention_adaln": True,
    "use_middle_indices_grid": True,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "causal_temporal_positioning": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
}
COSMOS = {
    "max_img_h": 32,
    "max_img_w": 32,
    "max_frames": 8,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "model_channels": 64,
    "block_config": "FA-CA-MLP",
    "num_blocks": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "crossattn_emb_channels": WIDTH,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": False,
    "pos_emb_interpolation": "crop",
    "block_x_format": "THWBD",
    "affline_emb_norm": True,
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
    "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable",
}
COGVIDEO = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 32,
    "text_embed_dim": WIDTH,
    "num_layers": 2,
    "sample_width": 12,
    "sample_height": 8,
    "sample_frames": 9,
    "patch_size": 2,
    "use_rotary_positional_embeddings": True,
}


def _glyphs(draw: Draw) -> dict[str, Any]:
    return {"conditioning_byt5small": draw(1, 5, 32)}


def _glyphs_and_picture(draw: Draw) -> dict[str, Any]:
    picture = SimpleNamespace(last_hidden_state=draw(1, 5, 32))
    return _glyphs(draw) | {"pooled_output": None, "clip_vision_output": picture}


def _start(draw: Draw) -> dict[str, Any]:
    mask = torch.ones(1, 1, 3, 8, 8)
    mask[:, :, 0] = 0
    return {"concat_latent_image": draw(1, 16, 3, 8, 8), "concat_mask": mask}


def _as_encoded(draw: Draw) -> dict[str, Any]:
    """Return what LTX-2.3's encoder says of its text: that the model has still to refine it."""
    return {"unprocessed_ltxav_embeds": True}


NAMED = (
    NativeRow(
        name="ltx-video", model="LTXV", tier="A", unet=LTX, latent=(128, 3, 4, 6), text=TEXT, conditioning=padded
    ),
    NativeRow(
        name="hunyuan-video",
        model="HunyuanVideo",
        tier="A",
        unet=HUNYUAN,
        latent=(16, 3, 8, 8),
        text=TEXT,
        conditioning=pooled,
    ),
    NativeRow(
        name="hunyuan-video-1.5",
        model="HunyuanVideo15",
        tier="A",
        unet=HUNYUAN
        | {
            "in_channels": 65,
            "out_channels": 32,
            "vec_in_dim": None,
            "guidance_embed": False,
            "use_cond_type_embedding": True,
            "vision_in_dim": 32,
            "byt5": True,
            "depth_single_blocks": 0,
            "patch_size": [1, 1, 1],
        },
        latent=(32, 3, 4, 6),
        text=TEXT,
        conditioning=_glyphs_and_picture,
        sizes=BYT5,
    ),
    NativeRow(
        name="hunyuan-image",
        model="HunyuanImage21",
        tier="A",
        unet=HUNYUAN_IMAGE,
        latent=(64, 4, 6),
        text=TEXT,
        conditioning=_glyphs,
        sizes=BYT5,
    ),
)

FURTHER = (
    NativeRow(
        name="hunyuan-image-distilled",
        model="HunyuanImage21",
        tier="A",
        # Fields of the distilled file in addition to its sizes: guidance, and the sigma of the next step.
        unet=HUNYUAN_IMAGE | {"guidance_embed": True, "meanflow": True},
        latent=(64, 4, 6),
        text=TEXT,
        conditioning=_glyphs,
        sizes=BYT5,
    ),
    NativeRow(
        name="minimax-h3",
        model="MiniMaxH3",
        tier="B",
        unet={
            "hidden_size": 64,
            "num_layers": 2,
            "token_refiner_num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "ffn_hidden_size": 96,
            "latents_dim": 24,
            "audio_latents_dim": 32,
            "text_dim": WIDTH,
            "timestep_input_dim": 32,
            "time_embed_hidden_size": 48,
            "time_embed_dim": 32,
            "rope_inv_freq_len": 4,
        },
        latent=(24, 3, 8, 8),
        text=TEXT,
        audio=(32, 2, 15),
        batches=False,
    ),
    NativeRow(
        name="ltx-2",
        model="LTXAV",
        tier="B",
        unet=LTX_WITH_SOUND | {"connector_attention_head_dim": 24},
        latent=(128, 3, 4, 6),
        text=TEXT,
        audio=(8, 17, 16),
    ),
    NativeRow(
        name="ltx-2.3",
        model="LTXAV",
        tier="B",
        unet=LTX_2_3,
        latent=(128, 3, 4, 6),
        text=(TEXT[0], LTX_2_3["cross_attention_dim"] + LTX_2_3["audio_cross_attention_dim"]),
        conditioning=_as_encoded,
        audio=(8, 17, 16),
    ),
    NativeRow(
        name="kandinsky-5",
        model="Kandinsky5",
        tier="B",
        unet={
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "in_text_dim": WIDTH,
            "in_text_dim2": 24,
            "time_dim": 32,
            "model_dim": 64,
            "ff_dim": 96,
            "visual_embed_dim": 132,
            "num_text_blocks": 1,
            "num_visual_blocks": 2,
            "axes_dims": (8, 12, 12),
        },
        latent=(16, 3, 8, 8),
        text=TEXT,
        conditioning=pooled,
    ),
    NativeRow(
        name="mochi",
        model="GenmoMochi",
        tier="B",
        unet={
            "depth": 3,
            "patch_size": 2,
            "num_heads": 2,
            "hidden_size_x": 64,
            "hidden_size_y": 32,
            "mlp_ratio_x": 192,  # its product with the width is fixed
            "mlp_ratio_y": 2,
            "learn_sigma": False,
            "in_channels": 12,
            "qk_norm": True,
            "qkv_bias": False,
            "out_bias": True,
            "attn_drop": 0.0,
            "patch_embed_bias": True,
            "posenc_preserve_area": True,
            "timestep_mlp_bias": True,
            "attend_to_padding": False,
            "timestep_scale": 1000.0,
            "use_t5": True,
            "t5_feat_dim": WIDTH,
            "t5_token_length": TEXT[0],
        },
        latent=(12, 3, 8, 8),
        text=TEXT,
        conditioning=padded,
    ),
    NativeRow(
        name="cosmos",
        model="CosmosT2V",
        tier="B",
        unet=COSMOS,
        latent=(16, 3, 8, 8),
        text=TEXT,
    ),
    NativeRow(
        name="cosmos-predict2-video",
        model="CosmosI2VPredict2",
        tier="B",
        unet=PREDICT2 | {"in_channels": 17},
        latent=(16, 3, 8, 8),
        text=TEXT,
        conditioning=_start,
    ),
    NativeRow(
        name="cogvideox",
        model="CogVideoX_T2V",
        tier="B",
        unet=COGVIDEO,
        latent=(16, 3, 8, 12),
        text=TEXT,
    ),
    NativeRow(
        name="cogvideox-1.5",
        model="CogVideoX_I2V",
        tier="B",
        unet=COGVIDEO | {"in_channels": 32, "patch_size_t": 2, "ofs_embed_dim": 32, "patch_bias": False},
        latent=(16, 2, 8, 12),
        text=TEXT,
    ),
)
