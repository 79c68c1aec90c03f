"""The workflows of Wan."""

from graph import Graph, ModelFile
from parts import (
    LORA_TALL,
    NARROW,
    clips,
    hub_file,
    ksampler,
    load,
    preview,
    prompts,
    train,
    training_note,
    video,
)


def _wan(version: str, name: str, directory: str = "diffusion_models") -> ModelFile:
    repository = {"2.1": "Wan_2.1_ComfyUI_repackaged", "2.2": "Wan_2.2_ComfyUI_Repackaged"}[version]
    return hub_file(f"{repository}/resolve/main/split_files/{directory}/{name}.safetensors", directory)


UMT5 = _wan("2.1", "umt5_xxl_fp8_e4m3fn_scaled", "text_encoders")
WAN_VAE = _wan("2.1", "wan_2.1_vae", "vae")
WAN_T2V = _wan("2.1", "wan2.1_t2v_1.3B_fp16")
NEGATIVE_CLIP = "still picture, blurred, washed out, subtitles, distorted"
FOX = "a fox runs through deep snow between pine trees"
SMALL = {"width": 480, "height": 272, "frames": 17}


def wan_t2v_lora(graph: Graph) -> None:
    hint = "**target_frames**: frames per clip, 17, 33, 49 …. Pictures train as well: chain "
    training_note(graph, [WAN_T2V, UMT5, WAN_VAE], f"{hint}*Training Images*.", "my_clips", "your clips")
    model, clip, vae = load(graph, WAN_T2V, "wan", [UMT5], WAN_VAE)
    data = clips(graph, vae[0], clip[0], "17, 33")
    positive, negative = prompts(graph, clip[0], FOX, NEGATIVE_CLIP)
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=6, sampler_name="uni_pc", **SMALL)
    trained = train(graph, "my_wan_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptyHunyuanLatentVideo", width=832, height=480, length=33)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingSD3", model=with_lora[0], shift=8)
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=30, cfg=6, sampler="uni_pc")
    graph.beside(NARROW)
    video(graph, sampled[0], vae[0], "my_wan_lora")


def wan_i2v_lora(graph: Graph) -> None:
    model_file = _wan("2.1", "wan2.1_i2v_480p_14B_fp16")
    vision_file = _wan("2.1", "clip_vision_h", "clip_vision")
    hint = (
        "**image_to_video** makes each clip's first frame its start picture. Wan 2.2 needs no CLIP vision: disconnect "
        "it there."
    )
    training_note(graph, [model_file, UMT5, WAN_VAE, vision_file], hint, "my_clips", "your clips")
    model, clip, vae = load(graph, model_file, "wan", [UMT5], WAN_VAE)
    vision = graph.node("CLIPVisionLoader", files=[vision_file], clip_name=vision_file.name)
    data = clips(graph, vae[0], clip[0], "33", clip_vision=vision[0], image_to_video=True)
    positive, negative = prompts(graph, clip[0], "the fox turns its head and walks away", NEGATIVE_CLIP)
    start = graph.node("LoadImage", title="Start picture", tall=310, image="example.png")
    vision_output = graph.node("CLIPVisionEncode", clip_vision=vision[0], image=start[0], crop="none")
    graph.beside(NARROW)
    started = graph.node(
        "WanImageToVideo",
        positive=positive[0],
        negative=negative[0],
        vae=vae[0],
        clip_vision_output=vision_output[0],
        start_image=start[0],
        width=832,
        height=480,
        length=33,
    )
    sampler = {"latent_image": started[2], "cfg": 6, "sampler_name": "uni_pc"}
    options = preview(graph, vae[0], started[0], negative=started[1], **sampler)
    trained = train(graph, "my_i2v_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingSD3", model=with_lora[0], shift=8)
    sampled = ksampler(graph, shifted, started[0], started[1], started[2], steps=20, cfg=6, sampler="uni_pc")
    video(graph, sampled[0], vae[0], "my_i2v_lora")


def wan22_two_experts_lora(graph: Graph) -> None:
    high_file, low_file = (_wan("2.2", f"wan2.2_t2v_{side}_noise_14B_fp8_scaled") for side in ("high", "low"))
    hint = "The experts are trained one after the other, so only one has to fit. There are two LoRAs."
    training_note(graph, [high_file, low_file, UMT5, WAN_VAE], hint, "my_clips", "your clips")
    high, clip, vae = load(graph, high_file, "wan", [UMT5], WAN_VAE, title="High noise expert")
    low = graph.node(
        "TesseraLoadDiffusionModel",
        title="Low noise expert",
        tall=185,
        files=[low_file],
        unet_name=low_file.name,
        blocks_to_swap=-1,
    )
    data = clips(graph, vae[0], clip[0], "33")
    positive, negative = prompts(graph, clip[0], FOX, NEGATIVE_CLIP)
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=3.5, **SMALL)
    latent = graph.node("EmptyHunyuanLatentVideo", width=832, height=480, length=33)
    trained = train(graph, "my_wan22_lora", high[0], data, low, **options)
    graph.column("Sample with both LoRAs", NARROW)
    shifted = []
    for model, output in ((high, 0), (low, 3)):
        with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[output])
        shifted.append(graph.node("ModelSamplingSD3", model=with_lora[0], shift=5))
    graph.beside(NARROW)
    common = {"positive": positive[0], "negative": negative[0], "steps": 20, "cfg": 3.5, "sampler_name": "euler"}
    common |= {"scheduler": "simple"}
    first = graph.node(
        "KSamplerAdvanced",
        title="High noise, the first ten steps",
        model=shifted[0][0],
        latent_image=latent[0],
        add_noise="enable",
        start_at_step=0,
        end_at_step=10,
        return_with_leftover_noise="enable",
        **common,
    )
    second = graph.node(
        "KSamplerAdvanced",
        title="Low noise, the rest",
        model=shifted[1][0],
        latent_image=first[0],
        add_noise="disable",
        start_at_step=10,
        end_at_step=10000,
        return_with_leftover_noise="disable",
        **common,
    )
    graph.back()
    video(graph, second[0], vae[0], "my_wan22_lora")


DESCRIPTIONS = [wan_t2v_lora, wan_i2v_lora, wan22_two_experts_lora]
