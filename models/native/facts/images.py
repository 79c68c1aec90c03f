"""The named models of pictures. Files, steps, cfg, sampler and scheduler are those of ComfyUI's workflow templates if
`template` names one; other values cite their source."""

from ...family import UsualSettings
from .model_facts import ModelFacts, NamedRelease, PreviewDefaults
from .patterns import COSMOS_2, DOUBLE_AND_SINGLE, KANDINSKY_5, NEXT_DIT

IMAGES = (
    ModelFacts(
        name="z-image",
        title="Z-Image",
        model_classes=("Lumina2",),
        configs=("ZImage",),
        default_targets=NEXT_DIT,
        vae="ae.safetensors",
        encoders=("qwen_3_4b.safetensors",),
        clip_type="lumina2",
        usual=UsualSettings(file_names="z[ _-]?image", pictures_only=True),  # musubi-tuner, docs/zimage.md
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
        name="krea-2",
        title="Krea 2",
        model_classes=("Krea2",),
        # Attention and MLP of the blocks, without the text fusion, which musubi-tuner trains too
        # (networks/lora_krea2.py).
        default_targets=("blocks.*.attn.*", "blocks.*.mlp.*"),
        # The shift of the raw model's sampler at 1024 x 1024 (musubi-tuner, docs/krea2.md); ComfyUI's class has
        # Turbo's.
        shift=2.5,
        vae="qwen_image_vae.safetensors",
        encoders=("qwen3vl_4b_fp8_scaled.safetensors",),
        clip_type="krea2",
        usual=UsualSettings(file_names="krea", pictures_only=True),  # musubi-tuner, docs/krea2.md
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
        default_targets=COSMOS_2,
        vae="qwen_image_vae.safetensors",
        encoders=("qwen_3_06b_base.safetensors",),
        clip_type="stable_diffusion",
        # sd-scripts, docs/anima_train_network.md
        usual=UsualSettings(file_names="(^|[^a-z])anima([^a-z]|$)", pictures_only=True),
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
        name="lumina-2",
        title="Lumina 2",
        model_classes=("Lumina2",),
        configs=("Lumina2",),
        default_targets=NEXT_DIT,
        usual=UsualSettings(pictures_only=True),
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
        # diffusion-pipe trains every OmniGen2TransformerBlock (models/omnigen2.py); the noisy latent does not pass
        # through the refiners of text and reference pictures.
        default_targets=(
            "noise_refiner.*.attn.*",
            "noise_refiner.*.feed_forward.*",
            "layers.*.attn.*",
            "layers.*.feed_forward.*",
        ),
        vae="ae.safetensors",
        encoders=("qwen_2.5_vl_fp16.safetensors",),
        clip_type="omnigen2",
        usual=UsualSettings(pictures_only=True),
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
        # Without the routed experts, as in ai-toolkit (ui/src/app/jobs/new/options.tsx, hidream: ignore_if_contains): a
        # token is routed to two of them.
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
        # ai-toolkit, config/examples/train_lora_hidream_48.yaml
        usual=UsualSettings(learning_rate=2e-4, file_names="hidream", pictures_only=True),
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
        # Without the modulation approximator and the pixel decoder.
        default_targets=DOUBLE_AND_SINGLE,
        shift=1.0,  # ModelSamplingAuraFlow in the template; ComfyUI's class has FLUX's
        encoders=("t5xxl_fp8_e4m3fn_scaled.safetensors",),
        clip_type="chroma",
        usual=UsualSettings(pictures_only=True),
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
    ModelFacts(
        name="cosmos-predict2",
        title="Cosmos Predict2",
        model_classes=("CosmosPredict2",),
        default_targets=COSMOS_2,
        vae="wan_2.1_vae.safetensors",
        encoders=("oldt5_xxl_fp8_e4m3fn_scaled.safetensors",),
        clip_type="cosmos",
        releases=(
            # Comfy-Org/workflow_templates, templates/image_cosmos_predict2_2B_t2i.json; no longer in the package.
            NamedRelease(
                title="Cosmos Predict2",
                file="cosmos_predict2_2B_t2i.safetensors",
                sampling=PreviewDefaults(35, 4.0, "euler", "karras"),
            ),
        ),
        licence="NVIDIA Open Model License",
    ),
    ModelFacts(
        name="hunyuan-image",
        title="HunyuanImage 2.1",
        model_classes=("HunyuanImage21",),
        # sd-scripts, networks/lora_hunyuan_image.py, without modulation
        default_targets=DOUBLE_AND_SINGLE,
        megapixels=4.0,  # 2048 x 2048
        vae="hunyuan_image_2.1_vae_fp16.safetensors",
        encoders=("qwen_2.5_vl_7b_fp8_scaled.safetensors", "byt5_small_glyphxl_fp16.safetensors"),
        clip_type="hunyuan_image",
        usual=UsualSettings(pictures_only=True),
        releases=(
            # Files of Comfy-Org/Hunyuan-Image-2.1; steps and cfg of sd-scripts, docs/hunyuan_image_train_network.md.
            NamedRelease(
                title="HunyuanImage 2.1",
                file="hunyuanimage2.1_bf16.safetensors",
                sampling=PreviewDefaults(50, 3.5, "euler", "simple"),
            ),
            NamedRelease(
                title="HunyuanImage 2.1 Distilled",
                file="hunyuanimage2.1_distilled_bf16.safetensors",
                sampling=PreviewDefaults(8, 1.5, "euler", "simple"),  # drbaph/HunyuanImage-2.1_fp8, README.md
                distilled=True,
            ),
        ),
        licence="Tencent Hunyuan Community License",
    ),
    ModelFacts(
        name="kandinsky-5-image",
        title="Kandinsky 5 Image",
        model_classes=("Kandinsky5Image",),
        default_targets=KANDINSKY_5,
        vae="ae.safetensors",
        encoders=("qwen_2.5_vl_7b_fp8_scaled.safetensors", "clip_l.safetensors"),
        clip_type="kandinsky5_image",
        usual=UsualSettings(pictures_only=True),
        releases=(
            NamedRelease(
                title="Kandinsky 5 Image Lite",
                file="kandinsky5lite_t2i.safetensors",
                template="image_kandinsky5_t2i",
                sampling=PreviewDefaults(50, 3.5, "euler", "simple"),
            ),
        ),
    ),
    ModelFacts(
        name="ernie-image",
        title="ERNIE-Image",
        model_classes=("ErnieImage",),
        # diffusion-pipe, models/ernie_image.py: ErnieImageSharedAdaLNBlock
        default_targets=("layers.*.self_attention.*", "layers.*.mlp.*"),
        vae="flux2-vae.safetensors",
        encoders=("ministral-3-3b.safetensors",),
        clip_type="flux2",
        usual=UsualSettings(pictures_only=True),
        releases=(
            NamedRelease(
                title="ERNIE-Image",
                file="ernie-image.safetensors",
                template="image_ernie_image",
                sampling=PreviewDefaults(20, 4.0, "euler", "simple"),
            ),
            NamedRelease(
                title="ERNIE-Image Turbo",
                file="ernie-image-turbo.safetensors",
                template="image_ernie_image_turbo",
                sampling=PreviewDefaults(8, 1.0, "euler", "simple"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="longcat",
        title="LongCat-Image",
        model_classes=("LongCatImage",),
        default_targets=DOUBLE_AND_SINGLE,
        vae="ae.safetensors",
        encoders=("qwen_2.5_vl_7b_fp8_scaled.safetensors",),
        clip_type="longcat_image",
        usual=UsualSettings(pictures_only=True),
        releases=(
            NamedRelease(
                title="LongCat-Image",
                file="longcat_image_bf16.safetensors",
                template="image_longcat_text_to_image",
                sampling=PreviewDefaults(20, 4.0, "euler", "simple"),
            ),
        ),
    ),
    ModelFacts(
        name="ideogram-4",
        title="Ideogram 4",
        model_classes=("Ideogram4",),
        # musubi-tuner, networks/lora_ideogram4.py: IDEOGRAM4_TARGET_REPLACE_MODULES and exclude_patterns
        default_targets=("layers.*.attention.*", "layers.*.feed_forward.*"),
        vae="flux2-vae.safetensors",
        encoders=("qwen3vl_8b_fp8_scaled.safetensors",),
        clip_type="ideogram4",
        usual=UsualSettings(pictures_only=True),
        releases=(
            NamedRelease(
                title="Ideogram 4",
                file="ideogram4_fp8_scaled.safetensors",
                template="image_ideogram4_t2i",
                sampling=PreviewDefaults(20, 7.0, "euler", "simple"),
            ),
        ),
        licence="Ideogram Non-Commercial Model Agreement",
    ),
)
