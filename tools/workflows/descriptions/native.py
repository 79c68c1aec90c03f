"""The workflows of models that train with ComfyUI's own forward. Files, sampler, steps and cfg are those of ComfyUI's
own workflow templates, which tests/pure/workflows/test_native_workflows.py compares."""

from graph import Graph, ModelFile, Node, Output
from parts import (
    LORA_TALL,
    NARROW,
    clips,
    hub_file,
    ksampler,
    load,
    picture,
    pictures,
    preview,
    prompts,
    train,
    training_note,
    video,
)

PROMPT = "a photograph of a fox in a misty forest at sunrise"
CLIP_PROMPT = "a fox runs through deep snow between pine trees"


def _hub(owner: str, path: str, directory: str) -> ModelFile:
    return ModelFile(f"https://huggingface.co/{owner}/{path}", directory)


def _checkpoint(graph: Graph, file: ModelFile) -> Node:
    return graph.node("CheckpointLoaderSimple", files=[file], ckpt_name=file.name)


def _sample_custom(
    graph: Graph, model: Output, conditionings: Node, sigmas: Output, latent: Output, cfg: float, sampler: str = "euler"
) -> Node:
    """Add a sampler that goes down the given sigmas. conditionings: node with the positive and the negative
    conditioning."""
    selected = graph.node("KSamplerSelect", sampler_name=sampler)
    graph.beside(NARROW)
    return graph.node(
        "SamplerCustom",
        model=model,
        positive=conditionings[0],
        negative=conditionings[1],
        sampler=selected[0],
        sigmas=sigmas,
        latent_image=latent,
        cfg=cfg,
    )


def _ltx_with_sound(  # noqa: PLR0913
    graph: Graph, model: Output, vae: Output, sound_vae: Output, conditionings: Node, sampler: str, fps: int, name: str
) -> None:
    """Sample a clip with sound in the eight steps of LTX-2.3 and LTX-2.5, distilled, and save it."""
    video_latent = graph.node("EmptyLTXVLatentVideo", width=768, height=512, length=97)
    sound_latent = graph.node("LTXVEmptyLatentAudio", audio_vae=sound_vae, frames_number=97, frame_rate=fps)
    latent = graph.node("LTXVConcatAVLatent", video_latent=video_latent[0], audio_latent=sound_latent[0])
    steps = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
    sigmas = graph.node("ManualSigmas", sigmas=steps)
    sampled = _sample_custom(graph, model, conditionings, sigmas[0], latent[0], cfg=1, sampler=sampler)
    parts = graph.node("LTXVSeparateAVLatent", av_latent=sampled[0])
    sound = graph.node("LTXVAudioVAEDecode", samples=parts[1], audio_vae=sound_vae)
    video(graph, parts[0], vae, name, fps, audio=sound[0])


def z_image_lora(graph: Graph) -> None:
    base, turbo = "z_image/resolve/main/split_files", "z_image_turbo/resolve/main/split_files"
    model_file = hub_file(f"{base}/diffusion_models/z_image_bf16.safetensors", "diffusion_models")
    clip_file = hub_file(f"{turbo}/text_encoders/qwen_3_4b.safetensors", "text_encoders")
    vae_file = hub_file(f"{turbo}/vae/ae.safetensors", "vae")
    hint = "The LoRA works on Z-Image-Turbo too: load that to sample, with 8 **steps** and **cfg** 1."
    training_note(graph, [model_file, clip_file, vae_file], hint)
    model, clip, vae = load(graph, model_file, "lumina2", [clip_file], vae_file)
    data = pictures(graph, vae[0], clip[0])
    positive, negative = prompts(graph, clip[0], PROMPT, "blurry, low quality")
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=4, sampler_name="res_multistep")
    trained = train(graph, "my_z_image_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=3)
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=25, cfg=4, sampler="res_multistep")
    picture(graph, sampled[0], vae[0], "my_z_image_lora")


