"""The workflows of FLUX."""

from graph import Graph, ModelFile, Node, Output
from parts import (
    DATA,
    EDIT,
    FOLDER_TALL,
    LORA_TALL,
    MEMORY_TALL,
    MIDDLE,
    NARROW,
    PICTURE_TALL,
    PLAIN,
    PLAN_TALL,
    QUICK,
    SWAPPED,
    WIDE,
    hub_file,
    ksampler,
    load,
    note,
    picture,
    pictures,
    preview,
    prompts,
    train,
    training_note,
)

ENCODERS = "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main"
CLIP_L = ModelFile(f"{ENCODERS}/clip_l.safetensors", "text_encoders")
T5 = ModelFile(f"{ENCODERS}/t5xxl_fp16.safetensors", "text_encoders")
FLUX_VAE = hub_file("Lumina_Image_2.0_Repackaged/resolve/main/split_files/vae/ae.safetensors", "vae")
FLUX = hub_file("flux1-dev/resolve/main/flux1-dev.safetensors", "diffusion_models")
FILES = [FLUX, CLIP_L, T5, FLUX_VAE]
FOX = "a photograph of a fox in a misty forest at sunrise"


def flux_prompt(graph: Graph, clip: Output, text: str, title: str = "Prompt") -> tuple[Output, Output]:
    """The prompt with its guidance, and the negative one."""
    prompt = graph.node("CLIPTextEncode", title=title, clip=clip, text=text)
    guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)
    return guided[0], graph.node("ConditioningZeroOut", conditioning=prompt[0])[0]


def _sampled(
    graph: Graph, model: Output, trained: Node, conditionings: tuple[Output, Output], vae: Output, name: str, title: str
) -> Node:
    """The last column: a picture with the LoRA."""
    graph.column(title, NARROW)
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model, lora=trained[0])
    sampled = ksampler(graph, with_lora, *conditionings, latent[0], steps=20, cfg=1)
    picture(graph, sampled[0], vae, name)
    return sampled


def flux_lora(graph: Graph) -> None:
    training_note(graph, FILES, f"{QUICK} {SWAPPED}")
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE)
    data = pictures(graph, vae[0], clip[0])
    graph.column("Prompt and previews", MIDDLE)
    guided, negative = flux_prompt(graph, clip[0], FOX)
    trained = train(graph, "my_lora", model[0], data, steps=1500, **preview(graph, vae[0], guided))
    graph.column("With and without the LoRA", NARROW)
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sampled = []
    for words, sampled_model in (("Without", model), ("With", with_lora)):
        title = f"{words} the LoRA"
        sampled.append(
            (words.lower(), ksampler(graph, sampled_model, guided, negative, latent[0], steps=20, cfg=1, title=title))
        )
    graph.beside(NARROW)
    for words, latent_node in sampled:
        images = graph.node("VAEDecode", samples=latent_node[0], vae=vae[0])
        title = f"Picture {words} the LoRA"
        graph.node("SaveImage", title=title, tall=PICTURE_TALL, images=images[0], filename_prefix=f"my_lora_{words}")


def flux_kontext_lora(graph: Graph) -> None:
    model_file = hub_file(
        "flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/flux1-dev-kontext_fp8_scaled.safetensors",
        "diffusion_models",
    )
    files = [model_file, CLIP_L, T5, FLUX_VAE]
    training_note(graph, files, EDIT.format(folder="my_edits_before"), "my_edits", "pictures after the edit")
    model, clip, vae = load(graph, model_file, "flux", [CLIP_L, T5], FLUX_VAE)
    data = pictures(graph, vae[0], clip[0], "my_edits", control_folder="input/my_edits_before")
    graph.column("Prompt and previews", MIDDLE)
    start = graph.node("LoadImage", title="Picture to edit", tall=310, image="example.png")
    scaled = graph.node("FluxKontextImageScale", image=start[0])
    latent = graph.node("VAEEncode", pixels=scaled[0], vae=vae[0])
    text = "turn the photograph into a charcoal drawing"
    prompt = graph.node("CLIPTextEncode", title="Prompt", clip=clip[0], text=text)
    negative = graph.node("ConditioningZeroOut", conditioning=prompt[0])
    graph.beside(NARROW)
    positive = graph.node("ReferenceLatent", conditioning=prompt[0], latent=latent[0])
    guided = graph.node("FluxGuidance", conditioning=positive[0], guidance=2.5)
    trained = train(graph, "my_kontext_lora", model[0], data, **preview(graph, vae[0], guided[0]))
    graph.column("Edit with the LoRA", NARROW)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    sampled = ksampler(graph, with_lora, guided[0], negative[0], latent[0], steps=20, cfg=1)
    picture(graph, sampled[0], vae[0], "my_kontext_lora")


