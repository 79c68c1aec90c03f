"""What the workflows have in common: the groups of nodes that load, train and sample, and the notes beside them."""

from graph import Graph, ModelFile, Node, Output, list_of_files

HUB = "https://huggingface.co/Comfy-Org"


def hub_file(path: str, directory: str) -> ModelFile:
    return ModelFile(f"{HUB}/{path}", directory)


SWAPPED = (
    "Blocks that do not fit the GPU stream from the computer's memory (**blocks_to_swap** -1). Where all fit, none do."
)
# Heights and widths with what a run shows on the node, so that nothing lies on another node after it.
PLAN_TALL = 760
LOADER_TALL = 290
TABLE_WIDE = 680
QUICK = "512 x 512 (**megapixels** 0.25) trains about four times as fast."
DATA = (
    "Put {what} in `ComfyUI/input/{folder}`, each with a caption in a text file of the same name: `a.{ending}`, "
    "`a.txt`. Then press R and choose the folder.\n\n{more}\n\n**Prepare Dataset** shows what it crops. What is "
    "encoded is kept on disk, so the next run starts at once."
)
TRAIN = (
    "Press **Run**. The LoRA, its saved states and `summary.json` lie in `output/loras/{name}-…`, and every LoRA "
    "loader lists them.\n\nA run that was stopped goes on where it was saved; to train further, raise **steps** and "
    "run again. A finished run is returned at once. **Save LoRA** writes a smaller copy, in the format that you "
    "choose.\n\n{more}"
)
OPTIONS = (
    "More options: connect *LoRA Network*, *Optimizer*, *Training Objective* or *Training Memory* to Train LoRA. Each "
    "node has a help page, under the question mark of a selected node."
)
SAMPLE = (
    "Sampled with the LoRA. Write a prompt like one of your captions, with the trigger words if you set any.\n\n{more}"
)
EDIT = (
    "The picture before the edit goes into `ComfyUI/input/{folder}`, under the same file name. Several for one "
    "picture: `a_0.jpg`, `a_1.jpg`. The caption says what to change."
)


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
        tall=LOADER_TALL,
        files=[model],
        unet_name=model.name,
        blocks_to_swap=blocks_to_swap,
    )
    kind = "CLIPLoader" if len(clips) == 1 else "DualCLIPLoader"
    names = {f"clip_name{number if len(clips) > 1 else ''}": file.name for number, file in enumerate(clips, start=1)}
    clip = graph.node(kind, files=clips, type=clip_type, **names)
    return loaded, clip, graph.node("VAELoader", files=[vae], vae_name=vae.name)


def first_column(graph: Graph, files: list[ModelFile], note: str = SWAPPED) -> None:
    text = f"{list_of_files(files)}\n\n{note}"
    graph.column("Model", 400, "Load the model", text, 200 + 20 * max(0, len(files) - 3))


def pictures(graph: Graph, vae: Node, clip: Node, more: str, folder: str = "my_pictures", **given: object) -> Node:
    note = DATA.format(what="10 to 30 pictures", folder=folder, ending="jpg", more=more)
    graph.column("Pictures and captions", 440, "Pictures", note, 240)
    controls = {"control_folder": given.pop("control_folder")} if "control_folder" in given else {}
    chosen = graph.node("TesseraImageFolder", folder=f"input/{folder}", **controls)
    return graph.node("TesseraPrepareDataset", tall=PLAN_TALL, dataset=chosen[0], vae=vae[0], clip=clip[0], **given)


def train(
    graph: Graph, name: str, model: Node, data: Node, more: str = OPTIONS, low: Node | None = None, **given: object
) -> Node:
    graph.column("Train", 410, "Train", TRAIN.format(name=name, more=more))
    linked = {} if low is None else {"model_low_noise": low[0]}
    trained = graph.node(
        "TesseraTrainLora", tall=640, model=model[0], data=data[0], output_name=name, **linked, **given
    )
    graph.beside()
    for place, title in ((0, ""),) if low is None else ((0, "_high_noise"), (3, "_low_noise")):
        graph.node("TesseraLossPlot", tall=380, loss=trained[place + 1])
        graph.node("TesseraSaveLora", tall=210, lora=trained[place], filename_prefix=f"loras/{name}{title}")
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
    scheduler: str = "simple",
    title: str | None = None,
) -> Node:
    given = {"positive": positive, "negative": negative, "latent_image": latent, "steps": steps, "cfg": cfg}
    return graph.node("KSampler", title=title, model=model[0], sampler_name=sampler, scheduler=scheduler, **given)


def prompts(graph: Graph, clip: Node, text: str, negative: str = "") -> tuple[Node, Node]:
    """The prompt and the negative one, encoded."""
    made = (("Prompt", text), ("Negative prompt", negative))
    positive, unwanted = (graph.node("CLIPTextEncode", title=title, clip=clip[0], text=words) for title, words in made)
    return positive, unwanted


def video(graph: Graph, latent: Output, vae: Output, name: str, fps: int = 16) -> None:
    images = graph.node("VAEDecode", samples=latent, vae=vae)
    made = graph.node("CreateVideo", images=images[0], fps=fps)
    graph.node("SaveVideo", tall=400, video=made[0], filename_prefix=f"video/{name}")


def picture(graph: Graph, latent: Output, vae: Node, name: str) -> None:
    images = graph.node("VAEDecode", samples=latent, vae=vae[0])
    graph.node("SaveImage", tall=400, images=images[0], filename_prefix=name)
