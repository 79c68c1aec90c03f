"""Prepare Dataset: plan the buckets, encode the inputs missing from the cache, and return samples that load lazily."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...common.fingerprint import changed_fields, fingerprint
from ...common.progress import Interrupted, Progress
from ...models.catalogue.registry import text_policy
from ...models.latents import WAN21, WAN22, latent_policy
from ...models.text import AS_COMFYUI, PLUS, TextPolicy, check_pair
from ..buckets.grids import Placement
from ..buckets.plot import describe_cropping, describe_plan
from ..buckets.sizes import SizePlan, plan_sizes
from ..cache import Cache, check_space, missing_jobs, run_jobs
from ..captions.notes import encoding_notes
from ..encode.augmentation import view_notes
from ..encode.clip_vision import HIDDEN_STATES, vision_output
from ..encode.control_crops import ControlPlan, place_controls
from ..encode.image_variants import (
    ImageKeys,
    images_to_encode,
    make_variants,
    read_masks,
    variant_jobs,
)
from ..encode.text import CaptionKeys, tokenize_captions
from ..encode.vae import VaeEncoder
from ..folders.dataset import Dataset
from ..folders.items import Item, find_items
from ..folders.options import UNCHANGED
from ..media.frames import Crop, ImagePixels, VideoPixels
from ..media.integrity import check_images
from ..media.masks import TOKENS, mask_notes, token_weights
from ..samples import (
    FIRST_VARIANT,
    Preparation,
    Prompt,
    Sample,
    SampleTensors,
    SampleVariant,
    TrainingData,
    check_training_samples,
    shown_per_epoch,
)
from .checks import (
    check_items,
    check_options,
    cut_notes,
    cut_to_latent_frames,
    fit_to_models,
    length_notes,
    plan_notes,
    regularisation_notes,
    shapes_text,
    size_notes,
    start_notes,
    text_limit,
)


@dataclass(frozen=True)
class PreparedData:
    """Result of Prepare Dataset.

    data: samples for training, those of each size after those of the size before.
    plans: buckets of each size.
    notes: hints to the user.
    crops: parts of the images and videos that are trained on, one or more of each.
    """

    data: TrainingData
    plans: tuple[SizePlan, ...]
    notes: tuple[str, ...]
    crops: tuple[Crop, ...] = ()


@dataclass(frozen=True)
class PrepareOptions:
    """Options of Prepare Dataset.

    megapixels, max_graphs, fit: see `plan_buckets`.
    more_megapixels: further sizes that each image and video is trained at, see `plan_sizes`.
    max_text_length: tokens at which captions are cut, of families that let the user choose it; None for ComfyUI's own
        lengths.
    image_to_video: use each video's first frame as its start image, as the Wan model of this VAE does; with a CLIP
        vision model (Wan 2.1) that frame is encoded by it as well.
    control_megapixels: area of control images, see `place_controls`.
    edit_prompt: prompt template of Qwen-Image-Edit's text encoder for control images, one of EDIT_PROMPTS.
    encode_empty_caption: encode the empty prompt too, for the guidance-preserving loss.
    """

    megapixels: float
    max_graphs: int
    fit: str
    max_text_length: int | None = None
    image_to_video: bool = False
    control_megapixels: float = 1.0
    edit_prompt: str = PLUS
    encode_empty_caption: bool = False
    more_megapixels: tuple[float, ...] = ()


def prepare(
    dataset: Dataset,
    vae: Any,
    clip: Any,
    options: PrepareOptions,
    cache_dir: Path,
    *,
    clip_vision: Any = None,
    progress: Progress = lambda completed, total, text: None,
    interrupted: Interrupted = lambda: None,
) -> PreparedData:
    """Encode a data set with a ComfyUI VAE and CLIP.

    Encoders and files are checked before anything is encoded; images that have to be encoded are decoded to their end.
    An encoder is loaded only if the cache lacks something of it. The order is: VAE (images, videos, start frames,
    control images), CLIP vision model, text encoders. `interrupted` is called before each job and may raise; finished
    jobs stay in the cache.

    cache_dir: folder of the cache.
    clip_vision: None encodes no start frames by it.

    Raises ValueError for encoders of different families, unreadable files, contradicting options, values out of range
    and a disk that is too small.
    Raises core's out-of-memory error if something does not fit through the VAE untiled.
    """
    text, latents = text_policy(clip), latent_policy(vae)
    check_pair(text, latents)
    image_to_video, edit_prompt = options.image_to_video, options.edit_prompt
    check_options(text, latents, options.max_text_length, clip_vision, image_to_video, edit_prompt)
    if not dataset.entries:
        raise ValueError("The data set is empty; connect Training Images or Training Clips.")
    items, item_notes = find_items(dataset, progress, interrupted)
    check_items(items, text, latents, image_to_video, edit_prompt)
    items, frame_notes = cut_to_latent_frames(items, latents)
    fit, fit_notes = fit_to_models(options.fit, text, latents)
    check_training_samples(item.options.regularisation for item in items)
    plans = plan_sizes(
        [item.pixels.size for item in items],
        (options.megapixels, *options.more_megapixels),
        pixels_per_token=latents.pixels_per_token,
        max_graphs=options.max_graphs,
        fit=fit,
        weights=[item.showings_per_epoch for item in items],
        frames=[latents.latent_frames(item.pixels.frames) for item in items],
    )
    unsized_items = items
    items = _sized(items, plans)
    placements = [placement for size in plans for placement in size.plan.placements]
    encoder = VaeEncoder(vae, latents)
    control_plans = _control_plans(items, plans, options)
    placed = [controls for control_plan in control_plans for controls in control_plan.placements]
    cache = Cache(cache_dir)
    requested_variants = make_variants(items, placements, placed, encoder)
    # Masks come before captions: a variant that its mask leaves empty is dropped, and its captions with it.
    variants, counted = read_masks(items, placements, requested_variants, cache, progress, interrupted)
    # Text encoders that see control images encode the captions again for each variant of those.
    caption_inputs = [
        (item, variant.controls)
        for item, item_variants in zip(items, variants, strict=True)
        for variant in item_variants
    ]
    tokenized = iter(
        tokenize_captions(
            [item for item, _ in caption_inputs],
            [controls for _, controls in caption_inputs],
            clip,
            text,
            text_limit(text, options.max_text_length),
            edit_prompt,
            progress,
            interrupted,
            options.encode_empty_caption,
        )
    )
    captions = [tuple(next(tokenized) for _ in item_variants) for item_variants in variants]

    jobs = variant_jobs(variants, encoder, image_to_video and latents is WAN21, clip_vision)
    flat_jobs = [variant for item_jobs in jobs for variant in item_jobs]
    caption_jobs = [
        caption.job
        for item_captions in captions
        for variant_captions in item_captions
        for caption in variant_captions.all_captions
    ]
    work = [
        (missing_jobs(cache, [job for variant in flat_jobs for job in variant.vae_jobs]), _items_noun(items)),
        (
            missing_jobs(cache, [variant.vision for variant in flat_jobs if variant.vision]),
            "start frames for CLIP vision",
        ),
        (missing_jobs(cache, caption_jobs), "captions"),
    ]
    # Both checks come before the first encoder is loaded, so that a full disk or a damaged file fails early.
    check_space(cache_dir, [job for jobs, _ in work for job in jobs])
    check_images(images_to_encode(flat_jobs, {job.key for job in work[0][0]}), progress, interrupted)
    started = time.monotonic()
    for missing, noun in work:
        run_jobs(cache, missing, noun, progress, interrupted)
    seconds = time.monotonic() - started if any(missing for missing, _ in work) else 0.0

    keys = [tuple(variant.keys() for variant in item_jobs) for item_jobs in jobs]
    texts = [tuple(caption.keys() for caption in item_captions) for item_captions in captions]
    clean = image_to_video and latents is WAN22
    takes_frame_rate = latents.tells_frame_rate
    samples = tuple(
        _sample(cache, item, placement, control_placements, item_keys, words, text, clean, takes_frame_rate)
        for item, placement, control_placements, item_keys, words in zip(
            items, placements, placed, keys, texts, strict=True
        )
    )
    members = [index for size in plans for index in size.members]
    first_captions = {index: item_captions[0] for index, item_captions in zip(members, captions, strict=True)}
    notes = (
        *dataset.notes,
        *item_notes,
        *frame_notes,
        *fit_notes,
        *size_notes(unsized_items, plans),
        *(note for size in plans for note in plan_notes(size.plan, options.max_graphs)),
        *cut_notes(unsized_items, [first_captions[index] for index in range(len(unsized_items))]),
        *(length_notes(samples) if text.whole_grids else ()),
        *dict.fromkeys(note for control_plan in control_plans for note in control_plan.notes),
        *start_notes(items, latents, image_to_video),
        *mask_notes(counted),
        *regularisation_notes(samples),
        *view_notes(
            items,
            *(
                [[variant.view for variant in item_variants] for item_variants in selection]
                for selection in (requested_variants, variants)
            ),
        ),
        *encoding_notes(
            [item.caption_variants for item in unsized_items], {job.key: cache.size(job.key) for job in caption_jobs}
        ),
    )
    made_with = {
        "megapixels": options.megapixels,
        "max_graphs": options.max_graphs,
        "fit": fit,
        "max_text_length": AS_COMFYUI if options.max_text_length is None else options.max_text_length,
        "image_to_video": image_to_video,
        "control_megapixels": options.control_megapixels,
        "edit_prompt": edit_prompt,
        "folders": list(dataset.folders),
    }
    if options.more_megapixels:
        made_with["more_megapixels"] = list(options.more_megapixels)
    image_keys = (key for item_keys in keys for variant_keys in item_keys for key in variant_keys.all_keys)
    caption_keys = (key for item_keys in texts for variant_keys in item_keys for key in variant_keys.all_keys)
    preparation = Preparation(
        cropping=" ".join(
            f"At {size.megapixels:g} megapixels: " * (len(plans) > 1) + describe_cropping(size.plan) for size in plans
        ),
        seconds=seconds,
        cache_bytes=sum(cache.size(key) for key in {*image_keys, *caption_keys}),
    )
    data = TrainingData(samples, _fingerprint(items, samples, keys, texts), notes, made_with, text.family, preparation)
    return PreparedData(
        data, plans, notes, tuple(variant.crop for item_variants in variants for variant in item_variants)
    )


def _sized(items: Sequence[Item], plans: Sequence[SizePlan]) -> tuple[Item, ...]:
    """Return the items of each plan, one plan after another. With several plans their names tell the size."""
    if len(plans) == 1:
        return tuple(items[index] for index in plans[0].members)
    return tuple(
        replace(item, name=f"{item.name} at {size.megapixels:g} megapixels", file=item.file or item.name)
        for size in plans
        for item in (items[index] for index in size.members)
    )


def _control_plans(items: Sequence[Item], plans: Sequence[SizePlan], options: PrepareOptions) -> list[ControlPlan]:
    """Place the control images of each size. At a `control_megapixels` equal to `megapixels` they follow the size."""
    follow = options.control_megapixels == options.megapixels
    rest = iter(items)
    return [
        place_controls(
            [next(rest) for _ in size.members],
            size.plan,
            megapixels=size.megapixels if follow else options.megapixels,
            control_megapixels=size.megapixels if follow else options.control_megapixels,
            max_graphs=options.max_graphs,
        )
        for size in plans
    ]


def _fingerprint(
    items: Sequence[Item],
    samples: Sequence[Sample],
    keys: Sequence[tuple[ImageKeys, ...]],
    texts: Sequence[tuple[CaptionKeys, ...]],
) -> str:
    """Fingerprint the data set; options at their default are left out, so a new option renames no existing data set."""
    plain = [
        {
            "latent": item_keys[0].latent,
            "text": words[0].forms[0],
            "references": item_keys[0].references,
            "start": item_keys[0].start,
        }
        | {"vision": item_keys[0].vision}
        for item_keys, words in zip(keys, texts, strict=True)
    ]
    parts = [(s.grid, s.tokens, s.repeats, s.references, s.clean_frames) for s in samples]
    variant_parts = [
        (
            place,
            [changed_fields(image_keys) for image_keys in item_keys],
            [caption_keys.forms[0] for caption_keys in words],
            changed_fields(item.options),
        )
        for place, (item, item_keys, words) in enumerate(zip(items, keys, texts, strict=True))
        if len(item_keys) > 1 or item_keys[0].mask or item.options != UNCHANGED
    ]
    captions = [
        (
            place,
            [changed_fields(caption_keys) for caption_keys in used_keys],
            item.caption_variants.weights,
            item.caption_variants.dropout,
        )
        for place, (item, words) in enumerate(zip(items, texts, strict=True))
        # The empty prompt follows from the encoder; it is part of the data if training shows it.
        for used_keys in [
            words if item.caption_variants.dropout else [replace(caption_keys, empty=None) for caption_keys in words]
        ]
        if not item.caption_variants.plain
    ]
    rates = [item.frame_rate for item, s in zip(items, samples, strict=True) if "frame_rate" in s.conditioning]
    folders = [(place, item.folder) for place, item in enumerate(items) if item.options.sample_ratio < 1]
    optional_parts = {"captions": captions, "frame rates": rates, "folders": folders}
    named_parts = [part for name, value in optional_parts.items() if value for part in (name, value)]
    return fingerprint(plain, parts, *([variant_parts] if variant_parts else []), *named_parts)


def summary(prepared: PreparedData) -> str:
    """Summarise the preparation in a few lines: number of samples, crop loss, graphs to be compiled, and notes."""
    samples = prepared.data.samples
    plans = prepared.plans
    frames = {
        index: placement.grid.frames
        for size in plans
        for index, placement in zip(size.members, size.plan.placements, strict=True)
    }
    clips = sum(count > 1 for count in frames.values())
    counted = {"Pictures": len(frames) - clips, "Clips": clips}
    contents = ", ".join(f"{noun}: {count}" for noun, count in counted.items() if count)
    several = f" At {len(plans)} sizes that makes {len(samples)} to train on." if len(plans) > 1 else ""
    return "\n".join(
        [
            f"{contents}.{several} One epoch shows {shown_per_epoch(samples)}, repeats included.",
            *(
                f"Size of {size.megapixels:g} megapixels: " * (len(plans) > 1) + describe_plan(size.plan)
                for size in plans
            ),
            shapes_text(prepared.data.graph_keys(), _media_noun(clips, len(frames))),
            *prepared.notes,
        ]
    )


def _items_noun(items: Sequence[Item]) -> str:
    """Return the plural noun of the items, for progress texts."""
    return _media_noun(sum(item.pixels.frames > 1 for item in items), len(items))


def _media_noun(clips: int, count: int) -> str:
    """Return the plural noun for so many items of which some are clips."""
    if not clips:
        return "pictures"
    return "clips" if clips == count else "pictures and clips"


def _sample(
    cache: Cache,
    item: Item,
    placement: Placement,
    controls: tuple[Placement, ...],
    keys: tuple[ImageKeys, ...],
    texts: tuple[CaptionKeys, ...],
    text: TextPolicy,
    clean: bool,
    takes_frame_rate: bool,
) -> Sample:
    """Make the lazy sample of one item; text length and conditioning are read from the headers of the cached files."""
    grid = placement.grid
    forms = texts if item.caption_variants.dropout else [replace(caption_keys, empty=None) for caption_keys in texts]
    encoded = [
        cache.shapes(key) for key in dict.fromkeys(key for caption_keys in forms for key in caption_keys.all_keys)
    ]
    empties = [
        cache.shapes(key)["cond"][1] for key in dict.fromkeys(caption_keys.empty for caption_keys in texts) if key
    ]
    lengths = sorted({shapes["cond"][1] for shapes in encoded})
    carried = {*set[str]().union(*encoded) - {"cond"}}
    carried |= {"reference_latents"} if keys[0].references else set()
    carried |= {"concat_latent_image", "concat_mask"} if keys[0].start else set()
    carried |= {"clip_vision_output"} if keys[0].vision else set()
    rate = item.frame_rate if takes_frame_rate and grid.frames > 1 else None
    carried |= {"frame_rate"} if rate else set()
    return Sample(
        name=item.name,
        grid=(grid.frames, grid.height, grid.width),
        tokens=placement.tokens,
        text_length=text.shared_length(lengths),
        text_lengths=tuple(lengths) if text.whole_grids else (),
        load=partial(_load, cache, item, placement, keys, texts, rate),
        repeats=item.repeats,
        references=tuple(control.tokens for control in controls),
        clean_frames=1 if clean and grid.frames > 1 else 0,
        conditioning=frozenset(carried),
        image_variants=len(keys),
        loss_weight=item.options.loss_weight,
        regularisation=item.options.regularisation,
        file=item.file,
        caption_variants=len(texts[0].forms),
        caption_weights=item.caption_variants.weights,
        caption_dropout=item.caption_variants.dropout,
        class_caption=bool(item.caption_variants.class_texts),
        empty_length=text.shared_length(empties) if empties else 0,
        sample_ratio=item.options.sample_ratio,
        folder=item.folder,
        path=item.pixels.path if isinstance(item.pixels, ImagePixels | VideoPixels) else None,
    )


def _load(
    cache: Cache,
    item: Item,
    placement: Placement,
    variants: tuple[ImageKeys, ...],
    texts: tuple[CaptionKeys, ...],
    frame_rate: float | None,
    variant: SampleVariant = FIRST_VARIANT,
) -> SampleTensors:
    """Read the tensors of one variant of a sample from the cache.

    Raises ValueError if a cached file was deleted since Prepare Dataset ran.
    """
    keys, words = variants[variant.image], texts[variant.image]
    try:
        latent, text = cache.read(keys.latent)["latent"], cache.read(words.key(variant.caption))
        image_conditioning: dict[str, Any] = {"frame_rate": frame_rate} if frame_rate else {}
        if keys.references:
            image_conditioning["reference_latents"] = [cache.read(key)["latent"][None] for key in keys.references]
        if keys.start:
            image_conditioning |= cache.read(keys.start)
        if keys.vision:
            image_conditioning["clip_vision_output"] = vision_output(cache.read(keys.vision)[HIDDEN_STATES])
        mask = cache.read(keys.mask)[TOKENS] if keys.mask else None
        class_key = words.class_key(variant.caption) if variant.class_caption else None
        class_prompt = None if class_key is None else _prompt(cache.read(class_key), image_conditioning)
        empty = _prompt(cache.read(words.key(None)), image_conditioning) if variant.empty_caption else None
    except FileNotFoundError as error:
        raise ValueError(
            f"The encoded data of {item.name!r} is gone from the cache folder; free ComfyUI's node cache (or restart "
            "ComfyUI) and queue again, so that Prepare Dataset encodes it again."
        ) from error
    weights = None if mask is None else token_weights(mask, placement, item.options.unmasked_weight)
    prompt = _prompt(text, image_conditioning)
    return SampleTensors(latent, prompt.text, prompt.conditioning, weights, class_prompt, empty)


def _prompt(encoded: dict[str, Tensor], image_conditioning: dict[str, Any]) -> Prompt:
    """Join an encoded caption with the conditioning that comes from the images. Numbers are stored without axes."""
    parts = {part: tensor if tensor.ndim else tensor.item() for part, tensor in encoded.items() if part != "cond"}
    return Prompt(encoded["cond"], parts | image_conditioning)
