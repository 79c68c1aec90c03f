"""The workflows of Qwen-Image."""

from graph import Graph
from parts import (
    EDIT,
    LORA_TALL,
    MIDDLE,
    NARROW,
    hub_file,
    ksampler,
    load,
    picture,
    pictures,
    preview,
    prompts,
    train,
    training_note,
)

QWEN_CLIP = hub_file(
    "Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors", "text_encoders"
)
QWEN_VAE = hub_file("Qwen-Image_ComfyUI/resolve/main/split_files/vae/qwen_image_vae.safetensors", "vae")
QWEN_IMAGE = hub_file(
    "Qwen-Image_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_fp8_e4m3fn.safetensors",
    "diffusion_models",
)


def qwen_image_lora(graph: Graph) -> None:
    training_note(graph, [QWEN_IMAGE, QWEN_CLIP, QWEN_VAE])
    model, clip, vae = load(graph, QWEN_IMAGE, "qwen_image", [QWEN_CLIP], QWEN_VAE)
    data = pictures(graph, vae[0], clip[0])
    positive, negative = prompts(graph, clip[0], "a photograph of a fox in a misty forest at sunrise")
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=2.5)
    trained = train(graph, "my_qwen_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptySD3LatentImage", width=1328, height=1328)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=3.1)
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=20, cfg=2.5)
    picture(graph, sampled[0], vae[0], "my_qwen_lora")


def qwen_edit_lora(graph: Graph) -> None:
    model_file = hub_file(
        "Qwen-Image-Edit_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_edit_2509_fp8_e4m3fn.safetensors",
        "diffusion_models",
    )
    training_note(
        graph,
        [model_file, QWEN_CLIP, QWEN_VAE],
        EDIT.format(folder="my_edits_before"),
        "my_edits",
        "pictures after the edit",
    )
    model, clip, vae = load(graph, model_file, "qwen_image", [QWEN_CLIP], QWEN_VAE)
    data = pictures(graph, vae[0], clip[0], "my_edits", control_folder="input/my_edits_before")
    graph.column("Prompt and previews", MIDDLE)
    start = graph.node("LoadImage", title="Picture to edit", tall=310, image="example.png")
    scaled = graph.node("FluxKontextImageScale", image=start[0])
    encoder_inputs = {"clip": clip[0], "vae": vae[0], "image1": scaled[0]}
    words = "turn the photograph into a charcoal drawing"
    positive = graph.node("TextEncodeQwenImageEditPlus", title="Prompt", prompt=words, **encoder_inputs)
    negative = graph.node("TextEncodeQwenImageEditPlus", title="Negative prompt", prompt="", **encoder_inputs)
    graph.beside(NARROW)
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=2.5)
    latent = graph.node("VAEEncode", pixels=scaled[0], vae=vae[0])
    trained = train(graph, "my_qwen_edit_lora", model[0], data, **options)
    graph.column("Edit with the LoRA", NARROW)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=3)
    normed = graph.node("CFGNorm", model=shifted[0])
    sampled = ksampler(graph, normed, positive[0], negative[0], latent[0], steps=20, cfg=2.5)
    picture(graph, sampled[0], vae[0], "my_qwen_edit_lora")


DESCRIPTIONS = [qwen_image_lora, qwen_edit_lora]
