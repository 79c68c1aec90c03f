"""The workflows of models that train with ComfyUI's own forward. Files, sampler, steps and cfg are those of ComfyUI's
own workflow templates, which tests/pure/test_native_workflows.py compares."""

from graph import Graph, ModelFile, Node, Output
from parts import (
    DATA,
    PLAN_TALL,
    SAMPLE,
    first_column,
    hub_file,
    ksampler,
    load,
    picture,
    pictures,
    prompts,
    train,
    video,
)

PROMPT = "a photograph of a fox in a misty forest at sunrise"
CLIP_PROMPT = "a fox runs through deep snow between pine trees"
PLAIN = "Captions may be of any length."
CHECKPOINT = "The file holds the text encoders and the VAE too."


def _hub(owner: str, path: str, directory: str) -> ModelFile:
    return ModelFile(f"https://huggingface.co/{owner}/{path}", directory)


def _checkpoint(graph: Graph, file: ModelFile) -> Node:
    return graph.node("CheckpointLoaderSimple", files=[file], ckpt_name=file.name)


def z_image_lora(graph: Graph) -> None:
    base, turbo = "z_image/resolve/main/split_files", "z_image_turbo/resolve/main/split_files"
    model_file = hub_file(f"{base}/diffusion_models/z_image_bf16.safetensors", "diffusion_models")
    clip_file = hub_file(f"{turbo}/text_encoders/qwen_3_4b.safetensors", "text_encoders")
    vae_file = hub_file(f"{turbo}/vae/ae.safetensors", "vae")
    first_column(graph, [model_file, clip_file, vae_file])
    model, clip, vae = load(graph, model_file, "lumina2", [clip_file], vae_file)
    data = pictures(graph, vae, clip, PLAIN)
    trained = train(graph, "my_z_image_lora", model, data)
    more = (
        "The LoRA works on Z-Image-Turbo too: load that here, with 8 **steps** and **cfg** 1. Training on Turbo itself "
        "undoes what makes it fast."
    )
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more=more), 220)
    positive, negative = prompts(graph, clip, PROMPT, "blurry, low quality")
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=3)
    graph.beside()
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=25, cfg=4, sampler="res_multistep")
    picture(graph, sampled[0], vae, "my_z_image_lora")


def krea2_lora(graph: Graph) -> None:
    raw_file, turbo_file = (
        hub_file(f"Krea-2/resolve/main/diffusion_models/krea2_{name}_fp8_scaled.safetensors", "diffusion_models")
        for name in ("raw", "turbo")
    )
    clip_file = hub_file("Krea-2/resolve/main/text_encoders/qwen3vl_4b_fp8_scaled.safetensors", "text_encoders")
    vae_file = hub_file("Krea-2/resolve/main/vae/qwen_image_vae.safetensors", "vae")
    first_column(graph, [raw_file, turbo_file, clip_file, vae_file])
    model, clip, vae = load(graph, raw_file, "krea2", [clip_file], vae_file, title="Krea 2 Raw, to train on")
    data = pictures(graph, vae, clip, PLAIN)
    trained = train(graph, "my_krea2_lora", model, data)
    graph.column(
        "Sample with the LoRA",
        360,
        "Sample",
        SAMPLE.format(more="Krea 2 is trained on **Raw** and sampled on **Turbo**, as its makers advise."),
    )
    positive, negative = prompts(graph, clip, PROMPT)
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    turbo = graph.node(
        "UNETLoader", title="Krea 2 Turbo, to sample with", files=[turbo_file], unet_name=turbo_file.name
    )
    with_lora = graph.node("LoraModelLoader", model=turbo[0], lora=trained[0])
    graph.beside()
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=8, cfg=1)
    picture(graph, sampled[0], vae, "my_krea2_lora")


def anima_lora(graph: Graph) -> None:
    owner, files = "circlestone-labs/Anima", "resolve/main/split_files"
    model_file = _hub(owner, f"{files}/diffusion_models/anima-base-v1.0.safetensors", "diffusion_models")
    clip_file = _hub(owner, f"{files}/text_encoders/qwen_3_06b_base.safetensors", "text_encoders")
    vae_file = _hub(owner, f"{files}/vae/qwen_image_vae.safetensors", "vae")
    first_column(graph, [model_file, clip_file, vae_file])
    model, clip, vae = load(graph, model_file, "stable_diffusion", [clip_file], vae_file)
    data = pictures(graph, vae, clip, "Captions may be tags or sentences.")
    trained = train(graph, "my_anima_lora", model, data)
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more="1024 x 1024 is what it was made for."))
    positive, negative = prompts(
        graph, clip, "1girl, solo, fox ears, misty forest, sunrise", "worst quality, low quality"
    )
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    graph.beside()
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=30, cfg=4)
    picture(graph, sampled[0], vae, "my_anima_lora")


