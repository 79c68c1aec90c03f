"""The named models of pictures. Files, steps, cfg, sampler and scheduler are those of ComfyUI's workflow templates
where `template` names one; what comes from elsewhere has its source beside it."""

from .model_facts import ModelFacts, NamedRelease, PreviewDefaults

# Attention and MLP of the transformers in a UNet; proj_in and proj_out, which sd-scripts trains too (networks/lora.py,
# UNET_TARGET_REPLACE_MODULE), are projections.
_UNET = (
    "*.transformer_blocks.*.attn1.*",
    "*.transformer_blocks.*.attn2.*",
    "*.transformer_blocks.*.ff.*",
)

# What diffusion-pipe trains (models/lumina_2.py and z_image.py: JointTransformerBlock) without the refiner of the text
# and without modulation, which musubi-tuner leaves out too (networks/lora_zimage.py: exclude_patterns).
_NEXT_DIT = (
    "noise_refiner.*.attention.*",
    "noise_refiner.*.feed_forward.*",
    "layers.*.attention.*",
    "layers.*.feed_forward.*",
)

# Of every block, as sd-scripts has it (networks/lora_anima.py: ANIMA_TARGET_REPLACE_MODULE and exclude_patterns). The
# adapter of the text is left out, as diffusion-pipe advises for small datasets (docs/supported_models.md, Anima).
_COSMOS_2 = ("blocks.*.self_attn.*", "blocks.*.cross_attn.*", "blocks.*.mlp.*")