def flux2_lora(graph: Graph) -> None:
    model_file = hub_file(
        "flux2-klein/resolve/main/split_files/diffusion_models/flux-2-klein-base-4b.safetensors", "diffusion_models"
    )
    clip_file = hub_file("flux2-klein/resolve/main/split_files/text_encoders/qwen_3_4b.safetensors", "text_encoders")
    vae_file = hub_file("flux2-dev/resolve/main/split_files/vae/flux2-vae.safetensors", "vae")
    hint = "FLUX.2 dev trains the same way, with its own text encoder, and samples with **cfg** 1."
    training_note(graph, [model_file, clip_file, vae_file], hint)
    model, clip, vae = load(graph, model_file, "flux2", [clip_file], vae_file)
    data = pictures(graph, vae[0], clip[0])
    positive, negative = prompts(graph, clip[0], FOX)
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=5)
    trained = train(graph, "my_flux2_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    guider = graph.node("CFGGuider", model=with_lora[0], positive=positive[0], negative=negative[0], cfg=5)
    noise = graph.node("RandomNoise")
    sampler = graph.node("KSamplerSelect", sampler_name="euler")
    sigmas = graph.node("Flux2Scheduler", steps=20, width=1024, height=1024)
    latent = graph.node("EmptyFlux2LatentImage", width=1024, height=1024)
    graph.beside(NARROW)
    sampled = graph.node(
        "SamplerCustomAdvanced",
        noise=noise[0],
        guider=guider[0],
        sampler=sampler[0],
        sigmas=sigmas[0],
        latent_image=latent[0],
    )
    picture(graph, sampled[0], vae[0], "my_flux2_lora")


def _face(graph: Graph, clip: Output, vae: Output, **folder_inputs: object) -> tuple[Node, Node, Output]:
    """A folder of pictures of one person, and the prompt of the previews."""
    graph.column("Pictures and captions", DATA)
    folder = graph.node(
        "TesseraImageFolder",
        tall=FOLDER_TALL + 30,
        folder="input/my_pictures",
        trigger_words="ohwx woman",
        **folder_inputs,
    )
    data = graph.node("TesseraPrepareDataset", tall=PLAN_TALL, dataset=folder[0], vae=vae, clip=clip)
    graph.column("Prompt and previews", MIDDLE)
    prompt = graph.node("CLIPTextEncode", title="Prompt", clip=clip, text="ohwx woman reading in a cafe by the window")
    return data, prompt, graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)[0]


def lora_with_everything(graph: Graph) -> None:
    hint = "Each node has settings for a face. You can delete any options node around *Train LoRA*."
    training_note(graph, FILES, hint)
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE)
    data, _, guided = _face(graph, clip[0], vae[0])
    options = preview(graph, vae[0], guided, width=768, height=768)
    graph.column("Options", NARROW)
    network = graph.node("TesseraLoraNetwork", tall=560, rank=16, alpha=16, model=model[0])
    optimizer = graph.node("TesseraOptimizer", lr_scheduler="cosine", warmup_steps=50, ema_decay=0.99)
    graph.beside(NARROW)
    objective = graph.node("TesseraObjective", timestep_sampling="resolution_shifted", stratified="epoch")
    graph.node("PreviewImage", title="Noise levels", tall=300, images=objective[1])
    options |= {"network": network[0], "optimizer": optimizer[0], "objective": objective[0]}
    train(graph, "my_face", model[0], data, steps=2000, keep_last=4, **options)