def sdxl_lora(graph: Graph) -> None:
    file = _hub("stabilityai", "stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors", "checkpoints")
    first_column(graph, [file], f"{CHECKPOINT} Fine-tunes such as Illustrious and Pony load the same way.")
    loaded = _checkpoint(graph, file)
    graph.column(
        "Pictures and captions",
        440,
        "Pictures",
        DATA.format(
            what="10 to 30 pictures", folder="my_pictures", ending="jpg", more="75 tokens of a caption are a chunk."
        ),
        240,
    )
    chosen = graph.node("TesseraImageFolder", folder="input/my_pictures")
    data = graph.node("TesseraPrepareDataset", tall=PLAN_TALL, dataset=chosen[0], vae=loaded[2], clip=loaded[1])
    trained = train(graph, "my_sdxl_lora", loaded, data)
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more="1024 x 1024 is what it was made for."))
    positive, negative = (
        graph.node("CLIPTextEncode", title=title, clip=loaded[1], text=text)
        for title, text in (("Prompt", PROMPT), ("Negative prompt", "blurry, low quality"))
    )
    latent = graph.node("EmptyLatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=loaded[0], lora=trained[0])
    graph.beside()
    sampled = ksampler(graph, with_lora, positive[0], negative[0], latent[0], steps=25, cfg=8, scheduler="normal")
    images = graph.node("VAEDecode", samples=sampled[0], vae=loaded[2])
    graph.node("SaveImage", tall=400, images=images[0], filename_prefix="my_sdxl_lora")


def _clips(graph: Graph, vae: Output, clip: Node, more: str, fps: int, target_frames: str) -> Node:
    note = DATA.format(what="10 to 30 clips", folder="my_clips", ending="mp4", more=more)
    graph.column("Clips and captions", 440, "Clips", note, 240)
    clips = graph.node("TesseraVideoFolder", folder="input/my_clips", target_frames=target_frames, fps=fps)
    return graph.node("TesseraPrepareDataset", tall=PLAN_TALL, dataset=clips[0], vae=vae, clip=clip[0], megapixels=0.25)


def hunyuan_video15_lora(graph: Graph) -> None:
    files = "HunyuanVideo_1.5_repackaged/resolve/main/split_files"
    model_file = hub_file(f"{files}/diffusion_models/hunyuanvideo1.5_720p_t2v_fp16.safetensors", "diffusion_models")
    clip_files = [
        hub_file(f"{files}/text_encoders/{name}.safetensors", "text_encoders")
        for name in ("qwen_2.5_vl_7b_fp8_scaled", "byt5_small_glyphxl_fp16")
    ]
    vae_file = hub_file(f"{files}/vae/hunyuanvideo15_vae_fp16.safetensors", "vae")
    first_column(graph, [model_file, *clip_files, vae_file])
    model, clip, vae = load(graph, model_file, "hunyuan_video_15", clip_files, vae_file)
    more = (
        "**target_frames** are the lengths that are cut from each clip, 4 n + 1 frames at **fps**. What a caption puts "
        "in double quotes is text that the clip shows. Still pictures train as well: chain *Training Images* to "
        "`dataset`."
    )
    data = _clips(graph, vae[0], clip, more, 24, "17, 33")
    trained = train(graph, "my_hunyuan_video_lora", model, data)
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more="1280 x 720 is what it was made for."))
    positive, negative = prompts(graph, clip, CLIP_PROMPT)
    latent = graph.node("EmptyHunyuanVideo15Latent", width=1280, height=720, length=33)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingSD3", model=with_lora[0], shift=7)
    graph.beside()
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=20, cfg=6)
    video(graph, sampled[0], vae[0], "my_hunyuan_video_lora", 24)


def ltx_video_lora(graph: Graph) -> None:
    file = _hub("Lightricks", "LTX-Video/resolve/main/ltx-video-2b-v0.9.safetensors", "checkpoints")
    clip_file = _hub("comfyanonymous", "flux_text_encoders/resolve/main/t5xxl_fp16.safetensors", "text_encoders")
    first_column(graph, [file, clip_file], "The checkpoint holds the VAE too. Later LTX-Video files load the same way.")
    loaded = _checkpoint(graph, file)
    clip = graph.node("CLIPLoader", files=[clip_file], clip_name=clip_file.name, type="ltxv")
    more = (
        "**target_frames** are the lengths that are cut from each clip, 8 n + 1 frames at **fps**, which the model is "
        "told. Still pictures train as well: chain *Training Images* to `dataset`."
    )
    data = _clips(graph, loaded[2], clip, more, 25, "25, 49")
    trained = train(graph, "my_ltx_video_lora", loaded, data)
    more = "768 x 512 is what it was made for. Give *LTXVConditioning* the **fps** of your clips."
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more=more))
    negative_prompt = "low quality, worst quality, deformed, distorted, disfigured, motion smear, motion artifacts"
    positive, negative = prompts(graph, clip, CLIP_PROMPT, negative_prompt)
    told = graph.node("LTXVConditioning", positive=positive[0], negative=negative[0], frame_rate=25)
    latent = graph.node("EmptyLTXVLatentVideo", width=768, height=512, length=97)
    sigmas = graph.node("LTXVScheduler", latent=latent[0], steps=30)
    graph.beside()
    with_lora = graph.node("LoraModelLoader", model=loaded[0], lora=trained[0])
    sampler = graph.node("KSamplerSelect", sampler_name="euler")
    sampled = graph.node(
        "SamplerCustom",
        model=with_lora[0],
        positive=told[0],
        negative=told[1],
        sampler=sampler[0],
        sigmas=sigmas[0],
        latent_image=latent[0],
        cfg=3,
    )
    video(graph, sampled[0], loaded[2], "my_ltx_video_lora", 25)


DESCRIPTIONS = [z_image_lora, krea2_lora, anima_lora, sdxl_lora, hunyuan_video15_lora, ltx_video_lora]
