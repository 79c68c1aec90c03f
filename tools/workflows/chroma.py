"""The workflow of Chroma."""

from flux import FLUX_VAE
from graph import Graph, ModelFile
from parts import SAMPLE, first_column, hub_file, ksampler, load, picture, pictures, prompts, train

T5 = ModelFile(
    "https://huggingface.co/comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp8_e4m3fn_scaled.safetensors",
    "text_encoders",
)


def chroma_lora(graph: Graph) -> None:
    model_file = hub_file(
        "Chroma1-HD_repackaged/resolve/main/split_files/diffusion_models/Chroma1-HD-fp8mixed.safetensors",
        "diffusion_models",
    )
    first_column(graph, [model_file, T5, FLUX_VAE])
    model, clip, vae = load(graph, model_file, "chroma", [T5], FLUX_VAE)
    data = pictures(graph, vae, clip, "Captions may be of any length: what fills them up is masked exactly.")
    trained = train(graph, "my_chroma_lora", model, data)
    graph.column(
        "Sample with the LoRA",
        360,
        "Sample",
        SAMPLE.format(more="Chroma samples with a **cfg** of 3 to 5 and a negative prompt."),
    )
    positive, negative = prompts(
        graph,
        clip,
        "a photograph of a fox in a misty forest at sunrise",
        "low quality, blurry, unfinished sketch, oversaturated",
    )
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    with_lora = graph.node("LoraModelLoader", model=model[0], lora=trained[0])
    shifted = graph.node("ModelSamplingAuraFlow", model=with_lora[0], shift=1)
    graph.beside()
    sampled = ksampler(graph, shifted, positive[0], negative[0], latent[0], steps=26, cfg=3.5, scheduler="beta")
    picture(graph, sampled[0], vae, "my_chroma_lora")


DESCRIPTIONS = [chroma_lora]
