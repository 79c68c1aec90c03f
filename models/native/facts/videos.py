"""The named models of videos. Files, steps, cfg, sampler and scheduler are those of ComfyUI's workflow templates if
`template` names one; other values cite their source."""

import math

from ...family import UsualSettings
from ...latents import LatentPolicy
from .model_facts import ModelFacts, NamedRelease, PreviewDefaults, Sound
from .patterns import DOUBLE_AND_SINGLE, KANDINSKY_5, WAN

_WAN_SAMPLING = PreviewDefaults(20, 6.0, "uni_pc", "simple")
WAN_CONDITIONED: tuple[tuple[str, str, str, tuple[NamedRelease, ...]], ...] = (
    (
        "wan-vace",
        "Wan VACE",
        "WAN21_Vace",
        (
            NamedRelease(
                title="Wan VACE",
                file="wan2.1_vace_14B_fp16.safetensors",
                template="video_wan_vace_flf2v",
                sampling=_WAN_SAMPLING,
            ),
        ),
    ),
    (
        "wan-camera",
        "Wan Fun Camera",
        "WAN21_Camera",
        (
            NamedRelease(
                title="Wan Fun Camera",
                file="wan2.1_fun_camera_v1.1_14B_bf16.safetensors",
                template="video_wan2.1_fun_camera_v1.1_14B",
                sampling=_WAN_SAMPLING,
            ),
        ),
    ),
    (
        "wan-s2v",
        "Wan S2V",
        "WAN22_S2V",
        (
            NamedRelease(
                title="Wan S2V",
                file="wan2.2_s2v_14B_fp8_scaled.safetensors",
                template="video_wan2_2_14B_s2v",
                sampling=PreviewDefaults(10, 6.0, "uni_pc", "simple"),
            ),
        ),
    ),
)


SILENT = "Pictures and clips train without their sound: the model hears noised silence, which is left out of the loss."


