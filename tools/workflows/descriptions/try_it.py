"""The workflow that trains on the tiny models of the pack."""

from graph import Graph
from parts import DATA, FOLDER_TALL, LORA_TALL, MIDDLE, NARROW, PLAN_TALL, WIDE, ksampler, picture, preview, train

SIDE = 128  # pixels, of which the tiny VAE makes 64 tokens
STEPS = 800
RANK = 64
RATE = 5e-3
NOTE = """### 1. Press Run
That is all: nothing to download, no pictures to add. It takes a minute or two, without a GPU too.

### 2. Watch it learn
*Train LoRA* shows the loss falling and the previews: noise turns into the boat of *Training Images*. *Picture with \
the LoRA*, on the right, is the result.

### 3. Ask for another picture
Set the prompt to *the face of a black cat* or *a yellow house at night* and press Run. Nothing is trained again.

The model is tiny, so don't copy these settings. Next: *1 Train a FLUX LoRA*."""


def try_it(graph: Graph) -> None:
    graph.column("Model", WIDE)
    graph.note(NOTE, 420)
    models = graph.node("TesseraTryItModels")
    network = graph.node("TesseraLoraNetwork", tall=330, rank=RANK, alpha=RANK, targets="*")
    optimizer = graph.node("TesseraOptimizer", learning_rate=RATE, lr_scheduler="cosine", warmup_steps=10)
    graph.column("Pictures and captions", DATA)
    folder = graph.node("TesseraImageFolder", tall=FOLDER_TALL, folder="examples/try_it")
    megapixels = round(SIDE * SIDE / 1e6, 4)
    data = graph.node(
        "TesseraPrepareDataset", tall=PLAN_TALL, dataset=folder[0], vae=models[2], clip=models[1], megapixels=megapixels
    )
    graph.column("Prompt and previews", MIDDLE)
    prompt = graph.node("CLIPTextEncode", title="Prompt", clip=models[1], text="a sailing boat on the sea")
    guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=1)
    options = preview(graph, models[2], guided[0], every_n_steps=100, width=SIDE, height=SIDE)
    options |= {"network": network[0], "optimizer": optimizer[0]}
    trained = train(
        graph,
        "try_it",
        models[0],
        data,
        steps=STEPS,
        batch_size=3,
        learning_rate=RATE,
        rank=RANK,
        compile="off",
        **options,
    )
    graph.column("With and without the LoRA", NARROW)
    latent = graph.node("EmptySD3LatentImage", width=SIDE, height=SIDE)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=models[0], lora=trained[0])
    sampled = []
    for words, model in (("Without", models), ("With", with_lora)):
        title = f"{words} the LoRA"
        sampled.append((words, ksampler(graph, model, guided[0], guided[0], latent[0], steps=20, cfg=1, title=title)))
    graph.beside(NARROW)
    for words, latent_node in sampled:
        picture(graph, latent_node[0], models[2], f"try_it_{words.lower()}", f"Picture {words.lower()} the LoRA")


DESCRIPTIONS = [try_it]