def qwen_image21_lora(graph: Graph) -> None:
    files = "Qwen-Image-2.1/resolve/main"
    model_file = hub_file(f"{files}/diffusion_models/qwen_image_2.1_int8_convrot.safetensors", "diffusion_models")
    clip_file = hub_file(f"{files}/text_encoders/qwen3vl_8b_int8_convrot.safetensors", "text_encoders")
    vae_file = hub_file(f"{files}/vae/qwen_image_2.1_vae_bf16.safetensors", "vae")
    hint = "Qwen Image 2.1 needs ComfyUI 0.37 or newer. Tessera was not tried on the real model."
    training_note(graph, [model_file, clip_file, vae_file], hint)
    model, clip, vae = load(graph, model_file, "qwen_image", [clip_file], vae_file)
    data = pictures(graph, vae[0], clip[0])
    positive, negative = prompts(graph, clip[0], PROMPT)
    options = preview(graph, vae[0], positive[0])
    trained = train(graph, "my_qwen_image21_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=25, cfg=1)
    picture(graph, sampled[0], vae[0], "my_qwen_image21_lora")


def flux3_klein_lora(graph: Graph) -> None:
    owner, files = "black-forest-labs", "flux-3-image-klein-comfy/resolve/main"
    model_file, clip_file, vae_file = (
        _hub(owner, f"{files}/{directory}/{name}.safetensors", directory)
        for directory, name in (
            ("diffusion_models", "flux3-image-klein-base-int8-convrot"),
            ("text_encoders", "qwen3vl_4b_int8_convrot"),
            ("vae", "flux2-vae"),
        )
    )
    hint = (
        "FLUX 3 Klein needs a ComfyUI whose *Load CLIP* has the **type** `flux3`. Tessera was not tried on the model: "
        "it is checked before the first step, and the run ends there if it can't be trained."
    )
    training_note(graph, [model_file, clip_file, vae_file], hint)
    model, clip, vae = load(graph, model_file, "flux3", [clip_file], vae_file)
    data = pictures(graph, vae[0], clip[0])
    positive, negative = prompts(graph, clip[0], PROMPT)
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=3.5)
    trained = train(graph, "my_flux3_klein_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyFlux2LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=50, cfg=3.5)
    picture(graph, sampled[0], vae[0], "my_flux3_klein_lora")


def krea2_lora(graph: Graph) -> None:
    raw_file, turbo_file = (
        hub_file(f"Krea-2/resolve/main/diffusion_models/krea2_{name}_fp8_scaled.safetensors", "diffusion_models")
        for name in ("raw", "turbo")
    )
    clip_file = hub_file("Krea-2/resolve/main/text_encoders/qwen3vl_4b_fp8_scaled.safetensors", "text_encoders")
    vae_file = hub_file("Krea-2/resolve/main/vae/qwen_image_vae.safetensors", "vae")
    hint = "Krea 2 is trained on **Raw** and sampled on **Turbo**, as its makers advise."
    training_note(graph, [raw_file, turbo_file, clip_file, vae_file], hint)
    model, clip, vae = load(graph, raw_file, "krea2", [clip_file], vae_file, title="Krea 2 Raw, to train on")
    data = pictures(graph, vae[0], clip[0])
    positive, negative = prompts(graph, clip[0], PROMPT)
    turbo = graph.node(
        "UNETLoader", title="Krea 2 Turbo, to sample with", files=[turbo_file], unet_name=turbo_file.name
    )
    options = preview(graph, vae[0], positive[0], steps=8, model=turbo[0])
    trained = train(graph, "my_krea2_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=turbo[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=8, cfg=1)
    picture(graph, sampled[0], vae[0], "my_krea2_lora")


def anima_lora(graph: Graph) -> None:
    owner, files = "circlestone-labs/Anima", "resolve/main/split_files"
    model_file = _hub(owner, f"{files}/diffusion_models/anima-base-v1.0.safetensors", "diffusion_models")
    clip_file = _hub(owner, f"{files}/text_encoders/qwen_3_06b_base.safetensors", "text_encoders")
    vae_file = _hub(owner, f"{files}/vae/qwen_image_vae.safetensors", "vae")
    training_note(graph, [model_file, clip_file, vae_file], "Captions may be tags or sentences.")
    model, clip, vae = load(graph, model_file, "stable_diffusion", [clip_file], vae_file)
    data = pictures(graph, vae[0], clip[0])
    tags = "1girl, solo, fox ears, misty forest, sunrise"
    positive, negative = prompts(graph, clip[0], tags, "worst quality, low quality")
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=4)
    trained = train(graph, "my_anima_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=30, cfg=4)
    picture(graph, sampled[0], vae[0], "my_anima_lora")


def sdxl_lora(graph: Graph) -> None:
    file = _hub("stabilityai", "stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors", "checkpoints")
    training_note(graph, [file], "Fine-tunes such as Illustrious and Pony load the same way.")
    loaded = _checkpoint(graph, file)
    data = pictures(graph, loaded[2], loaded[1])
    positive, negative = prompts(graph, loaded[1], PROMPT, "blurry, low quality")
    options = preview(graph, loaded[2], positive[0], negative=negative[0], cfg=8, scheduler="normal")
    trained = train(graph, "my_sdxl_lora", loaded[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=loaded[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=25, cfg=8, scheduler="normal")
    picture(graph, sampled[0], loaded[2], "my_sdxl_lora")


def hunyuan_video15_lora(graph: Graph) -> None:
    files = "HunyuanVideo_1.5_repackaged/resolve/main/split_files"
    model_file = hub_file(f"{files}/diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors", "diffusion_models")
    clip_files = [
        hub_file(f"{files}/text_encoders/{name}.safetensors", "text_encoders")
        for name in ("qwen_2.5_vl_7b_fp8_scaled", "byt5_small_glyphxl_fp16")
    ]
    vae_file = hub_file(f"{files}/vae/hunyuanvideo15_vae_fp16.safetensors", "vae")
    hint = (
        "**target_frames**: frames per clip, 17, 33, 49 …. What a caption puts in double quotes is "
        "text that the clip shows."
    )
    training_note(graph, [model_file, *clip_files, vae_file], hint, "my_clips", "your clips")
    model, clip, vae = load(graph, model_file, "hunyuan_video_15", clip_files, vae_file)
    data = clips(graph, vae[0], clip[0], "17, 33", 24)
    positive, negative = prompts(graph, clip[0], CLIP_PROMPT)
    small = {"width": 480, "height": 272, "frames": 17, "fps": 24}
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=6, **small)
    trained = train(graph, "my_hunyuan_video_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyHunyuanVideo15Latent", width=1280, height=720, length=33)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingSD3", model=with_lora[0], shift=7)
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=20, cfg=6)
    graph.beside(NARROW)
    video(graph, sampled[0], vae[0], "my_hunyuan_video_lora", 24)


def minimax_h3_lora(graph: Graph) -> None:
    model_file, clip_file, vae_file = (
        hub_file(f"MiniMax-H3/resolve/main/{directory}/{name}.safetensors", directory)
        for directory, name in (
            ("diffusion_models", "minimax_h3_fl2va_pruned_int8_convrot"),
            ("text_encoders", "qwen3vl_32b_minimax_h3_nvfp4_awq"),
            ("vae", "minimax_h3_video_vae_fp16"),
        )
    )
    sound_file = hub_file("MiniMax-H3/resolve/main/vae/minimax_h3_audio_vae_fp32.safetensors", "vae")
    adapter = "minimax_h3_training_adapter/resolve/main/minimax_h3_training_adapter_v1.safetensors"
    adapter_file = _hub("ostris", adapter, "loras")
    hint = (
        "**target_frames**: frames per clip, 22, 39, 56 …. The sound isn't trained. H3 is "
        "distilled; its training adapter is used while training only, so that the LoRA works on it as it is."
    )
    files = [model_file, clip_file, vae_file, sound_file, adapter_file]
    training_note(graph, files, hint, "my_clips", "your clips")
    model, clip, vae = load(graph, model_file, "minimax", [clip_file], vae_file)
    data = clips(graph, vae[0], clip[0], "22, 39", 24)
    positive, negative = prompts(graph, clip[0], CLIP_PROMPT)
    small = {"width": 480, "height": 288, "frames": 22, "fps": 24}
    options = preview(graph, vae[0], positive[0], sampler_name="res_multistep", **small)
    trained = train(graph, "my_minimax_h3_lora", model[0], data, adapter=adapter_file, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyMiniMaxH3LatentAV", width=1344, height=768, length=73)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=20, cfg=1, sampler="res_multistep")
    graph.beside(NARROW)
    sound_vae = graph.node("VAELoader", title="Load VAE of the sound", files=[sound_file], vae_name=sound_file.name)
    sound = graph.node("VAEDecodeAudio", samples=sampled[0], vae=sound_vae[0])
    video(graph, sampled[0], vae[0], "my_minimax_h3_lora", 24, audio=sound[0])


def ltx_video_lora(graph: Graph) -> None:
    file = _hub("Lightricks", "LTX-Video/resolve/main/ltx-video-2b-v0.9.safetensors", "checkpoints")
    clip_file = _hub("comfyanonymous", "flux_text_encoders/resolve/main/t5xxl_fp16.safetensors", "text_encoders")
    hint = (
        "**target_frames**: frames per clip, 17, 25, 33 …. Give *LTXVConditioning* the **fps** of "
        "your clips. Later LTX-Video files load the same way."
    )
    training_note(graph, [file, clip_file], hint, "my_clips", "your clips")
    loaded = _checkpoint(graph, file)
    clip = graph.node("CLIPLoader", files=[clip_file], clip_name=clip_file.name, type="ltxv")
    data = clips(graph, loaded[2], clip[0], "25, 49", 25)
    worst = "low quality, worst quality, deformed, distorted, disfigured, motion smear, motion artifacts"
    positive, negative = prompts(graph, clip[0], CLIP_PROMPT, worst)
    conditionings = graph.node("LTXVConditioning", positive=positive[0], negative=negative[0], frame_rate=25)
    small = {"width": 480, "height": 288, "frames": 25, "fps": 25}
    options = preview(graph, loaded[2], conditionings[0], negative=conditionings[1], cfg=3, **small)
    trained = train(graph, "my_ltx_video_lora", loaded[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyLTXVLatentVideo", width=768, height=512, length=97)
    sigmas = graph.node("LTXVScheduler", tall=200, latent=latent[0], steps=30)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=loaded[0], lora=trained[0])
    sampled = _sample_custom(graph, with_lora[0], conditionings, sigmas[0], latent[0], cfg=3)
    video(graph, sampled[0], loaded[2], "my_ltx_video_lora", 25)


def ltx2_3_lora(graph: Graph) -> None:
    file = _hub("Lightricks", "LTX-2.3-fp8/resolve/main/ltx-2.3-22b-dev-fp8.safetensors", "checkpoints")
    split = "resolve/main/split_files"
    clip_file = hub_file(f"ltx-2/{split}/text_encoders/gemma_3_12B_it_fp4_mixed.safetensors", "text_encoders")
    fast = "ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors"
    fast_file = hub_file(f"ltx-2.3/{split}/loras/{fast}", "loras")
    hint = (
        "**target_frames**: frames per clip, 17, 25, 33 …. The sound of your clips isn't used: the "
        "model hears silence while it trains. Trained on dev, sampled in 8 **steps** with the distilled LoRA. Have 16 "
        "GB on the card and 64 GB in the computer (calculated, not measured)."
    )
    training_note(graph, [file, clip_file, fast_file], hint, "my_clips", "your clips")
    loaded = _checkpoint(graph, file)
    clip = graph.node(
        "LTXAVTextEncoderLoader", files=[clip_file, file], text_encoder=clip_file.name, ckpt_name=file.name
    )
    sampled_on = graph.node(
        "LoraLoaderModelOnly",
        title="Distilled LoRA, to sample with",
        files=[fast_file],
        model=loaded[0],
        lora_name=fast_file.name,
        strength_model=0.5,
    )
    sound_vae = graph.node("LTXVAudioVAELoader", files=[file], ckpt_name=file.name)
    data = clips(graph, loaded[2], clip[0], "25, 49", 25)
    positive, negative = prompts(
        graph, clip[0], CLIP_PROMPT, "pc game, console game, video game, cartoon, childish, ugly"
    )
    conditionings = graph.node("LTXVConditioning", positive=positive[0], negative=negative[0], frame_rate=25)
    small = {"width": 480, "height": 288, "frames": 25, "fps": 25, "steps": 8}
    options = preview(graph, loaded[2], conditionings[0], model=sampled_on[0], **small)
    trained = train(graph, "my_ltx2_3_lora", loaded[0], data, **options)
    graph.column("Sample", NARROW)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=sampled_on[0], lora=trained[0])
    _ltx_with_sound(
        graph, with_lora[0], loaded[2], sound_vae[0], conditionings, sampler="euler", fps=25, name="my_ltx2_3_lora"
    )


def ltx2_5_lora(graph: Graph) -> None:
    model_file, clip_file, vae_file, sound_file = (
        _hub("Lightricks", f"LTX-2.5/resolve/main/{directory}/{name}.safetensors", directory)
        for directory, name in (
            ("diffusion_models", "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot"),
            ("text_encoders", "gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot"),
            ("vae", "ltx-2.5-video-vae-bf16"),
            ("vae", "ltx-2.5-audio-vae-bf16"),
        )
    )
    hint = (
        "**target_frames**: frames per clip, 17, 25, 33 …. The sound of your clips isn't used: the model hears silence "
        "while it trains. It is distilled, and training undoes that bit by bit: keep the run short. LTX-2.5 needs a "
        "newer ComfyUI than 0.30. Tessera was not tried on the real model."
    )
    training_note(graph, [model_file, clip_file, vae_file, sound_file], hint, "my_clips", "your clips")
    model, clip, vae = load(graph, model_file, "ltxv", [clip_file], vae_file)
    data = clips(graph, vae[0], clip[0], "25, 49", 24)
    positive, negative = prompts(
        graph, clip[0], CLIP_PROMPT, "pc game, console game, video game, cartoon, childish, ugly"
    )
    conditionings = graph.node("LTXVConditioning", positive=positive[0], negative=negative[0], frame_rate=24)
    small = {"width": 480, "height": 288, "frames": 25, "fps": 24, "steps": 8, "sampler_name": "euler_ancestral"}
    options = preview(graph, vae[0], conditionings[0], **small)
    trained = train(graph, "my_ltx2_5_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sound_vae = graph.node("VAELoader", title="Load VAE of the sound", files=[sound_file], vae_name=sound_file.name)
    _ltx_with_sound(graph, with_lora[0], vae[0], sound_vae[0], conditionings, "euler_ancestral", 24, "my_ltx2_5_lora")


DESCRIPTIONS = [
    z_image_lora,
    qwen_image21_lora,
    flux3_klein_lora,
    krea2_lora,
    anima_lora,
    sdxl_lora,
    hunyuan_video15_lora,
    ltx_video_lora,
    ltx2_3_lora,
    ltx2_5_lora,
    minimax_h3_lora,
]
