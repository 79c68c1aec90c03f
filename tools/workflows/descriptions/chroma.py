"""The workflow of Chroma."""

from graph import Graph, ModelFile
from parts import LORA_TALL, NARROW, hub_file, ksampler, load, picture, pictures, preview, prompts, train, training_note

from .flux import FLUX_VAE

T5 = ModelFile(
    "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp8_e4m3fn_scaled.safetensors",
    "text_encoders",
)


def chroma_lora(graph: Graph) -> None:
    model_file = hub_file(
        "Chroma1-HD_repackaged/resolve/main/split_files/diffusion_models/Chroma1-HD-fp8mixed.safetensors",
        "diffusion_models",
    )
    training_note(graph, [model_file, T5, FLUX_VAE])
    model, clip, vae = load(graph, model_file, "chroma", [T5], FLUX_VAE)
    data = pictures(graph, vae[0], clip[0])
    text = "a photograph of a fox in a misty forest at sunrise"
    positive, negative = prompts(graph, clip[0], text, "low quality, blurry, unfinished sketch, oversaturated")
    options = preview(graph, vae[0], positive[0], negative=negative[0], cfg=3.5, steps=26, scheduler="beta")
    trained = train(graph, "my_chroma_lora", model[0], data, **options)
    graph.column("Sample", NARROW)
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", tall=LORA_TALL, model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=1)
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=26, cfg=3.5, scheduler="beta")
    picture(graph, sampled[0], vae[0], "my_chroma_lora")


DESCRIPTIONS = [chroma_lora]
