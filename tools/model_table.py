"""Write docs/models.md: a row for every model class of ComfyUI, with how far its training is tested, and the files and
sampling of the models that are known by name.

Run: python dev.py models
The tested tiers come from the tiny models of tests/tiny/native and from the registry of families, the files from
models/native/facts. The last line of the page holds a hash of ComfyUI's classes and of ours, by which a test checks
that it is current.
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"

# Class of comfy.supported_models → title.
TITLES = {
    "LotusD": "Lotus",
    "Stable_Zero123": "Stable Zero123",
    "SD15_instructpix2pix": "InstructPix2Pix of Stable Diffusion 1.5",
    "SD15": "Stable Diffusion 1.5",
    "SD20": "Stable Diffusion 2",
    "SD21UnclipL": "Stable Diffusion 2.1 unCLIP, CLIP-L",
    "SD21UnclipH": "Stable Diffusion 2.1 unCLIP, CLIP-H",
    "SDXL_instructpix2pix": "InstructPix2Pix of SDXL",
    "SDXLRefiner": "SDXL Refiner",
    "SDXL": "SDXL, with Pony, Illustrious, NoobAI, Playground v2.5",
    "SSD1B": "SSD-1B",
    "KOALA_700M": "KOALA 700M",
    "KOALA_1B": "KOALA 1B",
    "Segmind_Vega": "Segmind Vega",
    "SD_X4Upscaler": "Stable Diffusion x4 Upscaler",
    "Stable_Cascade_C": "Stable Cascade, stage C",
    "Stable_Cascade_B": "Stable Cascade, stage B",
    "SV3D_u": "SV3D, orbit by itself",
    "SV3D_p": "SV3D, orbit as given",
    "SD3": "Stable Diffusion 3 and 3.5",
    "StableAudio3": "Stable Audio 3",
    "StableAudio": "Stable Audio",
    "AuraFlow": "AuraFlow",
    "PixArtAlpha": "PixArt-α",
    "PixArtSigma": "PixArt-Σ",
    "HunyuanDiT": "HunyuanDiT 1.2",
    "HunyuanDiT1": "HunyuanDiT 1.0 and 1.1",
    "FluxInpaint": "FLUX.1 Fill",
    "Flux": "FLUX.1 dev and Kontext",
    "LongCatImage": "LongCat-Image",
    "FluxSchnell": "FLUX.1 schnell",
    "GenmoMochi": "Mochi 1",
    "LTXV": "LTX-Video",
    "LTXAV": "LTX-2 and LTX-2.3",
    "MiniMaxH3": "MiniMax H3",
    "HunyuanVideo15_SR_Distilled": "HunyuanVideo 1.5 super resolution",
    "HunyuanVideo15": "HunyuanVideo 1.5",
    "HunyuanImage21Refiner": "HunyuanImage 2.1 refiner",
    "HunyuanImage21": "HunyuanImage 2.1",
    "HunyuanVideoSkyreelsI2V": "SkyReels V1, from a picture",
    "HunyuanVideoI2V": "HunyuanVideo, from a picture",
    "HunyuanVideo": "HunyuanVideo",
    "CosmosT2V": "Cosmos 1, from text",
    "CosmosI2V": "Cosmos 1, from a picture",
    "CosmosT2IPredict2": "Cosmos Predict2, pictures",
    "CosmosI2VPredict2": "Cosmos Predict2, video from a picture",
    "ZImagePixelSpace": "Z-Image in pixel space",
    "ZImage": "Z-Image and Z-Image Turbo",
    "PiD": "PiD, decoder into pixels",
    "PixelDiTT2I": "PixelDiT",
    "Lumina2": "Lumina Image 2.0, with NewBie and NetaYume",
    "WAN22_T2V": "Wan 2.2 5B",
    "WAN21_CausalAR_T2V": "Wan 2.1, causal",
    "WAN21_T2V": "Wan 2.1 and 2.2 14B, from text",
    "WAN21_I2V": "Wan 2.1 and 2.2 14B, from a picture",
    "WAN21_FunControl2V": "Wan 2.1 Fun Control",
    "WAN21_Vace": "Wan 2.1 VACE",
    "WAN21_Camera": "Wan 2.1 Fun Camera",
    "WAN22_Camera": "Wan 2.2 Fun Camera",
    "WAN22_S2V": "Wan 2.2 S2V, from speech",
    "WAN21_HuMo": "HuMo on Wan 2.1",
    "WAN22_Animate": "Wan 2.2 Animate",
    "WAN21_FlowRVS": "FlowRVS on Wan 2.1",
    "WAN21_SCAIL": "SCAIL on Wan 2.1",
    "WAN21_SCAIL2": "SCAIL-2 on Wan 2.1",
    "WAN22_WanDancer": "WanDancer on Wan 2.2",
    "Hunyuan3Dv2mini": "Hunyuan3D 2 mini",
    "Hunyuan3Dv2": "Hunyuan3D 2",
    "Hunyuan3Dv2_1": "Hunyuan3D 2.1",
    "TripoSplat": "TripoSplat",
    "HiDream": "HiDream-I1",
    "HiDreamO1": "HiDream-O1",
    "Chroma": "Chroma",
    "SeedVR2": "SeedVR2",
    "ChromaRadiance": "Chroma Radiance",
    "ACEStep": "ACE-Step",
    "ACEStep15": "ACE-Step 1.5",
    "Omnigen2": "OmniGen2",
    "Boogu": "Boogu-Image",
    "MageFlow": "Mage-Flow",
    "QwenImage": "Qwen-Image and Qwen-Image-Edit",
    "JoyImage": "JoyImage",
    "Ideogram4": "Ideogram 4",
    "Krea2": "Krea 2 and Krea 2 Turbo",
    "Flux2": "FLUX.2",
    "Lens": "Lens",
    "Kandinsky5Image": "Kandinsky 5, pictures",
    "Kandinsky5": "Kandinsky 5, video",
    "Anima": "Anima",
    "RT_DETR_v4": "RT-DETR v4",
    "ErnieImage": "ERNIE-Image",
    "SAM3": "SAM 3",
    "SAM31": "SAM 3.1",
    "CogVideoX_Inpaint": "CogVideoX Fun, inpainting",
    "CogVideoX_I2V": "CogVideoX 1.5, from a picture",
    "CogVideoX_T2V": "CogVideoX, from text",
    "SVD_img2vid": "Stable Video Diffusion",
    "DepthAnything3": "Depth Anything 3",
}
# Class → the folder of the family of our own that claims it.
OWN = {
    "Flux": "flux",
    "FluxSchnell": "flux",
    "Flux2": "flux2",
    "Chroma": "chroma",
    "QwenImage": "qwen-image",
    "WAN21_T2V": "wan",
    "WAN21_I2V": "wan",
    "WAN22_T2V": "wan",
}
# Class → the tiny model that has its forward, and how it differs.
SHARED = {
    "SD15_instructpix2pix": ("sd1.5", "the picture to edit goes beside the latent"),
    "SD21UnclipL": ("sd2", "a picture's embedding goes beside the text"),
    "SD21UnclipH": ("sd2", "a picture's embedding goes beside the text"),
    "SDXL_instructpix2pix": ("sdxl", "the picture to edit goes beside the latent"),
    "SSD1B": ("sdxl", "fewer blocks"),
    "KOALA_700M": ("sdxl", "fewer blocks"),
    "KOALA_1B": ("sdxl", "fewer blocks"),
    "Segmind_Vega": ("sdxl", "fewer blocks"),
    "HunyuanDiT": ("hunyuan-dit", "neither size nor style beside the text"),
    "FluxInpaint": ("flux", "picture and mask go beside the latent"),
    "HunyuanVideoSkyreelsI2V": ("hunyuan-video", "the picture goes beside the latent"),
    "HunyuanVideoI2V": ("hunyuan-video", "picture and mask go beside the latent"),
    "CosmosI2V": ("cosmos", "a mask of the given frames goes beside the latent"),
    "WAN21_FunControl2V": ("wan-i2v", "a control video goes beside the latent"),
    "WAN21_Camera": ("wan-camera", "an image encoder's output goes beside the text"),
    "WAN22_Animate": ("wan-i2v", "a pose is added to the latent and a face between blocks"),
    "WAN21_SCAIL2": ("wan-scail", "masks of the figures are added to the latent"),
    "CogVideoX_Inpaint": ("cogvideox-1.5", "video and mask go beside the latent"),
}
HEAD = """# What trains

