"""The workflows of Qwen-Image."""

from graph import Graph
from parts import EDIT, SAMPLE, first_column, hub_file, ksampler, load, picture, pictures, prompts, train

QWEN_CLIP = hub_file(
    "Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors", "text_encoders"
)
QWEN_VAE = hub_file("Qwen-Image_ComfyUI/resolve/main/split_files/vae/qwen_image_vae.safetensors", "vae")


def qwen_image_lora(graph: Graph) -> None:
    model_file = hub_file(
        "Qwen-Image_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_fp8_e4m3fn.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, QWEN_CLIP, QWEN_VAE])
    model, clip, vae = load(graph, model_file, "qwen_image", [QWEN_CLIP], QWEN_VAE)
    data = pictures(graph, vae, clip, "Captions may be of any length: what fills them up is masked exactly.")
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


def qwen_edit_lora(graph: Graph) -> None:
    model_file = hub_file(
        "Qwen-Image-Edit_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_edit_2509_fp8_e4m3fn.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, QWEN_CLIP, QWEN_VAE])
    model, clip, vae = load(graph, model_file, "qwen_image", [QWEN_CLIP], QWEN_VAE)
    data = pictures(
        graph, vae, clip, EDIT.format(folder="my_edits_before"), "my_edits", control_folder="input/my_edits_before"
    )
    trained = train(graph, "my_qwen_edit_lora", model, data)
    graph.column(
        "Edit a picture with the LoRA", 360, "Sample", SAMPLE.format(more="Choose the picture to edit in *Load Image*.")
    )
    start = graph.node("LoadImage", tall=340, image="example.png")
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


DESCRIPTIONS = [qwen_image_lora, qwen_edit_lora]
