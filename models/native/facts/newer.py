"""Models newer than the ComfyUI that the tests run, from ComfyUI's workflow templates of October 2026
(comfyui-workflow-templates 0.11.97)."""

from dataclasses import replace

from ...family import UsualSettings
from .model_facts import ModelFacts, NamedRelease, PreviewDefaults
from .videos import LTX_2

# By class names in published sources.
NEWER = (
    ModelFacts(
        name="qwen-image-2.1",
        title="Qwen Image 2.1",
        model_classes=("QwenImage21",),  # comfy/ldm/qwen_image21/model.py, since ComfyUI 0.37
        # Attention and MLP of every block; all blocks share one modulation, outside of them.
        default_targets=("transformer_blocks.*.attn.*", "transformer_blocks.*.img_mlp.*"),
        vae="qwen_image_2.1_vae_bf16.safetensors",
        encoders=("qwen3vl_8b_int8_convrot.safetensors",),
        clip_type="qwen_image",
        usual=UsualSettings(learning_rate=5e-5, pictures_only=True),  # as Qwen-Image
        releases=(
            NamedRelease(
                title="Qwen Image 2.1",
                file="qwen_image_2.1_int8_convrot.safetensors",
                template="image_qwen_image_2_1_t2i",
                sampling=PreviewDefaults(25, 1.0, "euler", "simple"),
            ),
            NamedRelease(
                title="Qwen Image 2.1 Turbo",
                file="qwen_image_2.1_turbo_int8_convrot.safetensors",
                template="image_qwen_image_2_1_turbo_t2i",  # with its own eight sigmas
                sampling=PreviewDefaults(8, 1.0, "euler", "simple"),
                distilled=True,
            ),
        ),
    ),
    # LTX-2's class, and a marker on the tokens of the first frame (comfy/model_detection.py).
    replace(
        LTX_2,
        name="ltx-2.5",
        title="LTX-2.5",
        unet_config=(("use_keyframes_abs_pos_embedding", True),),
        megapixels=0.92,  # 1280 x 720, as the template starts
        vae="ltx-2.5-video-vae-bf16.safetensors",
        encoders=("gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors",),
        clip_type="ltxv",
        usual=UsualSettings(),  # file names of LTX-2 match it as well
        licence="licence on its download page",
        releases=(
            NamedRelease(
                title="LTX-2.5",
                file="ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors",
                template="video_ltx2_5_t2v",  # with its own eight sigmas, and an upscaler
                sampling=PreviewDefaults(8, 1.0, "euler_ancestral", "simple"),
                distilled=True,
            ),
        ),
    ),
)

# They train by rule, without a row: what their classes compute is in no package or published source, or nobody has
# named their layers. `model_classes` has the class of those whose name is published (comfy/supported_models.py).
BY_RULE = (
    ModelFacts(
        name="flux-3-klein",
        title="FLUX 3 Klein",
        model_classes=(),
        default_targets=(),
        vae="flux2-vae.safetensors",
        encoders=("qwen3vl_4b_int8_convrot.safetensors",),
        clip_type="flux3",
        releases=(
            NamedRelease(
                title="FLUX 3 Klein Base",
                file="flux3-image-klein-base-int8-convrot.safetensors",
                template="image_flux3_klein_t2i",
                sampling=PreviewDefaults(50, 3.5, "euler", "simple"),
            ),
            NamedRelease(
                title="FLUX 3 Klein",
                file="flux3-image-klein-int8-convrot.safetensors",
                template="image_flux3_klein_distilled_t2i",
                sampling=PreviewDefaults(16, 1.0, "euler", "simple"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="moss-image",
        title="MOSS Image",
        model_classes=(),
        default_targets=(),
        vae="flux2-vae_small.safetensors",
        encoders=("qwen3.5_9b_w4a8_gptq.safetensors",),
        clip_type="moss_image",
        releases=(
            NamedRelease(
                title="MOSS Image Base",
                file="moss_image_base_int8_convrot.safetensors",
                template="image_moss_image_base_t2i",
                sampling=PreviewDefaults(25, 2.5, "er_sde", "simple"),
            ),
            NamedRelease(
                title="MOSS Image",
                file="moss_image_sft_int8_convrot.safetensors",
                template="image_moss_image_t2i",
                sampling=PreviewDefaults(25, 2.5, "er_sde", "simple"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="fibo-2",
        title="Fibo 2.0",
        model_classes=(),
        default_targets=(),
        vae="flux2-vae.safetensors",
        encoders=("qwen3vl_4b_bf16.safetensors",),
        clip_type="fibo2",
        releases=(
            NamedRelease(
                title="Fibo 2.0 Dev",
                file="fibo2_dev_int8_convrot.safetensors",
                template="image_fibo2_edit_dev_pe",
                sampling=PreviewDefaults(50, 5.0, "euler", "simple"),
            ),
            NamedRelease(
                title="Fibo 2.0 Edit Turbo",
                file="fibo2_edit_turbo_int8_convrot.safetensors",
                template="image_fibo2_edit_turbo_pe",
                sampling=PreviewDefaults(4, 1.0, "euler", "simple"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="wan-animate-2",
        title="Wan-Animate 2",
        model_classes=("WAN_Animate2",),
        default_targets=(),
        megapixels=0.4,
        vae="Wan2_1_VAE_bf16.safetensors",
        encoders=("umt5_xxl_fp8_e4m3fn_scaled.safetensors",),
        clip_type="wan",
        releases=(
            NamedRelease(
                title="Wan-Animate 2",
                file="wan_animate_2_int8_convrot.safetensors",
                template="video_wan_animate2",  # with a LoRA that needs few steps
                sampling=PreviewDefaults(6, 1.0, "lcm", "simple"),
            ),
            NamedRelease(
                title="Wan-Animate 2 Distill",
                file="wan_animate_2_distill_int8_convrot.safetensors",
                template="video_wan_animate2_distilled",
                sampling=PreviewDefaults(10, 1.0, "lcm", "simple"),
                distilled=True,
            ),
        ),
    ),
    ModelFacts(
        name="ming-image",
        title="Ming Image",
        model_classes=("MingImage",),
        default_targets=(),
        megapixels=4.0,  # 2048 x 2048, as the template starts
        vae="ming_image_vae_bf16.safetensors",
        encoders=("ming_image_0.1_ling_mini_2.0_int8_convrot.safetensors",),
        clip_type="qwen_image",
        releases=(
            NamedRelease(
                title="Ming Image 0.1 Design",
                file="ming_image_0.1_design_int8_convrot.safetensors",
                template="image_ming_image_01_design_t2i",
                sampling=PreviewDefaults(12, 1.0, "euler", "simple"),
            ),
        ),
    ),
)