This page is made by `python dev.py models`. It has a row for every model class of ComfyUI {version}.

Train LoRA trains what ComfyUI loads to make pictures or video from a caption, except Stable Cascade. A few models have
a **forward of our own**; every other model runs **ComfyUI's own forward**, made safe for training.

| tier | what is tested, on a tiny model of the class |
|---|---|
| own | a forward of our own, with the whole matrix of modes |
| A | as B, and block swap and compiled graphs |
| B | forward, gradients of every target, checkpointing, and that nothing stays from step to step |
| C | has the forward of a model of tier A, B or own, and differs in conditioning or size |
| – | not meant to be trained here, for the reason given |

The training forward of every run is compared with ComfyUI's own before the first step, and again after a resume; where
they differ the run stops. Both run one sample on the weights of the run, without the LoRA: as the run computes, and a
small piece of it in fp32. There one block of twelve that adds 2 % too much shows, be it the first, the middle or the
last; the more blocks a model has, the less each counts. Of each format of weights one layer is compared with ComfyUI's
reading of it. It costs about as much time as two steps, and no second copy of the weights. What it can't
see: a fault that ComfyUI's own forward has too, weights that are wrong in the file, and what only other sizes show than
those of your smallest picture or clip. The gradients are checked by the tests, and
for a model that they don't know by name by a certificate before the first step: `verify` on *Training Memory*, whose
help page says what it checks.

