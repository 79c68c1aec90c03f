"""The workflows of FLUX."""

from graph import Graph, ModelFile, Node, Output
from parts import (
    DATA,
    EDIT,
    PLAN_TALL,
    QUICK,
    SAMPLE,
    SWAPPED,
    TABLE_WIDE,
    first_column,
    hub_file,
    ksampler,
    load,
    picture,
    pictures,
    prompts,
    train,
)

CLIP_L = ModelFile(
    "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors", "text_encoders"
)
T5 = ModelFile(
    "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors", "text_encoders"
)
FLUX_VAE = hub_file("Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors", "vae")


def flux_lora(graph: Graph) -> None:
    model_file = hub_file("flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models")
    first_column(graph, [model_file, CLIP_L, T5, FLUX_VAE])
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE)
    data = pictures(graph, vae, clip, QUICK)
    trained = train(graph, "my_lora", model, data, steps=1500)
    graph.column(
        "Sample with and without the LoRA",
        360,
        "Compare",
        "Two pictures from the same seed, one without and one with the LoRA. Write a prompt like one of your captions, "
        "with the trigger words if you set any.\n\nWhen you change the prompt, only this part runs again: a finished "
        "LoRA is returned at once. To train without sampling, right-click this group and choose *Bypass Group Nodes*.",
    )
    prompt = graph.node(
        "CLIPTextEncode", title="Prompt", clip=clip[0], text="a photograph of a fox in a misty forest at sunrise"
    )
    guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)
    negative = graph.node("ConditioningZeroOut", conditioning=prompt[0])
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    graph.beside()
    decoded = []
    for words, chosen in (("Without", model), ("With", with_lora)):
        sampled = ksampler(graph, chosen, guided[0], negative[0], latent[0], steps=20, cfg=1, title=f"{words} the LoRA")
        decoded.append((words.lower(), graph.node("VAEDecode", samples=sampled[0], vae=vae[0])))
    graph.beside()
    for words, images in decoded:
        title = f"Picture {words} the LoRA"
        graph.node("SaveImage", title=title, tall=400, images=images[0], filename_prefix=f"my_lora_{words}")


def flux_kontext_lora(graph: Graph) -> None:
    model_file = hub_file(
        "flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/flux1-dev-kontext_fp8_scaled.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, CLIP_L, T5, FLUX_VAE])
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE)
    data = pictures(
        graph, vae, clip, EDIT.format(folder="my_edits_before"), "my_edits", control_folder="input/my_edits_before"
    )
    trained = train(graph, "my_kontext_lora", model, data)
    graph.column(
        "Edit a picture with the LoRA", 360, "Sample", SAMPLE.format(more="Choose the picture to edit in *Load Image*.")
    )
    start = graph.node("LoadImage", tall=340, image="example.png")
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
    model_file = hub_file(
        "flux2-klein/resolve/main/split_files/diffusion_models/flux-2-klein-base-4b.safetensors", "diffusion_models"
    )
    clip_file = hub_file("flux2-klein/resolve/main/split_files/text_encoders/qwen_3_4b.safetensors", "text_encoders")
    vae_file = hub_file("flux2-dev/resolve/main/split_files/vae/flux2-vae.safetensors", "vae")
    first_column(
        graph,
        [model_file, clip_file, vae_file],
        f"{SWAPPED} FLUX.2 dev trains the same way, with its own text encoder.",
    )
    model, clip, vae = load(graph, model_file, "flux2", [clip_file], vae_file)
    data = pictures(graph, vae, clip, QUICK)
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


def sample_with_lora(
    graph: Graph, model: Node, trained: Node, clip: Node, vae: Node, text: str, name: str, more: str
) -> Node:
    """The last column of FLUX.1: a picture with the LoRA. Gives the sampler."""
    graph.column("Sample with the LoRA", 360, "Sample", SAMPLE.format(more=more))
    prompt = graph.node("CLIPTextEncode", title="Prompt", clip=clip[0], text=text)
    guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)
    negative = graph.node("ConditioningZeroOut", conditioning=prompt[0])
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    graph.beside()
    sampled = ksampler(graph, with_lora, guided[0], negative[0], latent[0], steps=20, cfg=1)
    picture(graph, sampled[0], vae, name)
    return sampled


