"""The named models of videos. Files, steps, cfg, sampler and scheduler are those of ComfyUI's workflow templates where
`template` names one; what comes from elsewhere has its source beside it."""

from .model_facts import ModelFacts, NamedRelease, PreviewDefaults

# Attention and MLP of the double and single blocks without modulation, as musubi-tuner has it (networks/lora.py:
# HUNYUAN_TARGET_REPLACE_MODULES and exclude_patterns, networks/lora_hv_1_5.py); HunyuanVideo 1.5 has no single blocks.
_HUNYUAN = (
    "double_blocks.*.img_attn.*",
    "double_blocks.*.txt_attn.*",
    "double_blocks.*.img_mlp.*",
    "double_blocks.*.txt_mlp.*",
    "single_blocks.*.linear1",
    "single_blocks.*.linear2",
)

VIDEOS = (
    ModelFacts(
        name="ltxv",
        title="LTX-Video",
        model_classes=("LTXV",),
        # diffusion-pipe, models/ltx_video.py: BasicTransformerBlock
        default_targets=("transformer_blocks.*.attn1.*", "transformer_blocks.*.attn2.*", "transformer_blocks.*.ff.*"),
        megapixels=0.39,  # 768 x 512, as the template starts
        encoders=("t5xxl_fp16.safetensors",),
        clip_type="ltxv",
        releases=(
            NamedRelease(
                title="LTX-Video",
                file="ltx-video-2b-v0.9.safetensors",
                checkpoint=True,
                template="ltxv_text_to_video",
                sampling=PreviewDefaults(30, 3.0, "euler", "simple"),
            ),
        ),
    ),
    ModelFacts(
        name="hunyuan-video",
        title="HunyuanVideo",
        model_classes=("HunyuanVideo", "HunyuanVideoI2V", "HunyuanVideoSkyreelsI2V"),
        default_targets=_HUNYUAN,
        guidance=1.0,  # musubi-tuner, hv_train_network.py: the default of guidance_scale
        megapixels=0.41,  # 848 x 480, as the template starts
        vae="hunyuan_video_vae_bf16.safetensors",
        encoders=("clip_l.safetensors", "llava_llama3_fp8_scaled.safetensors"),
        clip_type="hunyuan_video",
        releases=(
            NamedRelease(
                title="HunyuanVideo",
                file="hunyuan_video_t2v_720p_bf16.safetensors",
                template="hunyuan_video_text_to_video",
                sampling=PreviewDefaults(20, 1.0, "euler", "simple"),
            ),
        ),
        licence="Tencent Hunyuan Community License",
    ),
    ModelFacts(
        name="hunyuan-video-1.5",
        title="HunyuanVideo 1.5",
        model_classes=("HunyuanVideo15",),
        default_targets=_HUNYUAN,
        megapixels=0.92,  # 1280 x 720, as the template starts
        vae="hunyuanvideo15_vae_fp16.safetensors",
        encoders=("qwen_2.5_vl_7b_fp8_scaled.safetensors", "byt5_small_glyphxl_fp16.safetensors"),
        clip_type="hunyuan_video_15",
        releases=(
            NamedRelease(
                title="HunyuanVideo 1.5",
                file="hunyuanvideo1.5_720p_t2v_fp16.safetensors",
                template="video_hunyuan_video_1.5_720p_t2v",
                sampling=PreviewDefaults(20, 6.0, "euler", "simple"),
            ),
        ),
        licence="Tencent Hunyuan Community License",
    ),
)