What ComfyUI's own forward can't do and ours can:

- **Ragged edge.** The pictures of a batch are whole grids: some are cut a little more than with a forward of our own.
- **Mixed shapes in one forward.** Pictures of different shapes in one batch run one after the other. The result is the
  same, the step takes longer.
- **Padded captions.** Captions keep the length that the text encoder gives them. Captions of different lengths run one
  after the other too, and each length compiles a graph of its own.

| class in ComfyUI | model | tier | notes |
|---|---|---|---|
"""
LOADING = """
## What to load

Models that train with ComfyUI's own forward and are known by name: the files, and how each is sampled. Where ComfyUI
has a workflow template of the model, they are those of the template; for a scheduler node of its own, such as
LTXVScheduler, the table has what KSampler and *Training Preview* take in its place. *Megapixels* is the size of the
pictures, or of the frames of a clip, that the model was made for: *Prepare Dataset* may have that, or less to train
faster.

| model | file | text encoders (type) | VAE | megapixels | steps | cfg | sampler, scheduler |
|---|---|---|---|---:|---:|---:|---|
"""
NEWER = """
## Newer than the tests

The tests run ComfyUI {version}. Qwen Image 2.1 and LTX-2.5 came later: they are known by name, and tested with classes
of the tests' own that do what their stored sources do. The models below came later too. They train with ComfyUI's own
forward by rule (default layers, noise levels of ComfyUI's class), and nothing of them is tested by name. Of
Wan-Animate 2 (`WAN_Animate2`) and Ming Image (`MingImage`) the name of the class is published; of the others no package
tells it. Files and sampling are those of ComfyUI's workflow templates of October 2026. SenseNova U1.5 (`SenseNovaU15`)
has no template among them. Nothing is known here of PAN 2 and MiniMax-H3-Image, which came after those templates.
Qwen Image 2.1, LTX-2.5 and FLUX 3 Klein, the most used of the newer ones, have workflows (`qwen_image21_lora`,
`ltx2_5_lora`, `flux3_klein_lora`) with the files and sampling of those templates; none was tried on its model.

| model | file | text encoders (type) | VAE | megapixels | steps | cfg | sampler, scheduler |
|---|---|---|---|---:|---:|---:|---|
"""
INSIDE = "in the file"
COUNTS = "{own} classes have a forward of our own, {A} are in tier A, {B} in B, {C} in C; {none} do not train here."


def refused() -> Mapping[str, str]:
    """Look up the classes that Train LoRA refuses, with the reason."""
    from tessera.models.native.facts.untrained import UNTRAINED

    return UNTRAINED


def table(classes: Sequence[type], rows: Sequence[Any], families: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield class, tier and notes of each class.

    rows: of tests/tiny/native; families: title of each family of our own by its name. Raises ValueError for a class
    that no table here knows.
    """
    tested: dict[str, list[Any]] = {}
    for row in rows:
        tested.setdefault(row.model, []).append(row)
    row_names = {row.name for row in rows}
    for kind in classes:
        name = kind.__name__
        if name not in TITLES:
            raise ValueError(f"{name} is new in ComfyUI; give it a title and a tier in tools/model_table.py.")
        if name in OWN:
            yield name, "own", f"as {families[OWN[name]]}"
        elif name in tested:
            row, *other_rows = tested[name]
            yield name, row.tier, row.left_out.get("training") or _notes(row, *(other.name for other in other_rows))
        elif name in SHARED:
            like, difference = SHARED[name]
            assert like in row_names, like
            yield name, "C", f"as `{like}`; {difference}"
        elif name in refused():
            yield name, "–", refused()[name]
        else:
            raise ValueError(f"{name} has no tier; give it one in tools/model_table.py.")


def _notes(row: Any, *other_names: str) -> str:
    """other_names: names of further tiny models of the same class."""
    notes = [", ".join(f"`{name}`" for name in (row.name, *other_names))]
    if not row.batches:
        notes.append("one sample at a time")
    if row.audio is not None:
        notes.append("its sound is noised silence, left out of the loss")
    notes += [f"no {axis}: {reason}" for axis, reason in row.left_out.items()]
    return "; ".join(notes)


def loading(models: Sequence[Any]) -> Iterator[str]:
    """Yield a line for each release of the named models (ModelFacts): what to load, and how to sample it."""
    for facts in models:
        for release in facts.releases:
            encoders = " ".join(f"`{name}`" for name in facts.encoders) or INSIDE
            encoders += f" ({facts.clip_type})" if facts.clip_type else ""
            vae = f"`{facts.vae}`" if facts.vae else INSIDE if release.checkpoint else "`pixel_space`"
            is_untitled = release.distilled and "Distilled" not in release.title
            title = f"{release.title}, distilled" if is_untitled else release.title
            sampling = release.sampling
            numbers = f"{facts.megapixels:g} | {sampling.steps} | {sampling.cfg:g}"
            sampler = f"{sampling.sampler}, {sampling.scheduler}"
            yield f"| {title} | `{release.file}` | {encoders} | {vae} | {numbers} | {sampler} |"


def page(
    version: str,
    classes: Sequence[type],
    rows: Sequence[Any],
    families: Mapping[str, str],
    models: Sequence[Any],
    by_rule: Sequence[Any],
) -> str:
    """Make the text of docs/models.md.

    by_rule: models that only their files are known of.
    """
    lines, counts = [], dict.fromkeys(("own", "A", "B", "C", "–"), 0)
    for name, tier, notes in table(classes, rows, families):
        lines.append(f"| `{name}` | {TITLES[name]} | {tier} | {notes} |")
        counts[tier] += 1
    summary = COUNTS.format(**{name: counts[name] for name in "ABC"}, own=counts["own"], none=counts["–"])
    mark = f"<!-- classes: {fingerprint(classes, rows, families)} -->"
    files = LOADING + "\n".join(loading(models)) + "\n" + NEWER.format(version=version) + "\n".join(loading(by_rule))
    return "\n".join((HEAD.format(version=version) + "\n".join(lines), "", summary, files, "", mark, ""))


def fingerprint(classes: Sequence[type], rows: Sequence[Any], families: Mapping[str, str]) -> str:
    """Hash ComfyUI's model classes, the tiny models of them and the families of our own."""
    parts = [inspect.getsource(kind) for kind in classes]
    parts += [f"{row.name} {row.model} {row.tier} {_notes(row)}" for row in rows]
    parts += [f"{name} {title}" for name, title in sorted(families.items())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make_page() -> str:
    """Make the page of the ComfyUI and the pack that are loaded."""
    import comfy.supported_models
    import comfyui_version
    from tessera.models.catalogue.registry import FAMILIES
    from tessera.models.native.facts.lookup import NAMED
    from tessera.models.native.facts.newer import BY_RULE
    from tiny.native import ROWS

    families = {family.name: family.title for family in FAMILIES}
    return page(comfyui_version.__version__, comfy.supported_models.models, ROWS, families, NAMED, BY_RULE)


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    import with_comfyui  # noqa: F401

    text = make_page()
    PAGE.parent.mkdir(exist_ok=True)
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")
        print(f"Wrote {PAGE.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
