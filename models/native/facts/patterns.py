"""Default targets that several models have in common, as patterns of their Linears."""

# What diffusion-pipe trains (models/lumina_2.py and z_image.py: JointTransformerBlock) without the refiner of the text
# and without modulation, which musubi-tuner leaves out too (networks/lora_zimage.py: exclude_patterns).
NEXT_DIT = (
    "noise_refiner.*.attention.*",
    "noise_refiner.*.feed_forward.*",
    "layers.*.attention.*",
    "layers.*.feed_forward.*",
)

# Of every block, as sd-scripts has it (networks/lora_anima.py: ANIMA_TARGET_REPLACE_MODULE and exclude_patterns). The
# adapter of the text is left out, as diffusion-pipe advises for small datasets (docs/supported_models.md, Anima).
COSMOS_2 = ("blocks.*.self_attn.*", "blocks.*.cross_attn.*", "blocks.*.mlp.*")

# Attention and MLP of the double and single blocks without modulation, as musubi-tuner has it (networks/lora.py:
# HUNYUAN_TARGET_REPLACE_MODULES and exclude_patterns, networks/lora_hv_1_5.py); HunyuanVideo 1.5 has no single blocks.
DOUBLE_AND_SINGLE = (
    "double_blocks.*.img_attn.*",
    "double_blocks.*.txt_attn.*",
    "double_blocks.*.img_mlp.*",
    "double_blocks.*.txt_mlp.*",
    "single_blocks.*.linear1",
    "single_blocks.*.linear2",
)

# musubi-tuner, networks/lora_kandinsky.py: the decoder blocks of its list, which hold the picture.
KANDINSKY_5 = (
    "visual_transformer_blocks.*.self_attention.*",
    "visual_transformer_blocks.*.cross_attention.*",
    "visual_transformer_blocks.*.feed_forward.*",
)

WAN = ("blocks.*.self_attn.*", "blocks.*.cross_attn.*", "blocks.*.ffn.*")
