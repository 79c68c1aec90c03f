"""Writes the shared training workflows, `workflows/*.json` and `workflows/api/*.json`, from their descriptions below,
and gives those that were laid out by hand the inputs that nodes have got since.

Run: python tools/workflows.py http://127.0.0.1:8188
The address is that of a ComfyUI with this pack, such as `python dev.py serve` starts; it tells what inputs nodes have.
A file with what its `/object_info` answered does as well.
Thumbnails are pictures of the frontend with a workflow open, 1200 pixels wide or more.
"""

import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

from graph import Graph, ModelFile, Node, Output, bring_up_to_date, list_of_files

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
HUB = "https://huggingface.co/Comfy-Org"


def _file(path: str, directory: str) -> ModelFile:
    return ModelFile(f"{HUB}/{path}", directory)


def _wan(version: str, name: str, directory: str = "diffusion_models") -> ModelFile:
    repository = {"2.1": "Wan_2.1_ComfyUI_repackaged", "2.2": "Wan_2.2_ComfyUI_Repackaged"}[version]
    return _file(f"{repository}/resolve/main/split_files/{directory}/{name}.safetensors", directory)


UMT5 = _wan("2.1", "umt5_xxl_fp8_e4m3fn_scaled", "text_encoders")
WAN_VAE = _wan("2.1", "wan_2.1_vae", "vae")
QWEN_CLIP = _file(
    "Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors", "text_encoders"
)
QWEN_VAE = _file("Qwen-Image_ComfyUI/resolve/main/split_files/vae/qwen_image_vae.safetensors", "vae")
CLIP_L = ModelFile(
    "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors", "text_encoders"
)
T5 = ModelFile(
    "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors", "text_encoders"
)
FLUX_VAE = _file("Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors", "vae")

MEMORY = "Short of memory? Set **blocks_to_swap** to -1: as many blocks as have to stream from the computer's memory."
DATA = (
    "Put {what} in `ComfyUI/input/{folder}`, each with a caption in a text file of the same name: `a.{ending}`, "
    "`a.txt`. Then press R and choose the folder.\n\n{more}\n\n**Prepare Dataset** shows what it crops. What is "
    "encoded is kept on disk, so the next run starts at once."
)
TRAIN = (
    "Press **Run**. The LoRA, its saved states and `summary.json` lie in `output/loras/{name}-…`, and every LoRA "
    "loader lists them.\n\nA run that was stopped goes on where it was saved; to train further, raise **steps** and "
    "run again. A finished run is returned at once.\n\n{more}"
)
OPTIONS = (
    "More options: connect *LoRA Network*, *Optimizer*, *Training Objective* or *Training Memory* to Train LoRA. Each "
    "node has a help page, under the question mark of a selected node."
)
SAMPLE = (
    "Sampled with the LoRA. Write a prompt like one of your captions, with the trigger words if you set any.\n\n{more}"
)


def load(
    graph: Graph, model: ModelFile, clip_type: str, clips: list[ModelFile], vae: ModelFile, **more: object
) -> tuple[Node, Node, Node]:
    """MODEL, CLIP and VAE."""
    loaded = graph.node("TesseraLoadDiffusionModel", files=[model], unet_name=model.name, **more)
    kind = "CLIPLoader" if len(clips) == 1 else "DualCLIPLoader"
    names = {f"clip_name{number if len(clips) > 1 else ''}": file.name for number, file in enumerate(clips, start=1)}
    clip = graph.node(kind, files=clips, type=clip_type, **names)
    return loaded, clip, graph.node("VAELoader", files=[vae], vae_name=vae.name)


def first_column(graph: Graph, files: list[ModelFile], note: str = MEMORY) -> None:
    text = f"{list_of_files(files)}\n\n{note}"
    graph.column("Model", 400, "Load the model", text, 200 + 20 * max(0, len(files) - 3))


def train(
    graph: Graph, name: str, model: Node, data: Node, more: str = OPTIONS, low: Node | None = None, **given: object
) -> Node:
    graph.column("Train", 410, "Train", TRAIN.format(name=name, more=more))
    linked = {} if low is None else {"model_low_noise": low[0]}
    trained = graph.node(
        "TesseraTrainLora", tall=640, model=model[0], data=data[0], output_name=name, **linked, **given
    )
    graph.beside()
    for place, title in ((0, ""), (3, "_low_noise"))[: 1 if low is None else 2]:
        graph.node("TesseraLossPlot", tall=380, loss=trained[place + 1])
        graph.node("TesseraSaveLora", lora=trained[place], filename_prefix=f"loras/{name}{title}")
    return trained