def lora_with_everything(graph: Graph) -> None:
    model_file = hub_file("flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models")
    first_column(
        graph,
        [model_file, CLIP_L, T5, FLUX_VAE],
        "Each node below stands at what suits a face. None of those around *Train LoRA* has to be there: delete one, "
        "and the run takes its defaults.",
    )
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE)
    compiled = graph.node("TesseraCompileModel", model=model[0])
    more = (
        "Each caption has the trigger words *ohwx woman* in front. **class_word** gives it a second form, with *woman* "
        "in their place: what the model makes of that is kept as it is (**preservation_weight** on Training "
        "Objective), at the price of two more forward passes. Pictures of other women would do the same: chain a "
        "second *Training Images* with **regularisation** on to `dataset`, and set **preservation_weight** to 0."
    )
    note = DATA.format(what="15 to 30 pictures", folder="my_pictures", ending="jpg", more=more)
    graph.column("Pictures and captions", 440, "Pictures", note, 360)
    own = graph.node(
        "TesseraImageFolder",
        folder="input/my_pictures",
        trigger_words="ohwx woman",
        caption_dropout=0.05,
        class_word="woman",
    )
    graph.beside()
    data = graph.node("TesseraPrepareDataset", tall=PLAN_TALL, dataset=own[0], vae=vae[0], clip=clip[0])
    graph.node("PreviewImage", title="What is cropped", tall=420, images=data[1])
    options = (
        "**LoRA Network** sets what is trained, **Optimizer** how it is stepped, **Training Objective** which noise "
        "levels are drawn (their distribution is shown), **Training Memory** how the run fits the GPU, **Validation** "
        "holds a tenth of the pictures out and keeps the LoRA that does best on them, **Training Preview** samples "
        "two prompts as the run goes."
    )
    graph.column("Options", 400, "Options", options, 240)
    graph.columns[-1].widths[0] = TABLE_WIDE
    network = graph.node("TesseraLoraNetwork", tall=1000, rank=16, alpha=16, model=model[0])
    optimizer = graph.node("TesseraOptimizer", lr_scheduler="cosine", warmup_steps=50, ema_decay=0.99)
    graph.beside()
    objective = graph.node(
        "TesseraObjective", timestep_sampling="resolution_shifted", stratified="epoch", preservation_weight=1
    )
    graph.node("PreviewImage", title="Noise levels", tall=330, images=objective[1])
    graph.beside()
    memory = graph.node("TesseraMemory", checkpointing="auto", blocks_to_swap=-1)
    validation = graph.node("TesseraValidation", part=0.1, every_n_steps=100)
    shown = None
    for number, words in enumerate(("ohwx woman reading in a cafe by the window", "ohwx woman on a windy beach"), 1):
        graph.beside()
        prompt = graph.node("CLIPTextEncode", title=f"Prompt {number} of the preview", clip=clip[0], text=words)
        guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)
        before = {} if shown is None else {"preview": shown[0]}
        shown = graph.node("TesseraPreview", vae=vae[0], positive=guided[0], width=768, height=768, **before)
    assert shown is not None
    trained = train(
        graph,
        "my_face",
        compiled,
        data,
        "The sheet of previews is rewritten after each of them, and lies beside the LoRA with the plot's numbers and "
        "the workflow of the run.",
        steps=2000,
        network=network[0],
        optimizer=optimizer[0],
        objective=objective[0],
        memory=memory[0],
        preview=shown[0],
        validation=validation[0],
        keep_last=4,
    )
    graph.node("PreviewImage", title="Previews over the steps", tall=420, images=trained[6])
    text = "ohwx woman, portrait, soft light"
    sample_with_lora(graph, compiled, trained, clip, vae, text, "my_face", "The class word is part of the trigger.")


def everything_at_once(graph: Graph) -> None:
    model_file = hub_file("flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models")
    first_column(graph, [model_file, CLIP_L, T5, FLUX_VAE])
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE)
    compiled = graph.node("TesseraCompileModel", model=model[0])
    data = pictures(graph, vae, clip, QUICK)
    trained = train(
        graph,
        "my_lora",
        compiled,
        data,
        "Swapped blocks are compiled whole, and Train LoRA takes both settings from the MODEL: nothing has to be set "
        "twice.",
        steps=1500,
    )
    more = "The sampler streams and compiles the same blocks. A LoRA, or another strength of it, compiles nothing."
    text = "a photograph of a fox in a misty forest at sunrise"
    sampled = sample_with_lora(graph, compiled, trained, clip, vae, text, "my_lora", more)
    graph.beside(TABLE_WIDE)
    graph.node("TesseraCompileReport", tall=300, model=compiled[0], after=sampled[0])


def compare_loras(graph: Graph) -> None:
    model_file = hub_file("flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models")
    first_column(
        graph,
        [model_file, CLIP_L, T5, FLUX_VAE],
        "A model that does not fit the GPU is streamed by ComfyUI itself while it samples.",
    )
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE, blocks_to_swap=0)
    note = (
        "**Compare LoRAs** samples each prompt and seed with each LoRA: `my_lora-*/*` in **loras** is every save of "
        "the runs named *my_lora*. Or name LoRAs as a LoRA loader lists them, one per line, or choose a **run**.\n\n"
        "Take the earliest save that is like enough in all rows. The last prompt has no trigger words: it should look "
        "as it does without LoRA."
    )
    graph.column("Prompts", 400, "Prompts", note, 240)
    guided = []
    for title, text in (
        ("Prompt", "ohwx woman reading in a cafe by the window"),
        ("Second prompt", "ohwx woman on a windy beach, from afar"),
        ("Prompt without the trigger", "a woman reading in a cafe by the window"),
    ):
        prompt = graph.node("CLIPTextEncode", title=title, clip=clip[0], text=text)
        guided.append(graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5))
    graph.beside()
    more: dict[str, Output] = {}
    for number, positive in enumerate(guided[1:], start=2):
        chained = graph.node(
            "TesseraPreview", title=f"Prompt {number}", vae=vae[0], positive=positive[0], seeds=2, **more
        )
        more = {"preview": chained[0]}
    graph.column("Compare", 420, "Compare", "One row for each prompt and seed, one column for each LoRA.", 100)
    compared = graph.node(
        "TesseraCompareLoras",
        tall=760,
        model=model[0],
        vae=vae[0],
        positive=guided[0][0],
        loras="my_lora-*/*",
        seeds=2,
        more_prompts=more["preview"],
    )
    graph.beside()
    graph.node("SaveImage", title="The grid", tall=520, images=compared[0], filename_prefix="compare_loras")


DESCRIPTIONS = [flux_lora, flux_kontext_lora, flux2_lora, everything_at_once, lora_with_everything, compare_loras]
