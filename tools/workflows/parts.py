"""Parts that workflows have in common: the groups of nodes that load, train and sample, and the notes about them."""

import re

from graph import Graph, ModelFile, Node, Output, list_of_files

HUB = "https://huggingface.co/Comfy-Org"


def hub_file(path: str, directory: str) -> ModelFile:
    return ModelFile(f"{HUB}/{path}", directory)


SWAPPED = "Too big for your GPU? The model is split with RAM by itself; with 12 GB or less set **quantize** to int8."
# Heights and widths of nodes after a run, so that they do not overlap.
PLAN_TALL = 430
PANEL_TALL = 880
LOW_PANEL_TALL = 740  # beside what leaves no room for more
PICTURE_TALL = 330
LOADER_TALL = 270
MEMORY_TALL = 250
LORA_TALL = 135
SAVED_TALL = 240
FOLDER_TALL, CLIPS_TALL = 620, 670  # with thumbnails, or the sentence that the folder is not there yet
# Columns of data, of prompts, and rows of two.
WIDE = 340
DATA = 380
MIDDLE = 300
NARROW = 290
QUICK = "512 x 512 (**megapixels** 0.25) trains about four times as fast."
EDIT = (
    "The picture before the edit goes into `input/{folder}` under the same name; several for one picture: `a_0.jpg`, "
    "`a_1.jpg`. The caption says what to change."
)
TRAINING = """### 1. Get the files
Below `ComfyUI/models`:

{files}

### 2. Add {what}
10 to 30 of them in `ComfyUI/input/{folder}`, each with a caption in a text file of the same name: `a.{ending}`, \
`a.txt`. Press R and choose the folder.

### 3. Press Run
Pick the LoRA in any LoRA loader (press R). Stop any time: the next Run continues.

{more}"""
PLAIN = """### 1. Get the files
Below `ComfyUI/models`:

{files}

### 2. {second}

### 3. {third}"""


