"""The named models of Stable Diffusion. Files, steps, cfg, sampler and scheduler are those of ComfyUI's workflow
templates."""

from dataclasses import replace

from ...family import UNET, UsualSettings
from .model_facts import ModelFacts, NamedRelease, PreviewDefaults

# Attention and MLP of the transformers in a UNet; proj_in and proj_out, which sd-scripts trains too (networks/lora.py,
# UNET_TARGET_REPLACE_MODULE), are projections.
_UNET = (
    "*.transformer_blocks.*.attn1.*",
    "*.transformer_blocks.*.attn2.*",
    "*.transformer_blocks.*.ff.*",
)

STABLE_DIFFUSION = (
    ModelFacts(
        name="sdxl",
        title="SDXL",
        model_classes=("SDXL",),
        default_targets=_UNET,
        # sd-scripts, docs/sdxl_train_network.md
        usual=replace(UNET, file_names="sd[ _-]?xl", pictures_only=True),
        releases=(
            NamedRelease(
                title="SDXL",
                file="sd_xl_base_1.0.safetensors",
                checkpoint=True,
                template="sdxl_simple_example",
                sampling=PreviewDefaults(25, 8.0, "euler", "normal"),
            ),
            NamedRelease(
                title="SDXL Turbo",
                file="sd_xl_turbo_1.0_fp16.safetensors",
                checkpoint=True,
                template="sdxlturbo_example",
                sampling=PreviewDefaults(1, 1.0, "euler_ancestral", "sgm_uniform"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="sd1.5",
        title="SD 1.5",
        model_classes=("BaseModel",),
        configs=("SD15",),
        default_targets=_UNET,
        megapixels=0.25,
        usual=replace(UNET, file_names="(^|[^a-z])(sd[ _-]?|v)1[._-]?[45]([^0-9]|$)", pictures_only=True),
        releases=(
            NamedRelease(
                title="SD 1.5",
                file="v1-5-pruned-emaonly-fp16.safetensors",
                checkpoint=True,
                template="default",
                sampling=PreviewDefaults(20, 8.0, "euler", "normal"),
            ),
        ),
    ),
    ModelFacts(
        name="sd3.5",
        title="SD 3.5",
        model_classes=("SD3",),
        # Attention and MLP of both streams, as in sd-scripts (networks/lora_sd3.py), without modulation. The last
        # block's text has no MLP; the medium model has two attentions.
        default_targets=(
            "joint_blocks.*.x_block.attn.*",
            "joint_blocks.*.x_block.attn2.*",
            "joint_blocks.*.x_block.mlp.*",
            "joint_blocks.*.context_block.attn.*",
            "joint_blocks.*.context_block.mlp.*",
        ),
        # sd-scripts, docs/sd3_train_network.md
        usual=UsualSettings(file_names="(^|[^a-z])sd[ _-]?3", pictures_only=True),
        releases=(
            NamedRelease(
                title="SD 3.5 Large",
                file="sd3.5_large_fp8_scaled.safetensors",
                checkpoint=True,
                template="sd3.5_simple_example",
                sampling=PreviewDefaults(20, 4.01, "euler", "sgm_uniform"),
            ),
        ),
        licence="Stability AI Community License",
    ),
)