def ksampler(
    graph: Graph,
    model: Node,
    positive: Output,
    negative: Output,
    latent: Output,
    *,
    steps: int,
    cfg: float,
    sampler: str = "euler",
) -> Node:
    given = {"positive": positive, "negative": negative, "latent_image": latent, "steps": steps, "cfg": cfg}
    return graph.node("KSampler", model=model[0], sampler_name=sampler, scheduler="simple", **given)


def prompts(graph: Graph, clip: Node, text: str, negative: str = "") -> tuple[Node, Node]:
    """The prompt and the negative one, encoded."""
    made = (("Prompt", text), ("Negative prompt", negative))
    positive, unwanted = (graph.node("CLIPTextEncode", title=title, clip=clip[0], text=words) for title, words in made)
    return positive, unwanted


def video(graph: Graph, latent: Output, vae: Node, name: str, fps: int = 16) -> None:
    images = graph.node("VAEDecode", samples=latent, vae=vae[0])
    made = graph.node("CreateVideo", images=images[0], fps=fps)
    graph.node("SaveVideo", tall=400, video=made[0], filename_prefix=f"video/{name}")


def picture(graph: Graph, latent: Output, vae: Node, name: str) -> None:
    images = graph.node("VAEDecode", samples=latent, vae=vae[0])
    graph.node("SaveImage", tall=400, images=images[0], filename_prefix=name)


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
    data = graph.node("TesseraPrepareDataset", tall=590, dataset=clips[0], vae=vae[0], clip=clip[0], megapixels=0.25)
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
    video(graph, sampled[0], vae, "my_wan_lora")


def wan_i2v_lora(graph: Graph) -> None:
    model_file = _wan("2.1", "wan2.1_i2v_480p_14B_fp16")
    vision_file = _wan("2.1", "clip_vision_h", "clip_vision")
    first_column(
        graph,
        [model_file, UMT5, WAN_VAE, vision_file],
        "This model is large: blocks that do not fit the GPU stream from the computer's memory "
        "(**blocks_to_swap** -1).",
    )
    model, clip, vae = load(graph, model_file, "wan", [UMT5], WAN_VAE, blocks_to_swap=-1)
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
        tall=590,
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
    start = graph.node("LoadImage", tall=320, image="example.png")
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
    video(graph, sampled[0], vae, "my_i2v_lora")


def wan22_two_experts_lora(graph: Graph) -> None:
    high_file, low_file = (_wan("2.2", f"wan2.2_t2v_{side}_noise_14B_fp8_scaled") for side in ("high", "low"))
    first_column(
        graph,
        [high_file, low_file, UMT5, WAN_VAE],
        "Only one expert is trained at a time, so one has to fit, with **blocks_to_swap** -1 as far as it does not.",
    )
    high, clip, vae = load(graph, high_file, "wan", [UMT5], WAN_VAE, blocks_to_swap=-1)
    low = graph.node(
        "TesseraLoadDiffusionModel",
        title="Low noise expert",
        files=[low_file],
        unet_name=low_file.name,
        blocks_to_swap=-1,
    )
    high.title = "High noise expert"
    more = "Still pictures train as well: chain *Training Images* to `dataset`."
    note = DATA.format(what="10 to 30 clips", folder="my_clips", ending="mp4", more=more)
    graph.column("Clips and captions", 440, "Clips", note, 240)
    clips = graph.node("TesseraVideoFolder", folder="input/my_clips", target_frames="33")
    data = graph.node("TesseraPrepareDataset", tall=590, dataset=clips[0], vae=vae[0], clip=clip[0], megapixels=0.25)
    more = (
        "Both experts are trained, one after the other, each for all **steps**, and give a LoRA each: `_high_noise` "
        "and `_low_noise`."
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
    video(graph, second[0], vae, "my_wan22_lora")


def _pictures(graph: Graph, vae: Node, clip: Node, more: str, folder: str = "my_pictures", **given: object) -> Node:
    note = DATA.format(what="10 to 30 pictures", folder=folder, ending="jpg", more=more)
    graph.column("Pictures and captions", 440, "Pictures", note, 240)
    controls = {"control_folder": given.pop("control_folder")} if "control_folder" in given else {}
    pictures = graph.node("TesseraImageFolder", folder=f"input/{folder}", **controls)
    return graph.node("TesseraPrepareDataset", tall=590, dataset=pictures[0], vae=vae[0], clip=clip[0], **given)


def qwen_image_lora(graph: Graph) -> None:
    model_file = _file(
        "Qwen-Image_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_fp8_e4m3fn.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, QWEN_CLIP, QWEN_VAE])
    model, clip, vae = load(graph, model_file, "qwen_image", [QWEN_CLIP], QWEN_VAE)
    data = _pictures(graph, vae, clip, "Captions may be of any length: what fills them up is masked exactly.")
    trained = train(graph, "my_qwen_lora", model, data)
    graph.column(
        "Sample with the LoRA", 360, "Sample", SAMPLE.format(more="Qwen-Image samples with a **cfg** of 2.5 to 4.")
    )
    positive, negative = prompts(graph, clip, "a photograph of a fox in a misty forest at sunrise")
    latent = graph.node("EmptySD3LatentImage", width=1328, height=1328)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=3.1)
    graph.beside()
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=20, cfg=2.5)
    picture(graph, sampled[0], vae, "my_qwen_lora")