def lora_with_validation(graph: Graph) -> None:
    hint = (
        "**Validation** sets a tenth of the pictures aside and saves the LoRA that does best on them. **class_word** "
        "keeps other women as they were, and takes about twice as long."
    )
    training_note(graph, FILES, hint)
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE)
    data, prompt, guided = _face(graph, clip[0], vae[0], class_word="woman")
    negative = graph.node("ConditioningZeroOut", conditioning=prompt[0])[0]
    options = preview(graph, vae[0], guided, width=768, height=768)
    graph.beside(NARROW)
    compiled = graph.node("TesseraCompileModel", model=model[0])
    validation = graph.node("TesseraValidation", part=0.1, every_n_steps=100)
    objective = graph.node("TesseraObjective", preservation_weight=1)
    options |= {"validation": validation[0], "objective": objective[0]}
    trained = train(graph, "my_best_face", compiled[0], data, steps=2000, **options)
    _sampled(graph, compiled[0], trained, (guided, negative), vae[0], "my_best_face", "Sample")


def which_picture_hurts(graph: Graph) -> None:
    hint = (
        "**Loss by Picture** shows the pictures that resist at the top. Look at their captions; copy **leave_out** "
        "into *Training Images* for the next run. It trains at 512 x 512 and 768 x 768, see **more_megapixels**."
    )
    training_note(graph, FILES, hint)
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE)
    data = pictures(graph, vae[0], clip[0], megapixels=0.25, more_megapixels="0.56")
    graph.column("Prompt, previews, validation", MIDDLE)
    prompt = graph.node("CLIPTextEncode", title="Prompt", clip=clip[0], text=FOX)
    guided = graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5)
    options = preview(graph, vae[0], guided[0], width=768, height=768)
    validation = graph.node("TesseraValidation", part=0.1, every_n_steps=250, loss_by_picture=True)
    trained = train(graph, "my_pictures", model[0], data, steps=2000, validation=validation[0], **options)
    graph.column("Which picture hurts", 420)
    report = graph.node("TesseraLossByPicture", tall=560, loss=trained[1])
    graph.node("PreviewAny", title="Leave out next time", tall=200, source=report[1])
    graph.node("TesseraLossPlot", tall=330, loss=trained[1])


def everything_at_once(graph: Graph) -> None:
    hint = "Swapped blocks are compiled too. Training and sampling use the same settings, so you set nothing twice."
    training_note(graph, FILES, hint)
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE)
    data = pictures(graph, vae[0], clip[0])
    graph.column("Compile, prompt and previews", MIDDLE)
    compiled = graph.node("TesseraCompileModel", model=model[0])
    guided, negative = flux_prompt(graph, clip[0], FOX)
    trained = train(graph, "my_lora", compiled[0], data, steps=1500, **preview(graph, vae[0], guided))
    sampled = _sampled(graph, compiled[0], trained, (guided, negative), vae[0], "my_lora", "Sample")
    graph.beside(NARROW)
    graph.node("TesseraCompileReport", tall=420, model=compiled[0], after=sampled[0])


def compare_loras(graph: Graph) -> None:
    second = (
        "Name the LoRAs\n`my_lora (*)/*` in **loras** of *Compare LoRAs* is every save of the runs named *my_lora*. Or "
        "name them as a LoRA loader lists them, one to a line, or choose a **run**."
    )
    third = (
        "Press Run\nThere is a row for each prompt and seed, a column for each LoRA. Take the earliest with "
        "enough likeness in all rows. The last prompt has no trigger words: it should not change."
    )
    note(graph, FILES, PLAIN, second=second, third=third)
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE, blocks_to_swap=0)
    graph.column("Prompts", 340)
    guided = []
    for title, text in (
        ("Prompt", "ohwx woman reading in a cafe by the window"),
        ("Second prompt", "ohwx woman on a windy beach, from afar"),
        ("Prompt without the trigger", "a woman reading in a cafe by the window"),
    ):
        prompt = graph.node("CLIPTextEncode", title=title, clip=clip[0], text=text)
        guided.append(graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5))
    graph.beside(320)
    previous: dict[str, Output] = {}
    for number, positive in enumerate(guided[1:], start=2):
        chained = graph.node(
            "TesseraPreview", title=f"Prompt {number}", vae=vae[0], positive=positive[0], seeds=2, **previous
        )
        previous = {"preview": chained[0]}
    graph.column("Compare", 400)
    compared = graph.node(
        "TesseraCompareLoras",
        tall=700,
        model=model[0],
        vae=vae[0],
        positive=guided[0][0],
        loras="my_lora (*)/*",
        seeds=2,
        more_prompts=previous["preview"],
    )
    graph.beside(420)
    graph.node("SaveImage", title="The grid", tall=520, images=compared[0], filename_prefix="compare_loras")


