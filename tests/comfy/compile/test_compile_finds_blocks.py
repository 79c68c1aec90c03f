"""Blocks that are found by structure in ComfyUI's models, at their real sizes on the meta device."""

from collections import Counter
from importlib import import_module
from typing import Any

import comfy.ops
import pytest
import torch
from tessera.models.blocks import block_lists, find_blocks

FLUX = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": 768,
    "context_in_dim": 4096,
    "hidden_size": 3072,
    "mlp_ratio": 4.0,
    "num_heads": 24,
    "qkv_bias": True,
    "guidance_embed": True,
    "axes_dim": [16, 56, 56],
    "theta": 10000,
}
HUNYUAN = FLUX | {
    "image_model": "hunyuan_video",
    "patch_size": [1, 2, 2],
    "depth": 20,
    "depth_single_blocks": 40,
    "byt5": False,
    "meanflow": False,
    "use_cond_type_embedding": False,
    "vision_in_dim": None,
    "meanflow_sum": False,
}
UNET = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True}
SDXL = UNET | {
    "num_res_blocks": [2, 2, 2],
    "channel_mult": (1, 2, 4),
    "num_heads": -1,
    "num_head_channels": 64,
    "transformer_depth": [0, 0, 2, 2, 10, 10],
    "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
    "transformer_depth_middle": 10,
    "context_dim": 2048,
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "adm_in_channels": 2816,
}
HIDREAM = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 16,
    "num_single_layers": 32,
    "attention_head_dim": 128,
    "num_attention_heads": 20,
    "caption_channels": [4096, 4096],
    "text_emb_dim": 2048,
    "num_routed_experts": 4,
    "num_activated_experts": 2,
    "axes_dims_rope": (64, 32, 32),
    "max_resolution": (128, 128),
    "llama_layers": [0] * 48,
}
WAN = {"model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 40}
VACE = {"model_type": "t2v", "dim": 1536, "ffn_dim": 8960, "num_heads": 12, "num_layers": 30, "vace_layers": 15}
LUMINA = {"patch_size": 2, "in_channels": 16, "dim": 2304, "n_layers": 26, "n_heads": 24, "n_kv_heads": 8}
LUMINA |= {"cap_feat_dim": 2304, "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512], "qk_norm": True}

# (module and class, its settings, blocks by class, number of kinds, the lists of blocks with their lengths)
MODELS = [
    (
        "flux.model:Flux",
        FLUX | {"depth": 19, "depth_single_blocks": 38, "txt_ids_dims": []},
        {"DoubleStreamBlock": 19, "SingleStreamBlock": 38},
        2,
        {"double_blocks": 19, "single_blocks": 38},
    ),
    ("wan.model:WanModel", WAN, {"WanAttentionBlock": 40}, 1, {"blocks": 40}),
    (
        "wan.model:VaceWanModel",
        VACE | {"vace_in_dim": 96},
        {"WanAttentionBlock": 30, "VaceWanAttentionBlock": 15},
        3,  # the first VACE block has one more layer
        {"blocks": 30, "vace_blocks": 15},
    ),
    (
        "qwen_image.model:QwenImageTransformer2DModel",
        {},
        {"QwenImageTransformerBlock": 60},
        1,
        {"transformer_blocks": 60},
    ),
    (
        "hunyuan_video.model:HunyuanVideo",
        HUNYUAN,
        {"TokenRefinerBlock": 2, "DoubleStreamBlock": 20, "SingleStreamBlock": 40},
        3,
        {"txt_in.individual_token_refiner.blocks": 2, "double_blocks": 20, "single_blocks": 40},
    ),
    (
        "hidream.model:HiDreamImageTransformer2DModel",  # not the experts inside its blocks
        HIDREAM,
        {"HiDreamImageBlock": 48},
        2,
        {"double_stream_blocks": 16, "single_stream_blocks": 32},
    ),
    ("lightricks.model:LTXVModel", {}, {"BasicTransformerBlock": 28}, 1, {"transformer_blocks": 28}),
    (
        "lumina.model:NextDiT",
        LUMINA,
        {"JointTransformerBlock": 30},
        2,
        {"noise_refiner": 2, "context_refiner": 2, "layers": 26},
    ),
    (
        "modules.diffusionmodules.openaimodel:UNetModel",
        SDXL,
        {"ResBlock": 17, "BasicTransformerBlock": 70},
        14,
        {
            "input_blocks.4.1.transformer_blocks": 2,
            "input_blocks.5.1.transformer_blocks": 2,
            "input_blocks.7.1.transformer_blocks": 10,
            "input_blocks.8.1.transformer_blocks": 10,
            "middle_block.1.transformer_blocks": 10,
            "output_blocks.0.1.transformer_blocks": 10,
            "output_blocks.1.1.transformer_blocks": 10,
            "output_blocks.2.1.transformer_blocks": 10,
            "output_blocks.3.1.transformer_blocks": 2,
            "output_blocks.4.1.transformer_blocks": 2,
            "output_blocks.5.1.transformer_blocks": 2,
        },
    ),
]


def build(path: str, settings: dict[str, Any]) -> torch.nn.Module:
    module, _, name = path.partition(":")
    if name == "Flux" or name == "HunyuanVideo":
        settings = {"image_model": "flux"} | settings
    block_class = getattr(import_module(f"comfy.ldm.{module}"), name)
    return block_class(device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init, **settings)


@pytest.mark.parametrize(
    ("path", "settings", "classes", "kinds", "lists"), MODELS, ids=[m[0].rpartition(":")[2] for m in MODELS]
)
def test_the_blocks_of_a_model_are_found_by_structure(path, settings, classes, kinds, lists):
    model = build(path, settings)
    blocks = find_blocks(model)
    assert Counter(type(block.module).__name__ for block in blocks) == classes
    assert len({block.kind for block in blocks}) == kinds
    assert {name: len(members) for name, members in block_lists(model, blocks).items()} == lists
    assert all(model.get_submodule(block.name) is block.module for block in blocks)
    # What is left outside is the embeddings and the head, in a UNet its convolutions too.
    inside = sum(p.numel() for block in blocks for p in block.module.parameters())
    assert inside / sum(p.numel() for p in model.parameters()) > 0.95
