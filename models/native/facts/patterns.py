"""Default targets that several models have in common, as patterns of their Linears."""

# The targets of diffusion-pipe (models/lumina_2.py and z_image.py: JointTransformerBlock) without the text refiner and
# without modulation, which musubi-tuner excludes too (networks/lora_zimage.py: exclude_patterns).
NEXT_DIT = (
    "noise_refiner.*.attention.*",
    "noise_refiner.*.feed_forward.*",
    "layers.*.attention.*",
    "layers.*.feed_forward.*",
)

# Every block, as in sd-scripts (networks/lora_anima.py: ANIMA_TARGET_REPLACE_MODULE and exclude_patterns). The text
# adapter is excluded, as diffusion-pipe advises for small datasets (docs/supported_models.md, Anima).
COSMOS_2 = ("blocks.*.self_attn.*", "blocks.*.cross_attn.*", "blocks.*.mlp.*")

# Attention and MLP of the double and single blocks without modulation, as in musubi-tuner (networks/lora.py:
# HUNYUAN_TARGET_REPLACE_MODULES and exclude_patterns, networks/lora_hv_1_5.py); HunyuanVideo 1.5 has no single blocks.
DOUBLE_AND_SINGLE = (
    "double_blocks.*.img_attn.*",
    "double_blocks.*.txt_attn.*",
    "double_blocks.*.img_mlp.*",
    "double_blocks.*.txt_mlp.*",
    "single_blocks.*.linear1",
    "single_blocks.*.linear2",
)

# musubi-tuner, networks/lora_kandinsky.py: the decoder blocks of its list, which process the picture.
KANDINSKY_5 = (
    "visual_transformer_blocks.*.self_attention.*",
    "visual_transformer_blocks.*.cross_attention.*",
    "visual_transformer_blocks.*.feed_forward.*",
)

WAN = ("blocks.*.self_attn.*", "blocks.*.cross_attn.*", "blocks.*.ffn.*")
