"""From a data set to training data: plan the grids, encode what is not in the cache yet, hand out lazy samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..models.latents import WAN21, WAN22, latent_policy
from ..models.text import PLUS, TextPolicy, check_pair, text_policy
from .cache import Cache
from .captions import read_captions
from .clip_vision import SEEN, vision_output
from .controls import place_controls
from .data import Sample, SampleTensors, TrainingData
from .dataset import Dataset
from .fingerprint import fingerprint
from .items import Item, find_items
from .jobs import Interrupted, Job, Progress, check_space, encode, lacking
from .picture_jobs import PictureEncoder, vision_job
from .plan_picture import describe_plan
from .suitability import check_items, check_options, plan_notes, start_notes
from .tokens import BucketPlan, Placement, plan_buckets


@dataclass(frozen=True)
class PreparedData:
    """What Prepare Dataset gives. sizes: (height, width) in pixels of each picture or clip, in the order of the
    samples."""

    data: TrainingData
    plan: BucketPlan
    sizes: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Keys:
    """Where the parts of one sample are in the cache."""

    latent: str
    text: str
    references: tuple[str, ...] = ()
    start: str | None = None
    vision: str | None = None


def prepare(
    dataset: Dataset,
    vae: Any,
    clip: Any,
    *,
    megapixels: float,
    max_graphs: int,
    fit: str,
    max_text_length: int,
    cache_dir: Path,
    clip_vision: Any = None,
    image_to_video: bool = False,
    control_megapixels: float = 1.0,
    edit_prompt: str = PLUS,
    progress: Progress = lambda done, total, text: None,
    interrupted: Interrupted = lambda: None,
) -> PreparedData:
    """Encode a data set with a ComfyUI VAE and CLIP.

    The encoders and all files are checked before anything is encoded; an encoder is loaded only if the cache lacks
    something of it: the VAE for all pictures, clips, start frames and control pictures first, then the CLIP vision
    model, then the CLIP for all captions. `interrupted` is called before each and may raise; what is encoded by then
    stays in the cache.
    image_to_video: each clip's first frame is its start picture, in the way of the Wan model of that VAE; with
        clip_vision (Wan 2.1) it is seen by that as well.
    control_megapixels: the size of control pictures, which take whole grids: at `megapixels` the grids of the results
        whose shape they have, else those of one token count (see place_controls).
    edit_prompt: how Qwen-Image-Edit's text encoder is told of the control pictures, one of EDIT_PROMPTS.
    Raises ValueError for encoders of another family, unreadable files, what does not go together, values out of range
    and a disk that is too small, and core's out-of-memory error where something does not fit through the VAE whole.
    """
    text, latents = text_policy(clip), latent_policy(vae)
    check_pair(text, latents)
    check_options(text, latents, max_text_length, clip_vision, image_to_video, edit_prompt)
    if not dataset.entries:
        raise ValueError("The data set is empty; connect Training Images or Training Clips.")
    items, item_notes = find_items(dataset, progress, interrupted)
    check_items(items, text, latents, image_to_video, edit_prompt)
    sizes = tuple(item.pixels.size for item in items)
    plan = plan_buckets(
        sizes,
        megapixels=megapixels,
        pixels_per_token=latents.pixels_per_token,
        max_graphs=max_graphs,
        fit=fit,
        weights=[item.repeats for item in items],
        frames=[latents.latent_frames(item.pixels.frames) for item in items],
    )
    encoder = PictureEncoder(vae, latents)
    cuts = [encoder.cut(item.pixels, placement) for item, placement in zip(items, plan.placements, strict=True)]
    control_plan = place_controls(
        items, plan, megapixels=megapixels, control_megapixels=control_megapixels, max_graphs=max_graphs
    )
    placed = control_plan.placements
    controls = [
        tuple(encoder.cut(pixels, placement) for pixels, placement in zip(item.controls, of, strict=True))
        for item, of in zip(items, placed, strict=True)
    ]
    captions = read_captions(
        items, controls, clip, text, max_text_length if text.lengths else None, edit_prompt, progress, interrupted
    )

    pictures = [encoder.latent(cut) for cut in cuts]
    references = [[encoder.latent(cut) for cut in of] for of in controls]
    starts = [encoder.start(cut) if image_to_video and latents is WAN21 else None for cut in cuts]
    seen = [
        vision_job(clip_vision, cut) if start and clip_vision else None for cut, start in zip(cuts, starts, strict=True)
    ]
    cache = Cache(cache_dir)
    vae_jobs = [*pictures, *(job for of in references for job in of), *(job for job in starts if job)]
    work = [
        (lacking(cache, vae_jobs), _what(items)),
        (lacking(cache, [job for job in seen if job]), "start frames for CLIP vision"),
        (lacking(cache, [caption.job for caption in captions]), "captions"),
    ]
    check_space(cache_dir, [job for jobs, _ in work for job in jobs])
    for jobs, what in work:
        encode(cache, jobs, what, progress, interrupted)

    keys = [
        _Keys(latent.key, caption.job.key, tuple(job.key for job in of), _key(start), _key(vision))
        for latent, caption, of, start, vision in zip(pictures, captions, references, starts, seen, strict=True)
    ]
    clean = image_to_video and latents is WAN22
    samples = tuple(
        _sample(cache, item, placement, of, one, text, clean)
        for item, placement, of, one in zip(items, plan.placements, placed, keys, strict=True)
    )
    notes = (
        *dataset.notes,
        *item_notes,
        *plan_notes(items, captions, plan, text, max_graphs, max_text_length, control_megapixels, edit_prompt),
        *control_plan.notes,
        *start_notes(items, latents, image_to_video, clip_vision),
    )
    parts = [(s.grid, s.tokens, s.repeats, s.references, s.clean_frames) for s in samples]
    data = TrainingData(samples, fingerprint([vars(one) for one in keys], parts), notes)
    return PreparedData(data, plan, sizes, notes)


def summary(prepared: PreparedData) -> str:
    """The preparation in a few lines: how much there is, what is cropped, which graphs training will compile."""
    samples, keys = prepared.data.samples, prepared.data.graph_keys()
    shapes = " and ".join(" + ".join(map(str, (tokens, *references, length))) for tokens, references, length in keys)
    clips = sum(sample.grid[0] > 1 for sample in samples)
    counted = {"Pictures": len(samples) - clips, "Clips": clips}
    contents = ", ".join(f"{noun}: {count}" for noun, count in counted.items() if count)
    parts = " + control pictures" if any(sample.references for sample in samples) else ""
    return "\n".join(
        [
            f"{contents}, seen per epoch with repeats: {sum(sample.repeats for sample in samples)}.",
            describe_plan(prepared.plan),
            f"Each kind of block is compiled for {len(keys)} of (picture{parts} + caption) tokens: {shapes}.",
            *prepared.notes,
        ]
    )


def _key(job: Job | None) -> str | None:
    return None if job is None else job.key


def _what(items: Sequence[Item]) -> str:
    clips = sum(item.pixels.frames > 1 for item in items)
    return "pictures" if not clips else "clips" if clips == len(items) else "pictures and clips"


def _sample(
    cache: Cache,
    item: Item,
    placement: Placement,
    controls: tuple[Placement, ...],
    keys: _Keys,
    text: TextPolicy,
    clean: bool,
) -> Sample:
    grid = placement.grid
    encoded = cache.shapes(keys.text)
    carried = {*(encoded.keys() - {"cond"})}
    carried |= {"reference_latents"} if keys.references else set()
    carried |= {"concat_latent_image", "concat_mask"} if keys.start else set()
    carried |= {"clip_vision_output"} if keys.vision else set()
    return Sample(
        name=item.name,
        grid=(grid.frames, grid.height, grid.width),
        tokens=placement.tokens,
        text_length=text.model_length(encoded["cond"][1]),
        load=partial(_load, cache, item.name, keys),
        repeats=item.repeats,
        references=tuple(control.tokens for control in controls),
        clean_frames=1 if clean and grid.frames > 1 else 0,
        conditioning=frozenset(carried),
    )


def _load(cache: Cache, name: str, keys: _Keys) -> SampleTensors:
    try:
        latent, text = cache.read(keys.latent)["latent"], cache.read(keys.text)
        conditioning: dict[str, Any] = {part: tensor for part, tensor in text.items() if part != "cond"}
        if keys.references:
            conditioning["reference_latents"] = [cache.read(key)["latent"][None] for key in keys.references]
        if keys.start:
            conditioning |= cache.read(keys.start)
        if keys.vision:
            conditioning["clip_vision_output"] = vision_output(cache.read(keys.vision)[SEEN])
    except FileNotFoundError as error:
        raise ValueError(
            f"The encoded data of {name!r} is gone from the cache folder; free ComfyUI's node cache (or restart it) "
            f"and queue again, so that Prepare Dataset encodes it anew."
        ) from error
    return SampleTensors(latent, text["cond"], conditioning)