def note(graph: Graph, files: list[ModelFile], text: str, **fields: str) -> None:
    """Write the three steps above the first column, which begins here. fields: values for the text."""
    text = text.format(files=list_of_files(files), **fields).strip()
    plain = (re.sub(r"\]\([^)]*\)|[*`#]", "", line) for line in text.splitlines() if line)
    lines = sum(1 + len(line) // 58 for line in plain)
    graph.column("Model", WIDE)
    graph.note(text, 70 + 17 * lines + 11 * text.count("\n\n") + 20 * text.count("###"))


def training_note(
    graph: Graph,
    files: list[ModelFile],
    hint: str = SWAPPED,
    folder: str = "my_pictures",
    content: str = "your pictures",
) -> None:
    ending = "mp4" if folder == "my_clips" else "jpg"
    note(graph, files, TRAINING, what=content, folder=folder, ending=ending, more=hint)


def load(
    graph: Graph,
    model: ModelFile,
    clip_type: str,
    clips: list[ModelFile],
    vae: ModelFile,
    blocks_to_swap: int = -1,
    title: str | None = None,
) -> tuple[Node, Node, Node]:
    """MODEL, CLIP and VAE."""
    loaded = graph.node(
        "TesseraLoadDiffusionModel",
        title=title,
        tall=LOADER_TALL if title != "High noise expert" else 185,
        files=[model],
        unet_name=model.name,
        blocks_to_swap=blocks_to_swap,
    )
    kind = "CLIPLoader" if len(clips) == 1 else "DualCLIPLoader"
    names = {f"clip_name{number if len(clips) > 1 else ''}": file.name for number, file in enumerate(clips, start=1)}
    clip = graph.node(kind, files=clips, type=clip_type, **names)
    return loaded, clip, graph.node("VAELoader", files=[vae], vae_name=vae.name)


def pictures(graph: Graph, vae: Output, clip: Output, folder: str = "my_pictures", **inputs: object) -> Node:
    graph.column("Pictures and captions", DATA)
    controls = {"control_folder": inputs.pop("control_folder")} if "control_folder" in inputs else {}
    folder_node = graph.node(
        "TesseraImageFolder", tall=FOLDER_TALL + 90 * bool(controls), folder=f"input/{folder}", **controls
    )
    return graph.node("TesseraPrepareDataset", tall=PLAN_TALL, dataset=folder_node[0], vae=vae, clip=clip, **inputs)


def clips(graph: Graph, vae: Output, clip: Output, target_frames: str, fps: int = 16, **inputs: object) -> Node:
    graph.column("Clips and captions", DATA)
    speed = {} if fps == 16 else {"fps": fps}
    folder_node = graph.node(
        "TesseraVideoFolder", tall=CLIPS_TALL, folder="input/my_clips", target_frames=target_frames, **speed
    )
    return graph.node(
        "TesseraPrepareDataset", tall=PLAN_TALL, dataset=folder_node[0], vae=vae, clip=clip, megapixels=0.25, **inputs
    )


def preview(graph: Graph, vae: Output, positive: Output, **inputs: object) -> dict[str, Output]:
    """Training Memory at auto and Training Preview, below the prompt: what `train` links."""
    memory = graph.node("TesseraMemory", tall=MEMORY_TALL, checkpointing="auto", blocks_to_swap=-1)
    preview_node = graph.node("TesseraPreview", vae=vae, positive=positive, **inputs)
    return {"memory": memory[0], "preview": preview_node[0]}


def train(
    graph: Graph,
    name: str,
    model: Output,
    data: Node,
    low: Node | None = None,
    adapter: ModelFile | None = None,
    **inputs: object,
) -> Node:
    """adapter: in force while a distilled model trains. LoRA Network with it takes the room of Save LoRA, without which
    the LoRA is written too."""
    graph.column("Train", WIDE)
    linked = {} if low is None else {"model_low_noise": low[0]}
    if adapter is not None:
        network = graph.node("TesseraLoraNetwork", tall=330, files=[adapter], training_adapter=adapter.name)
        linked["network"] = network[0]
    tall = PANEL_TALL if low is None and adapter is None else LOW_PANEL_TALL
    trained = graph.node("TesseraTrainLora", tall=tall, model=model, data=data[0], output_name=name, **linked, **inputs)
    if adapter is not None:
        return trained
    for place in (0,) if low is None else (0, 3):
        graph.node(
            "TesseraSaveLora",
            tall=SAVED_TALL if low is None else 130,
            lora=trained[place],
        )
    row = graph.columns[-1].nodes[-1]
    row.append(row.pop(0))  # at the bottom, with room for what it shows of the run
    return trained


def ksampler(  # noqa: PLR0913
    graph: Graph,
    model: Node,
    positive: Output,
    negative: Output,
    latent: Output,
    *,
    steps: int,
    cfg: float,
    sampler: str = "euler",
    scheduler: str = "simple",
    title: str | None = None,
    seed_after: str = "fixed",
) -> Node:
    inputs = {"positive": positive, "negative": negative, "latent_image": latent, "steps": steps, "cfg": cfg}
    return graph.node(
        "KSampler",
        title=title,
        seed_after=seed_after,
        model=model[0],
        sampler_name=sampler,
        scheduler=scheduler,
        **inputs,
    )


def prompts(
    graph: Graph, clip: Output, text: str, negative: str = "", title: str = "Prompt and previews"
) -> tuple[Node, Node]:
    """The prompt and the negative one, encoded, in a column of their own."""
    graph.column(title, MIDDLE)
    texts = (("Prompt", text), ("Negative prompt", negative))
    positive, unwanted = (graph.node("CLIPTextEncode", title=name, clip=clip, text=words) for name, words in texts)
    return positive, unwanted


def video(graph: Graph, latent: Output, vae: Output, name: str, fps: int = 16, **sound: Output) -> None:
    images = graph.node("VAEDecode", samples=latent, vae=vae)
    clip = graph.node("CreateVideo", images=images[0], fps=fps, **sound)
    graph.node("SaveVideo", tall=PICTURE_TALL, video=clip[0], filename_prefix=f"video/{name}")


def picture(graph: Graph, latent: Output, vae: Output, name: str, title: str | None = None) -> None:
    images = graph.node("VAEDecode", samples=latent, vae=vae)
    graph.node("SaveImage", title=title, tall=PICTURE_TALL, images=images[0], filename_prefix=name)
