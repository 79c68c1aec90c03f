"""The workflows that compile, and stream, a model to sample with."""

from collections.abc import Sequence

from graph import Graph, ModelFile, Node, Output
from parts import PLAIN, WIDE, ksampler, load, note, picture, prompts, video

from .flux import CLIP_L, FLUX, FLUX_VAE, FOX, T5, flux_prompt
from .qwen_image import QWEN_CLIP, QWEN_IMAGE, QWEN_VAE
from .wan import NEGATIVE_CLIP, UMT5, WAN_T2V, WAN_VAE

REPORT_WIDE, REPORT_TALL = 420, 420
TWICE = (
    "Press Run\nThe first {what} compiles, which takes a while; from the second on it is faster. Another size "
    "compiles once more."
)
REPORT = (
    "Read Compile Report\n*graphs* counts what was compiled: it stops growing once each size that you use has run. "
    "*gain* is how much faster a call is.\n\nA LoRA, before or after *Compile Model*, compiles nothing new. **Tune "
    "Compile** in place of it measures the fastest settings for your GPU. {more}"
)
SWAPPED = (
    "Nothing to set\n**blocks_to_swap** -1 keeps as many blocks in the computer's memory as it takes for a picture of "
    "one megapixel. The pictures are the same with and without. To sample without compiling, select *Compile Model* "
    "and press Ctrl+B."
)

SHORT = "Short of memory? Set **blocks_to_swap** to -1."
FLUX_FILES = (FLUX, "flux", (CLIP_L, T5), FLUX_VAE)


def _loaded(
    graph: Graph,
    files: tuple[ModelFile, str, Sequence[ModelFile], ModelFile],
    third: str,
    product: str = "picture",
    swapped: int = 0,
) -> tuple[Node, Node, Node]:
    model_file, kind, clips, vae_file = files
    note(graph, [model_file, *clips, vae_file], PLAIN, second=TWICE.format(what=product), third=third)
    model, clip, vae = load(graph, model_file, kind, list(clips), vae_file, swapped)
    graph.column("Compile", WIDE)
    return graph.node("TesseraCompileModel", model=model[0]), clip, vae


def _flux(graph: Graph, name: str, third: str, swapped: int) -> None:
    compiled, clip, vae = _loaded(graph, FLUX_FILES, third, swapped=swapped)
    graph.column("Prompt", WIDE)
    guided, negative = flux_prompt(graph, clip[0], FOX)
    latent = graph.node("EmptySD3LatentImage", width=1024, height=1024)
    _sampled(graph, name, compiled[0], compiled, (guided, negative, latent[0]), vae[0], steps=20, cfg=1)


def _sampled(
    graph: Graph,
    name: str,
    compiled: Output,
    model: Node,
    inputs: tuple[Output, Output, Output],
    vae: Output,
    sampler: str = "euler",
    **settings: float,
) -> None:
    graph.column("Sample", WIDE)
    latent = ksampler(graph, model, *inputs, sampler=sampler, seed_after="randomize", **settings)
    if name == "wan_compile":
        video(graph, latent[0], vae, name)
    else:
        picture(graph, latent[0], vae, name)
    graph.column("What was compiled", REPORT_WIDE)
    graph.node("TesseraCompileReport", tall=REPORT_TALL, model=compiled, after=latent[0])


def flux_compile(graph: Graph) -> None:
    _flux(graph, "flux_compile", REPORT.format(more=SHORT), 0)


def flux_block_swap(graph: Graph) -> None:
    _flux(graph, "flux_block_swap", SWAPPED, -1)


def qwen_image_compile(graph: Graph) -> None:
    files = (QWEN_IMAGE, "qwen_image", (QWEN_CLIP,), QWEN_VAE)
    hint = f"Prompts have lengths of their own here, so the first picture compiles twice. {SHORT}"
    compiled, clip, vae = _loaded(graph, files, REPORT.format(more=hint))
    words = 'the window of a small bookshop at dusk, with a painted sign that says "Tessera", warm light, rain on the '
    positive, negative = prompts(graph, clip[0], f"{words}pavement", title="Prompt")
    latent = graph.node("EmptySD3LatentImage", width=1328, height=1328)
    shifted = graph.node("ModelSamplingAuraFlow", model=compiled[0], shift=3.1)
    inputs = (positive[0], negative[0], latent[0])
    _sampled(graph, "qwen_image_compile", compiled[0], shifted, inputs, vae[0], steps=20, cfg=4)


def wan_compile(graph: Graph) -> None:
    files = (WAN_T2V, "wan", (UMT5,), WAN_VAE)
    hint = f"The 14B models of Wan 2.1 work as well. {SHORT}"
    compiled, clip, vae = _loaded(graph, files, REPORT.format(more=hint), "video")
    words = "a fox runs through deep snow between pine trees, the camera follows it"
    positive, negative = prompts(graph, clip[0], words, NEGATIVE_CLIP, title="Prompt")
    latent = graph.node("EmptyHunyuanLatentVideo", width=832, height=480, length=33)
    shifted = graph.node("ModelSamplingSD3", model=compiled[0], shift=8)
    inputs = (positive[0], negative[0], latent[0])
    _sampled(graph, "wan_compile", compiled[0], shifted, inputs, vae[0], "uni_pc", steps=30, cfg=6)


DESCRIPTIONS = [flux_block_swap, flux_compile, qwen_image_compile, wan_compile]