# Its latent format counts the sound's 32 channels. Frames as in its VAE (ComfyUI, comfy/sd.py): chunks of 17 become 5
# latent frames each, and the last 3 are dropped.
MINIMAX_LATENTS = LatentPolicy(
    "MiniMax H3",
    "minimax_h3_video_vae_fp16.safetensors",
    channels=24,
    pixels_per_latent=16,
    patch=2,
    frames_per_latent=4,
    frames_to_latent=lambda frames: max(1, (frames - 5) // 17 * 5 + 2),
    latent_to_frames=lambda latent: max(1, (latent - 2) // 5 * 17 + 5),
    whole_grids=True,
)


def _minimax_sound(frames: int, rate: float | None) -> tuple[int, ...]:
    """Return the sound shape: stereo at 40 latents per second for 24 pictures (ComfyUI,
    comfy_extras/nodes_minimax_h3.py, temporal_shape); of five latent frames the first holds one picture and the others
    four (comfy/ldm/minimax/model.py)."""
    pictures = sum(1 if index % 5 == 0 else 4 for index in range(frames))
    return 32, 2, round(pictures / 24 * 40)


def _minimax_sound_sigma(sigma: float) -> float:
    """Return the sound's sigma: its schedule is shifted by 3, the video's by 12 (comfy/ldm/minimax/model.py)."""
    base = sigma / (12.0 + sigma * (1.0 - 12.0))
    return 3.0 * base / (1.0 + (3.0 - 1.0) * base)


def _ltx_sound(frames: int, rate: float | None) -> tuple[int, ...]:
    """Return the sound shape: 25 latents per second of 16 bins (ComfyUI, LTXVEmptyLatentAudio); the default rate is 25
    pictures."""
    pictures = 8 * (frames - 1) + 1
    return 8, math.ceil(pictures / (rate or 25.0) * 25.0), 16


LTX_2 = ModelFacts(
    name="ltx-2",
    title="LTX-2",
    model_classes=("LTXAV",),
    # The picture's part of diffusion-pipe's BasicAVTransformerBlock (models/ltx2.py); sound is not trained.
    default_targets=("transformer_blocks.*.attn1.*", "transformer_blocks.*.attn2.*", "transformer_blocks.*.ff.*"),
    megapixels=0.39,  # 768 x 512, as the template starts
    encoders=("gemma_3_12B_it_fp4_mixed.safetensors",),
    # Lightricks/LTX-2, packages/ltx-trainer/configs
    usual=UsualSettings(file_names="(^|[^a-z])ltx[ _-]?2([^0-9b]|$)"),
    releases=(
        NamedRelease(
            title="LTX-2",
            file="ltx-2-19b-dev-fp8.safetensors",
            checkpoint=True,
            template="video_ltx2_t2v",
            sampling=PreviewDefaults(20, 4.0, "euler_ancestral", "simple"),
        ),
    ),
    licence="LTX-2 Community License",
    sound=Sound(_ltx_sound),
    notes=(SILENT,),
    # Gates between sound and picture depend on the highest noise level of the batch
    # (comfy/ldm/lightricks/av_model.py).
    batches=False,
)

VIDEOS = (
    ModelFacts(
        name="ltx-video",
        title="LTX-Video",
        model_classes=("LTXV",),
        # diffusion-pipe, models/ltx_video.py: BasicTransformerBlock
        default_targets=("transformer_blocks.*.attn1.*", "transformer_blocks.*.attn2.*", "transformer_blocks.*.ff.*"),
        megapixels=0.39,  # 768 x 512, as the template starts
        encoders=("t5xxl_fp16.safetensors",),
        clip_type="ltxv",
        # Lightricks/LTX-Video-Trainer, configs
        usual=UsualSettings(learning_rate=2e-4, file_names=r"(^|[^a-z])ltx(?![ _-]?2([^0-9b]|$))"),
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
        default_targets=DOUBLE_AND_SINGLE,
        guidance=1.0,  # musubi-tuner, hv_train_network.py: the default of guidance_scale
        megapixels=0.41,  # 848 x 480, as the template starts
        vae="hunyuan_video_vae_bf16.safetensors",
        encoders=("clip_l.safetensors", "llava_llama3_fp8_scaled.safetensors"),
        clip_type="hunyuan_video",
        # musubi-tuner, docs/hunyuan_video.md
        usual=UsualSettings(learning_rate=2e-4, file_names=r"hunyuan[ _-]?video(?![ _-]?1[._]?5)"),
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
        default_targets=DOUBLE_AND_SINGLE,
        megapixels=0.92,  # 1280 x 720, as the template starts
        vae="hunyuanvideo15_vae_fp16.safetensors",
        encoders=("qwen_2.5_vl_7b_fp8_scaled.safetensors", "byt5_small_glyphxl_fp16.safetensors"),
        clip_type="hunyuan_video_15",
        # musubi-tuner, docs/hunyuan_video_1_5.md
        usual=UsualSettings(file_names=r"hunyuan[ _-]?video[ _-]?1[._]?5"),
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
    ModelFacts(
        name="minimax-h3",
        title="MiniMax H3",
        model_classes=("MiniMaxH3",),
        # ai-toolkit, ui/src/app/jobs/new/options.tsx, minimax_h3: ignore_if_contains adaln_proj; without the text
        # refiner.
        default_targets=("blocks.*.attn.*", "blocks.*.mlp.*"),
        megapixels=1.03,  # 1344 x 768, as the template starts
        vae="minimax_h3_video_vae_fp16.safetensors",
        encoders=("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",),
        clip_type="minimax",
        usual=UsualSettings(file_names="minimax"),
        releases=(
            NamedRelease(
                title="MiniMax H3",
                file="minimax_h3_fl2va_pruned_int8_convrot.safetensors",
                template="video_minimax_h3_t2v",
                sampling=PreviewDefaults(20, 1.0, "res_multistep", "simple"),
                distilled=True,
                adapter="ostris/minimax_h3_training_adapter (minimax_h3_training_adapter_v1.safetensors)",
            ),
        ),
        licence="MiniMax H3 Community License Agreement",
        sound=Sound(_minimax_sound, _minimax_sound_sigma),
        latents=MINIMAX_LATENTS,
        notes=(SILENT,),
        batches=False,
    ),
    LTX_2,
    ModelFacts(
        name="kandinsky-5",
        title="Kandinsky 5 Video",
        model_classes=("Kandinsky5",),
        default_targets=KANDINSKY_5,
        megapixels=0.39,  # 768 x 512, as the template starts
        vae="hunyuan_video_vae_bf16.safetensors",
        encoders=("qwen_2.5_vl_7b_fp8_scaled.safetensors", "clip_l.safetensors"),
        clip_type="kandinsky5",
        # musubi-tuner, docs/kandinsky5.md
        usual=UsualSettings(file_names="kandinsky.*(video|[ti]2v)"),
        releases=(
            NamedRelease(
                title="Kandinsky 5 Video Lite",
                file="kandinsky5lite_t2v_sft_5s.safetensors",
                template="video_kandinsky5_t2v",
                sampling=PreviewDefaults(50, 5.0, "euler_ancestral", "beta"),
            ),
        ),
    ),
    *(
        # Wan's models with further conditioning, without the modules that read it (musubi-tuner, networks/lora_wan.py:
        # WanAttentionBlock).
        ModelFacts(
            name=name,
            title=title,
            model_classes=(model_class,),
            default_targets=WAN,
            megapixels=0.4,  # 832 x 480
            vae="wan_2.1_vae.safetensors",
            encoders=("umt5_xxl_fp8_e4m3fn_scaled.safetensors",),
            clip_type="wan",
            usual=UsualSettings(learning_rate=2e-4, prompt_tokens=512, cfg=5.0),  # musubi-tuner, docs/wan.md
            releases=releases,
        )
        for name, title, model_class, releases in WAN_CONDITIONED
    ),
)