EDIT = (
    "The picture before the edit goes into `ComfyUI/input/{folder}`, under the same file name. Several for one "
    "picture: `a_0.jpg`, `a_1.jpg`. The caption says what to change."
)


def qwen_edit_lora(graph: Graph) -> None:
    model_file = _file(
        "Qwen-Image-Edit_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_edit_2509_fp8_e4m3fn.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, QWEN_CLIP, QWEN_VAE])
    model, clip, vae = load(graph, model_file, "qwen_image", [QWEN_CLIP], QWEN_VAE)
    data = _pictures(
        graph, vae, clip, EDIT.format(folder="my_edits_before"), "my_edits", control_folder="input/my_edits_before"
    )
    trained = train(graph, "my_qwen_edit_lora", model, data)
    graph.column(
        "Edit a picture with the LoRA", 360, "Sample", SAMPLE.format(more="Choose the picture to edit in *Load Image*.")
    )
    start = graph.node("LoadImage", tall=320, image="example.png")
    scaled = graph.node("FluxKontextImageScale", image=start[0])
    positive = graph.node(
        "TextEncodeQwenImageEditPlus",
        title="Prompt",
        clip=clip[0],
        vae=vae[0],
        image1=scaled[0],
        prompt="turn the photograph into a charcoal drawing",
    )
    negative = graph.node(
        "TextEncodeQwenImageEditPlus", title="Negative prompt", clip=clip[0], vae=vae[0], image1=scaled[0], prompt=""
    )
    graph.beside()
    latent = graph.node("VAEEncode", pixels=scaled[0], vae=vae[0])
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=3)
    normed = graph.node("CFGNorm", model=shifted[0])
    sampled = ksampler(graph, normed, positive[0], negative[0], latent[0], steps=20, cfg=2.5)
    picture(graph, sampled[0], vae, "my_qwen_edit_lora")


def flux_kontext_lora(graph: Graph) -> None:
    model_file = _file(
        "flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/flux1-dev-kontext_fp8_scaled.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, CLIP_L, T5, FLUX_VAE])
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE)
    data = _pictures(
        graph, vae, clip, EDIT.format(folder="my_edits_before"), "my_edits", control_folder="input/my_edits_before"
    )
    trained = train(graph, "my_kontext_lora", model, data)
    graph.column(
        "Edit a picture with the LoRA", 360, "Sample", SAMPLE.format(more="Choose the picture to edit in *Load Image*.")
    )
    start = graph.node("LoadImage", tall=320, image="example.png")
    scaled = graph.node("FluxKontextImageScale", image=start[0])
    latent = graph.node("VAEEncode", pixels=scaled[0], vae=vae[0])
    prompt = graph.node(
        "CLIPTextEncode", title="Prompt", clip=clip[0], text="turn the photograph into a charcoal drawing"
    )
    graph.beside()
    positive = graph.node("ReferenceLatent", conditioning=prompt[0], latent=latent[0])
    guided = graph.node("FluxGuidance", conditioning=positive[0], guidance=2.5)
    negative = graph.node("ConditioningZeroOut", conditioning=prompt[0])
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, guided[0], negative[0], latent[0], steps=20, cfg=1)
    picture(graph, sampled[0], vae, "my_kontext_lora")