IMAGES = (
    ModelFacts(
        name="z-image",
        title="Z-Image",
        model_classes=("Lumina2",),
        configs=("ZImage",),
        default_targets=_NEXT_DIT,
        vae="ae.safetensors",
        encoders=("qwen_3_4b.safetensors",),
        clip_type="lumina2",
        releases=(
            NamedRelease(
                title="Z-Image",
                file="z_image_bf16.safetensors",
                template="image_z_image",
                sampling=PreviewDefaults(25, 4.0, "res_multistep", "simple"),
            ),
            NamedRelease(
                title="Z-Image-Turbo",
                file="z_image_turbo_bf16.safetensors",
                template="image_z_image_turbo",
                sampling=PreviewDefaults(8, 1.0, "res_multistep", "simple"),
                distilled=True,
                # ai-toolkit, ui/src/app/jobs/new/options.tsx, zimage:turbo; musubi-tuner, docs/zimage.md
                adapter="ostris/zimage_turbo_training_adapter (zimage_turbo_training_adapter_v2.safetensors)",
            ),
        ),
    ),
    ModelFacts(
        name="krea2",
        title="Krea 2",
        model_classes=("Krea2",),
        # Attention and MLP of the blocks, without the fusion of the text, which musubi-tuner trains too
        # (networks/lora_krea2.py).
        default_targets=("blocks.*.attn.*", "blocks.*.mlp.*"),
        # Of the raw model's sampler at 1024 x 1024 (musubi-tuner, docs/krea2.md); ComfyUI's class has Turbo's.
        shift=2.5,
        vae="qwen_image_vae.safetensors",
        encoders=("qwen3vl_4b_fp8_scaled.safetensors",),
        clip_type="krea2",
        releases=(
            NamedRelease(
                title="Krea 2 Raw",
                file="krea2_raw_fp8_scaled.safetensors",  # Comfy-Org/Krea-2, diffusion_models
                sampling=PreviewDefaults(28, 5.5, "euler", "simple"),  # musubi-tuner, docs/krea2.md, inference on RAW
            ),
            NamedRelease(
                title="Krea 2 Turbo",
                file="krea2_turbo_fp8_scaled.safetensors",
                template="image_krea2_turbo_t2i",
                sampling=PreviewDefaults(8, 1.0, "euler", "simple"),
                distilled=True,
                # ai-toolkit, ui/src/app/jobs/new/options.tsx, krea2:turbo
                adapter="ostris/krea2_turbo_training_adapter (krea2_turbo_training_adapter_v1.safetensors)",
            ),
        ),
        licence="Krea 2 Community License",  # krea-ai/krea-2, docs/KREA-2-COMMUNITY-LICENSE
    ),
    ModelFacts(
        name="anima",
        title="Anima",
        model_classes=("Anima",),
        default_targets=_COSMOS_2,
        vae="qwen_image_vae.safetensors",
        encoders=("qwen_3_06b_base.safetensors",),
        clip_type="stable_diffusion",
        releases=(
            NamedRelease(
                title="Anima",
                file="anima-base-v1.0.safetensors",
                template="image_anima_base_v1",
                sampling=PreviewDefaults(30, 4.0, "euler", "simple"),
            ),
        ),
        licence="CircleStone Labs Non-Commercial License",  # circlestone-labs/Anima, LICENSE.md
    ),
    ModelFacts(
        name="sdxl",
        title="SDXL",
        model_classes=("SDXL",),
        default_targets=_UNET,
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
        name="sd15",
        title="SD 1.5",
        model_classes=("BaseModel",),
        configs=("SD15",),
        default_targets=_UNET,
        megapixels=0.25,
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
        name="sd3",
        title="SD 3.5",
        model_classes=("SD3",),
        # Attention and MLP of both streams, as sd-scripts has them (networks/lora_sd3.py), without modulation. The last
        # block's text has no MLP; the medium model attends twice.
        default_targets=(
            "joint_blocks.*.x_block.attn.*",
            "joint_blocks.*.x_block.attn2.*",
            "joint_blocks.*.x_block.mlp.*",
            "joint_blocks.*.context_block.attn.*",
            "joint_blocks.*.context_block.mlp.*",
        ),
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
    ModelFacts(
        name="lumina2",
        title="Lumina 2",
        model_classes=("Lumina2",),
        configs=("Lumina2",),
        default_targets=_NEXT_DIT,
        releases=(
            NamedRelease(
                title="NetaYume Lumina",
                file="NetaYumev35_pretrained_all_in_one.safetensors",
                checkpoint=True,
                template="image_netayume_lumina_t2i",
                sampling=PreviewDefaults(30, 4.0, "res_multistep", "simple"),
            ),
        ),
    ),
    ModelFacts(
        name="omnigen2",
        title="Omnigen2",
        model_classes=("Omnigen2",),
        # diffusion-pipe trains every OmniGen2TransformerBlock (models/omnigen2.py); the refiners of text and reference
        # pictures are not in the way of the noisy latent.
        default_targets=(
            "noise_refiner.*.attn.*",
            "noise_refiner.*.feed_forward.*",
            "layers.*.attn.*",
            "layers.*.feed_forward.*",
        ),
        vae="ae.safetensors",
        encoders=("qwen_2.5_vl_fp16.safetensors",),
        clip_type="omnigen2",
        releases=(
            NamedRelease(
                title="Omnigen2",
                file="omnigen2_fp16.safetensors",
                template="image_omnigen2_t2i",
                sampling=PreviewDefaults(20, 5.0, "euler", "simple"),
            ),
        ),
    ),
    ModelFacts(
        name="hidream",
        title="HiDream",
        model_classes=("HiDream",),
        # Without the routed experts, as ai-toolkit has it (ui/src/app/jobs/new/options.tsx, hidream:
        # ignore_if_contains): a token meets two of them.
        default_targets=(
            "double_stream_blocks.*.attn1.*",
            "double_stream_blocks.*.ff_i.shared_experts.*",
            "double_stream_blocks.*.ff_t.*",
            "single_stream_blocks.*.attn1.*",
            "single_stream_blocks.*.ff_i.shared_experts.*",
        ),
        vae="ae.safetensors",
        encoders=(
            "clip_l_hidream.safetensors",
            "clip_g_hidream.safetensors",
            "t5xxl_fp8_e4m3fn_scaled.safetensors",
            "llama_3.1_8b_instruct_fp8_scaled.safetensors",
        ),
        releases=(
            NamedRelease(
                title="HiDream I1 Full",
                file="hidream_i1_full_fp8.safetensors",
                template="hidream_i1_full",
                sampling=PreviewDefaults(50, 5.0, "uni_pc", "simple"),
            ),
            NamedRelease(
                title="HiDream I1 Dev",
                file="hidream_i1_dev_fp8.safetensors",
                template="hidream_i1_dev",
                sampling=PreviewDefaults(28, 1.0, "lcm", "normal"),
                distilled=True,
            ),
            NamedRelease(
                title="HiDream I1 Fast",
                file="hidream_i1_fast_fp8.safetensors",
                template="hidream_i1_fast",
                sampling=PreviewDefaults(16, 1.0, "lcm", "normal"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="chroma-radiance",
        title="Chroma Radiance",
        model_classes=("ChromaRadiance",),
        # Of Chroma's blocks, without the approximator of their modulation and the pixel decoder.
        default_targets=(
            "double_blocks.*.img_attn.*",
            "double_blocks.*.txt_attn.*",
            "double_blocks.*.img_mlp.*",
            "double_blocks.*.txt_mlp.*",
            "single_blocks.*.linear1",
            "single_blocks.*.linear2",
        ),
        shift=1.0,  # ModelSamplingAuraFlow in the template; ComfyUI's class has FLUX's
        encoders=("t5xxl_fp8_e4m3fn_scaled.safetensors",),
        clip_type="chroma",
        releases=(
            NamedRelease(
                title="Chroma Radiance",
                file="chroma-radiance-x0.safetensors",
                template="image_chroma1_radiance_text_to_image",
                sampling=PreviewDefaults(30, 3.5, "euler", "beta"),
            ),
        ),
        notes=("Chroma Radiance works on pixels: choose `pixel_space` in Load VAE.",),
    ),
)
