"""The workflows of Wan."""

from graph import Graph, ModelFile
from parts import DATA, LOADER_TALL, PLAN_TALL, SAMPLE, first_column, hub_file, ksampler, load, prompts, train, video


def _wan(version: str, name: str, directory: str = "diffusion_models") -> ModelFile:
    repository = {"2.1": "Wan_2.1_ComfyUI_repackaged", "2.2": "Wan_2.2_ComfyUI_Repackaged"}[version]
    return hub_file(f"{repository}/resolve/main/split_files/{directory}/{name}.safetensors", directory)


UMT5 = _wan("2.1", "umt5_xxl_fp8_e4m3fn_scaled", "text_encoders")
WAN_VAE = _wan("2.1", "wan_2.1_vae", "vae")
NEGATIVE_CLIP = "still picture, blurred, washed out, subtitles, distorted"


def wan_t2v_lora(graph: Graph) -> None:
    model_file = _wan("2.1", "wan2.1_t2v_1.3B_fp16")
    first_column(graph, [model_file, UMT5, WAN_VAE])
    model, clip, vae = load(graph, model_file, "wan", [UMT5], WAN_VAE)
    more = (
        "**target_frames** are the lengths that are cut from each clip, 4 n + 1 frames at **fps**. Still pictures "
        "train as well: chain *Training Images* to `dataset`."
    )
    note = DATA.format(what="10 to 30 clips", folder="my_clips", ending="mp4", more=more)
    graph.column("Clips and captions", 440, "Clips", note, 240)
    clips = graph.node("TesseraVideoFolder", folder="input/my_clips", target_frames="17, 33")
    data = graph.node(
        "TesseraPrepareDataset", tall=PLAN_TALL, dataset=clips[0], vae=vae[0], clip=clip[0], megapixels=0.25
    )
    trained = train(graph, "my_wan_lora", model, data)
    graph.column(
        "Sample with the LoRA", 360, "Sample", SAMPLE.format(more="832 x 480 is what this model was made for.")
    )
    positive, negative = prompts(graph, clip, "a fox runs through deep snow between pine trees", NEGATIVE_CLIP)
    latent = graph.node("EmptyHunyuanLatentVideo", width=832, height=480, length=33)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingSD3", model=with_lora[0], shift=8)
    graph.beside()
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=30, cfg=6, sampler="uni_pc")
    video(graph, sampled[0], vae[0], "my_wan_lora")


def wan_i2v_lora(graph: Graph) -> None:
    model_file = _wan("2.1", "wan2.1_i2v_480p_14B_fp16")
    vision_file = _wan("2.1", "clip_vision_h", "clip_vision")
    first_column(graph, [model_file, UMT5, WAN_VAE, vision_file])
    model, clip, vae = load(graph, model_file, "wan", [UMT5], WAN_VAE)
    vision = graph.node("CLIPVisionLoader", files=[vision_file], clip_name=vision_file.name)
    more = (
        "**image_to_video** makes each clip's first frame its start picture. Wan 2.1 sees it "
        "through CLIP vision too; Wan 2.2 needs none, so disconnect it there."
    )
    note = DATA.format(what="10 to 30 clips", folder="my_clips", ending="mp4", more=more)
    graph.column("Clips and captions", 440, "Clips", note, 240)
    clips = graph.node("TesseraVideoFolder", folder="input/my_clips", target_frames="33")
    data = graph.node(
        "TesseraPrepareDataset",
        tall=PLAN_TALL,
        dataset=clips[0],
        vae=vae[0],
        clip=clip[0],
        clip_vision=vision[0],
        megapixels=0.25,
        image_to_video=True,
    )
    trained = train(graph, "my_i2v_lora", model, data)
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more="Choose a start picture in *Load Image*."))
    positive, negative = prompts(graph, clip, "the fox turns its head and walks away", NEGATIVE_CLIP)
    start = graph.node("LoadImage", tall=340, image="example.png")
    seen = graph.node("CLIPVisionEncode", clip_vision=vision[0], image=start[0], crop="none")
    graph.beside()
    started = graph.node(
        "WanImageToVideo",
        positive=positive[0],
        negative=negative[0],
        vae=vae[0],
        clip_vision_output=seen[0],
        start_image=start[0],
        width=832,
        height=480,
        length=33,
    )
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingSD3", model=with_lora[0], shift=8)
    graph.beside()
    sampled = ksampler(graph, shifted, started[0], started[1], started[2], steps=20, cfg=6, sampler="uni_pc")
    video(graph, sampled[0], vae[0], "my_i2v_lora")


def wan22_two_experts_lora(graph: Graph) -> None:
    high_file, low_file = (_wan("2.2", f"wan2.2_t2v_{side}_noise_14B_fp8_scaled") for side in ("high", "low"))
    first_column(
        graph,
        [high_file, low_file, UMT5, WAN_VAE],
        "Only one expert is trained at a time, so one has to fit, with **blocks_to_swap** -1 as far as it does not.",
    )
    high, clip, vae = load(graph, high_file, "wan", [UMT5], WAN_VAE, title="High noise expert")
    low = graph.node(
        "TesseraLoadDiffusionModel",
        title="Low noise expert",
        tall=LOADER_TALL,
        files=[low_file],
        unet_name=low_file.name,
        blocks_to_swap=-1,
    )
    more = "Still pictures train as well: chain *Training Images* to `dataset`."
    note = DATA.format(what="10 to 30 clips", folder="my_clips", ending="mp4", more=more)
    graph.column("Clips and captions", 440, "Clips", note, 240)
    clips = graph.node("TesseraVideoFolder", folder="input/my_clips", target_frames="33")
    data = graph.node(
        "TesseraPrepareDataset", tall=PLAN_TALL, dataset=clips[0], vae=vae[0], clip=clip[0], megapixels=0.25
    )
    more = (
        "Both experts are trained, one after the other, each for all **steps**, and give a LoRA each: `_high_noise` "
        "and `_low_noise`. To go on from such a pair connect *LoRA Network* to `network`: **start_from** takes the "
        "first, **start_from_low_noise** the second."
    )
    trained = train(graph, "my_wan22_lora", high, data, more, low)
    graph.column(
        "Sample with both LoRAs",
        360,
        "Sample",
        SAMPLE.format(more="The high noise expert draws the first ten steps, the low noise one the rest."),
    )
    positive, negative = prompts(graph, clip, "a fox runs through deep snow between pine trees", NEGATIVE_CLIP)
    latent = graph.node("EmptyHunyuanLatentVideo", width=832, height=480, length=33)
    shifted = []
    for model, output in ((high, 0), (low, 3)):
        with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[output])
        shifted.append(graph.node("ModelSamplingSD3", model=with_lora[0], shift=5))
    graph.beside()
    common = {"positive": positive[0], "negative": negative[0], "steps": 20, "cfg": 3.5, "sampler_name": "euler"}
    common |= {"scheduler": "simple"}
    first = graph.node(
        "KSamplerAdvanced",
        title="High noise",
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
        title="Low noise",
        model=shifted[1][0],
        latent_image=first[0],
        add_noise="disable",
        start_at_step=10,
        end_at_step=10000,
        return_with_leftover_noise="disable",
        **common,
    )
    video(graph, second[0], vae[0], "my_wan22_lora")


DESCRIPTIONS = [wan_t2v_lora, wan_i2v_lora, wan22_two_experts_lora]