def flux2_lora(graph: Graph) -> None:
    model_file = _file(
        "flux2-klein/resolve/main/split_files/diffusion_models/flux-2-klein-base-4b.safetensors", "diffusion_models"
    )
    clip_file = _file("flux2-klein/resolve/main/split_files/text_encoders/qwen_3_4b.safetensors", "text_encoders")
    vae_file = _file("flux2-dev/resolve/main/split_files/vae/flux2-vae.safetensors", "vae")
    first_column(
        graph, [model_file, clip_file, vae_file], f"{MEMORY} FLUX.2 dev trains the same way, with its own text encoder."
    )
    model, clip, vae = load(graph, model_file, "flux2", [clip_file], vae_file)
    data = _pictures(graph, vae, clip, "512 x 512 (**megapixels** 0.25) trains about four times as fast.")
    trained = train(graph, "my_flux2_lora", model, data)
    graph.column(
        "Sample with the LoRA",
        360,
        "Sample",
        SAMPLE.format(
            more="The base model samples with guidance (**cfg** 5); FLUX.2 dev and the distilled klein with 1."
        ),
    )
    positive, negative = prompts(graph, clip, "a photograph of a fox in a misty forest at sunrise")
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    guider = graph.node("CFGGuider", model=with_lora[0], positive=positive[0], negative=negative[0], cfg=5)
    noise = graph.node("RandomNoise")
    graph.beside()
    sampler = graph.node("KSamplerSelect", sampler_name="euler")
    sigmas = graph.node("Flux2Scheduler", steps=20, width=1024, height=1024)
    latent = graph.node("EmptyFlux2LatentImage", width=1024, height=1024)
    sampled = graph.node(
        "SamplerCustomAdvanced",
        noise=noise[0],
        guider=guider[0],
        sampler=sampler[0],
        sigmas=sigmas[0],
        latent_image=latent[0],
    )
    picture(graph, sampled[0], vae, "my_flux2_lora")


def everything_at_once(graph: Graph) -> None:
    model_file = _file("flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models")
    first_column(
        graph,
        [model_file, CLIP_L, T5, FLUX_VAE],
        "Blocks that do not fit the GPU stream from the computer's memory (**blocks_to_swap** -1).",
    )
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE, blocks_to_swap=-1)
    compiled = graph.node("TesseraCompileModel", model=model[0])
    data = _pictures(graph, vae, clip, "512 x 512 (**megapixels** 0.25) trains about four times as fast.")
    trained = train(
        graph,
        "my_lora",
        compiled,
        data,
        "Swapped blocks are compiled whole, and Train LoRA takes both settings from the MODEL: nothing has to be set "
        "twice.",
        steps=1500,
    )
    graph.column(
        "Sample with the LoRA",
        360,
        "Sample",
        SAMPLE.format(
            more="The sampler streams and compiles the same blocks. A LoRA, or another strength of it, compiles "
            "nothing."
        ),
    )
    prompt = graph.node(
        "CLIPTextEncode", title="Prompt", clip=clip[0], text="a photograph of a fox in a misty forest at sunrise"
    )
    guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)
    negative = graph.node("ConditioningZeroOut", conditioning=prompt[0])
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=compiled[0], lora=trained[0])
    graph.beside()
    sampled = ksampler(graph, with_lora, guided[0], negative[0], latent[0], steps=20, cfg=1)
    picture(graph, sampled[0], vae, "my_lora")
    graph.node("TesseraCompileReport", tall=300, model=compiled[0], after=sampled[0])


DESCRIPTIONS: list[Callable[[Graph], None]] = [
    wan_t2v_lora,
    wan_i2v_lora,
    wan22_two_experts_lora,
    qwen_image_lora,
    qwen_edit_lora,
    flux_kontext_lora,
    flux2_lora,
    everything_at_once,
]


def main(source: str) -> None:
    if source.startswith("http"):
        with urllib.request.urlopen(f"{source.rstrip('/')}/object_info") as answer:
            object_info = json.load(answer)
    else:
        object_info = json.loads(Path(source).read_text(encoding="utf-8"))
    for describe in DESCRIPTIONS:
        graph = Graph(describe.__name__, object_info)
        describe(graph)
        graph.write(WORKFLOWS)
    described = {describe.__name__ for describe in DESCRIPTIONS}
    for path in WORKFLOWS.glob("*.json"):
        if path.stem not in described:
            bring_up_to_date(path, object_info)


if __name__ == "__main__":
    main(*sys.argv[1:])