def age_slider(graph: Graph) -> None:
    second = (
        "Say what moves\n**positive** and **negative** of *Slider* are its two ends, **neutral** is what it acts on. "
        "Write your own in the same words, or leave the age. You need no pictures: the model samples eight itself."
    )
    third = (
        "Press Run\n*Compare LoRAs* shows a dog, which should not change, and a woman from -1 (young) to 1 (old). Too "
        "much at 1? Lower **guidance_scale**."
    )
    note(graph, FILES, PLAIN, second=second, third=third)
    model, clip, vae = load(graph, FLUX, "flux", [CLIP_L, T5], FLUX_VAE)
    graph.column("Pictures that the model makes, and previews", MIDDLE)
    neutral = graph.node("CLIPTextEncode", title="What it acts on", clip=clip[0], text="a photo of a person")
    guidance = graph.node("FluxGuidance", conditioning=neutral[0], guidance=3.5)
    negative = graph.node("ConditioningZeroOut", conditioning=neutral[0])
    latent = graph.node("EmptySD3LatentImage", width=512, height=512, batch_size=8)
    sampled = ksampler(graph, model, guidance[0], negative[0], latent[0], steps=20, cfg=1)
    data = graph.node("TesseraLatentsToDataset", latents=sampled[0], positive=neutral[0])
    graph.beside(240)
    guided = []
    for title, text in (("Prompt", "a photo of a woman in a garden"), ("Prompt that stays", "a photo of a dog")):
        prompt = graph.node("CLIPTextEncode", title=title, clip=clip[0], text=text)
        guided.append(graph.node("FluxGuidance", conditioning=prompt[0], guidance=3.5))
    shown = graph.node("TesseraPreview", vae=vae[0], positive=guided[0][0], width=512, height=512)
    graph.column("Slider", WIDE)
    slider = graph.node(
        "TesseraSlider",
        data=data[0],
        clip=clip[0],
        positive="a photo of a very old person, wrinkles, white hair",
        negative="a photo of a very young person, smooth skin",
        neutral="a photo of a person",
        keep="a photo of a dog",
        attributes="male\nfemale",
    )
    memory = graph.node("TesseraMemory", tall=MEMORY_TALL, checkpointing="auto", blocks_to_swap=-1)
    settings = {"steps": 500, "learning_rate": 2e-4, "rank": 8, "memory": memory[0], "preview": shown[0]}
    trained = train(graph, "age_slider", model[0], slider, **settings)
    graph.column("From -1 to 1", DATA)
    compared = graph.node(
        "TesseraCompareLoras",
        tall=700,
        model=model[0],
        vae=vae[0],
        positive=guided[1][0],
        strengths="-1, -0.5, 0.5, 1",
        seeds=2,
        width=512,
        height=512,
        more_prompts=shown[0],
        **{"lora_models.lora0": trained[0]},
    )
    graph.node("SaveImage", title="The grid", tall=PICTURE_TALL, images=compared[0], filename_prefix="age_slider")


DESCRIPTIONS = [
    flux_lora,
    flux_kontext_lora,
    flux2_lora,
    everything_at_once,
    lora_with_everything,
    lora_with_validation,
    which_picture_hurts,
    compare_loras,
    age_slider,
]
