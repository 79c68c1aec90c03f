"""Transformers that make pictures."""

from typing import Any

import torch

from ..row import Draw, NativeRow

LENGTH, WIDTH = 7, 48
TEXT = (LENGTH, WIDTH)
FLUX_LIKE = {
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [8, 12, 12],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
}


def padded(draw: Draw) -> dict[str, Any]:
    """Two tokens at the end are pads."""
    return {"attention_mask": torch.tensor([[1] * (LENGTH - 2) + [0] * 2])}


def mask(draw: Draw) -> dict[str, Any]:
    return {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)}


def pooled(draw: Draw) -> dict[str, Any]:
    return {"pooled_output": draw(1, 24)}


def _llama(draw: Draw) -> dict[str, Any]:
    return pooled(draw) | {"conditioning_llama3": draw(1, 3, 5, WIDTH)}


def _t5_ids(draw: Draw) -> dict[str, Any]:
    return {"t5xxl_ids": torch.tensor([3, 1, 4, 1, 5]), "t5xxl_weights": torch.ones(5)}


NEXT_DIT = {
    "patch_size": 2,
    "in_channels": 16,
    "dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "axes_dims": [8, 12, 12],
    "axes_lens": [300, 512, 512],
    "multiple_of": 32,
    "ffn_dim_multiplier": 1.0,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": WIDTH,
}
Z_IMAGE = NEXT_DIT | {
    "dim": 256,  # the width of its modulation, which is fixed
    "n_heads": 4,
    "n_kv_heads": 4,
    "axes_dims": [16, 24, 24],
    "ffn_dim_multiplier": 0.25,
    "rope_theta": 256.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 8,
}
RADIANCE = FLUX_LIKE | {
    "in_channels": 3,
    "out_channels": 3,
    "context_in_dim": WIDTH,
    "vec_in_dim": 64,
    "txt_ids_dims": [],
    "patch_size": 4,
    "in_dim": 64,
    "out_dim": 64,
    "hidden_dim": 64,
    "n_layers": 2,
    "nerf_hidden_size": 16,
    "nerf_mlp_ratio": 2,
    "nerf_depth": 2,
    "nerf_max_freqs": 4,
    "nerf_tile_size": 0,
    "nerf_final_head_type": "conv",
    "nerf_embedder_dtype": torch.float32,
    "use_x0": False,
    "use_sequential_txt_ids": False,
}
PREDICT2 = {
    "max_img_h": 240,
    "max_img_w": 240,
    "max_frames": 128,
    "in_channels": 16,
    "out_channels": 16,
    "patch_spatial": 2,
    "patch_temporal": 1,
    "concat_padding_mask": True,
    "model_channels": 64,
    "num_blocks": 2,
    "num_heads": 2,
    "crossattn_emb_channels": WIDTH,
    "pos_emb_cls": "rope3d",
    "pos_emb_learnable": True,
    "pos_emb_interpolation": "crop",
    "min_fps": 1,
    "max_fps": 30,
    "use_adaln_lora": True,
    "adaln_lora_dim": 16,
    "rope_h_extrapolation_ratio": 4.0,
    "rope_w_extrapolation_ratio": 4.0,
    "rope_t_extrapolation_ratio": 1.0,
    "extra_per_block_abs_pos_emb": False,
    "rope_enable_fps_modulation": False,
}

NAMED = (
    NativeRow(name="z-image", model="ZImage", tier="A", unet=Z_IMAGE, latent=(16, 8, 12), text=TEXT, conditioning=mask),
    NativeRow(
        name="krea-2",
        model="Krea2",
        tier="A",
        unet={
            "features": 64,
            "tdim": 32,
            "txtdim": 32,
            "heads": 2,
            "kvheads": 1,
            "multiplier": 2,
            "layers": 2,
            "patch": 2,
            "channels": 16,
            "txtlayers": 2,
            "txtheads": 1,
            "txtkvheads": 1,
        },
        latent=(16, 1, 8, 12),
        text=(LENGTH, 2 * 32),
    ),
    NativeRow(
        name="anima",
        model="Anima",
        tier="A",
        unet=PREDICT2,
        latent=(16, 1, 8, 12),
        text=TEXT,
        conditioning=_t5_ids,
        sizes={
            "comfy.ldm.anima.model.LLMAdapter": {
                "source_dim": WIDTH,
                "target_dim": WIDTH,
                "model_dim": WIDTH,
                "num_layers": 2,
                "num_heads": 2,
            }
        },
    ),
    NativeRow(
        name="sd3.5",
        model="SD3",
        tier="A",
        unet={
            "in_channels": 16,
            "out_channels": 16,
            "patch_size": 2,
            "depth": 2,
            "input_size": None,
            "adm_in_channels": 24,
            "context_embedder_config": {
                "target": "torch.nn.Linear",
                "params": {"in_features": WIDTH, "out_features": 128},
            },
            "num_patches": 256,
            "pos_embed_max_size": 16,
            "pos_embed_scaling_factor": None,
            "mlp_ratio": 2.0,
            "qk_norm": "rms",
            "x_block_self_attn_layers": [0],
        },
        latent=(16, 8, 12),
        text=TEXT,
        conditioning=pooled,
    ),
    NativeRow(
        name="lumina-2", model="Lumina2", tier="A", unet=NEXT_DIT, latent=(16, 8, 12), text=TEXT, conditioning=mask
    ),
    NativeRow(
        name="omnigen2",
        model="Omnigen2",
        tier="A",
        unet={
            "patch_size": 2,
            "in_channels": 16,
            "hidden_size": 64,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "num_attention_heads": 2,
            "num_kv_heads": 1,
            "multiple_of": 32,
            "norm_eps": 1e-5,
            "axes_dim_rope": [8, 12, 12],
            "axes_lens": [1024, 1664, 1664],
            "text_feat_dim": WIDTH,
            "timestep_scale": 1000.0,
        },
        latent=(16, 8, 12),
        text=TEXT,
        conditioning=mask,
    ),
    NativeRow(
        name="hidream",
        model="HiDream",
        tier="A",
        unet={
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "caption_channels": [WIDTH, WIDTH],
            "text_emb_dim": 24,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "axes_dims_rope": (8, 12, 12),
            "max_resolution": (128, 128),
            "llama_layers": [0, 1, 2, 2],
        },
        latent=(16, 8, 12),
        text=TEXT,
        conditioning=_llama,
    ),
    NativeRow(name="chroma-radiance", model="ChromaRadiance", tier="A", unet=RADIANCE, latent=(3, 16, 24), text=TEXT),
    NativeRow(
        name="cosmos-predict2", model="CosmosT2IPredict2", tier="A", unet=PREDICT2, latent=(16, 1, 8, 12), text=TEXT
    ),
)
