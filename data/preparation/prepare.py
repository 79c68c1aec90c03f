"""Prepare Dataset: plan the buckets, encode the inputs missing from the cache, and return samples that load lazily."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...common.fingerprint import changed_fields, fingerprint
from ...common.progress import Interrupted, Progress
from ...models.catalogue.registry import text_policy
from ...models.latents import WAN21, WAN22, LatentPolicy, latent_policy
from ...models.text import AS_COMFYUI, PLUS, TextPolicy, check_pair
from ..buckets.plot import describe_cropping, describe_plan
from ..buckets.sizes import SizePlan, plan_sizes
from ..cache import Cache, EncodeJob, check_space, missing_jobs, run_jobs
from ..captions.notes import encoding_notes
from ..captions.variants import CaptionVariants
from ..encode.augmentation import View, view_notes
from ..encode.control_crops import ControlPlan, place_controls
from ..encode.image_variants import (
    ImageKeys,
    ImageVariant,
    VariantJobs,
    images_to_encode,
    make_variants,
    read_masks,
    variant_jobs,
)
from ..encode.text import CaptionKeys, ItemCaptions, tokenize_captions
from ..encode.vae import VaeEncoder
from ..folders.dataset import Dataset
from ..folders.items import Item, find_items
from ..folders.options import UNCHANGED
from ..media.frames import Crop
from ..media.integrity import check_images
from ..media.masks import mask_notes
from ..samples import Preparation, Sample, TrainingData, check_training_samples, shown_per_epoch
from .cached_samples import cached_sample
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

    megapixels: area of an image or of a video's frame; 1 is 1024 · 1024 pixels, see `plan_buckets`.
    max_graphs: the most token counts, unless the data needs more, see `plan_buckets`.
    fit: one of FITS, see `plan_buckets`.
    max_text_length: tokens at which captions are cut, of families that let the user choose it; None for ComfyUI's own
        lengths.
    image_to_video: use each video's first frame as its start image, as the Wan model of this VAE does; with a CLIP
        vision model (Wan 2.1) that frame is encoded by it as well.
    control_megapixels: area of control images, see `place_controls`.
    edit_prompt: prompt template of Qwen-Image-Edit's text encoder for control images, one of EDIT_PROMPTS.
    encode_empty_caption: encode the empty prompt too, for the guidance-preserving loss.
    more_megapixels: further sizes that each image and video is trained at, see `plan_sizes`.
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
    found_items, item_notes = find_items(dataset, progress, interrupted)
    check_items(found_items, text, latents, image_to_video, edit_prompt)
    unsized_items, frame_notes = cut_to_latent_frames(found_items, latents)
    fit, fit_notes = fit_to_models(options.fit, text, latents)
    check_training_samples(item.options.regularisation for item in unsized_items)
    plans = _plan(unsized_items, latents, options, fit)
    items = _sized(unsized_items, plans)
    placements = [placement for size in plans for placement in size.plan.placements]
    control_plans = _control_plans(items, plans, options)
    controls = [item_controls for control_plan in control_plans for item_controls in control_plan.placements]

    encoder = VaeEncoder(vae, latents)
    cache = Cache(cache_dir)
    requested_variants = make_variants(items, placements, controls, encoder)
    # Masks come before captions: a variant that its mask leaves empty is dropped, and its captions with it.
    variants, mask_weights = read_masks(items, placements, requested_variants, cache, progress, interrupted)
    captions = _tokenize(items, variants, clip, text, options, progress, interrupted)
    jobs = variant_jobs(variants, encoder, image_to_video and latents is WAN21, clip_vision)
    seconds = _encode(cache, jobs, captions, _items_noun(items), progress, interrupted)

    keys = [tuple(variant.keys() for variant in item_jobs) for item_jobs in jobs]
    texts = [tuple(caption.keys() for caption in item_captions) for item_captions in captions]
    clean = image_to_video and latents is WAN22
    samples = tuple(
        cached_sample(cache, item, placement, item_controls, item_keys, words, text, clean, latents.tells_frame_rate)
        for item, placement, item_controls, item_keys, words in zip(
            items, placements, controls, keys, texts, strict=True
        )
    )
    notes = (
        *dataset.notes,
        *item_notes,
        *frame_notes,
        *fit_notes,
        *size_notes(unsized_items, plans),
        *(note for size in plans for note in plan_notes(size.plan, options.max_graphs)),
        *cut_notes(unsized_items, _first_captions(plans, captions)),
        *(length_notes(samples) if text.whole_grids else ()),
        *dict.fromkeys(note for control_plan in control_plans for note in control_plan.notes),
        *start_notes(items, latents, image_to_video),
        *mask_notes(mask_weights),
        *regularisation_notes(samples),
        *view_notes(items, _views(requested_variants), _views(variants)),
        *encoding_notes(
            [item.caption_variants for item in unsized_items],
            {job.key: cache.size(job.key) for job in _caption_jobs(captions)},
        ),
    )
    data = TrainingData(
        samples,
        _fingerprint(items, samples, keys, texts),
        notes,
        _made_with(options, fit, dataset),
        text.family,
        _preparation(plans, seconds, cache, keys, texts),
    )
    crops = tuple(variant.crop for item_variants in variants for variant in item_variants)
    return PreparedData(data, plans, notes, crops)


def _plan(items: Sequence[Item], latents: LatentPolicy, options: PrepareOptions, fit: str) -> tuple[SizePlan, ...]:
    """Plan the buckets of each size. fit: as the models of these latents need it."""
    return plan_sizes(
        [item.pixels.size for item in items],
        (options.megapixels, *options.more_megapixels),
        pixels_per_token=latents.pixels_per_token,
        max_graphs=options.max_graphs,
        fit=fit,
        weights=[item.showings_per_epoch for item in items],
        frames=[latents.latent_frames(item.pixels.frames) for item in items],
    )


def _tokenize(
    items: Sequence[Item],
    variants: Sequence[tuple[ImageVariant, ...]],
    clip: Any,
    text: TextPolicy,
    options: PrepareOptions,
    progress: Progress,
    interrupted: Interrupted,
) -> list[tuple[ItemCaptions, ...]]:
    """Tokenize the captions of each variant: text encoders that see control images encode them for each of those."""
    inputs = [
        (item, variant.controls)
        for item, item_variants in zip(items, variants, strict=True)
        for variant in item_variants
    ]
    tokenized = iter(
        tokenize_captions(
            [item for item, _ in inputs],
            [controls for _, controls in inputs],
            clip,
            text,
            text_limit(text, options.max_text_length),
            options.edit_prompt,
            progress,
            interrupted,
            options.encode_empty_caption,
        )
    )
    return [tuple(next(tokenized) for _ in item_variants) for item_variants in variants]


def _encode(
    cache: Cache,
    jobs: Sequence[tuple[VariantJobs, ...]],
    captions: Sequence[tuple[ItemCaptions, ...]],
    noun: str,
    progress: Progress,
    interrupted: Interrupted,
) -> float:
    """Encode what the cache lacks, and return the seconds; 0 if it lacks nothing. noun: of the items, for texts.

    Raises ValueError for a disk that is too small and for damaged images, before the first encoder is loaded.
    """
    variants = [variant for item_jobs in jobs for variant in item_jobs]
    vae_jobs = missing_jobs(cache, [job for variant in variants for job in variant.vae_jobs])
    vision_jobs = missing_jobs(cache, [variant.vision for variant in variants if variant.vision])
    caption_jobs = missing_jobs(cache, _caption_jobs(captions))
    check_space(cache.folder, [*vae_jobs, *vision_jobs, *caption_jobs])
    check_images(images_to_encode(variants, {job.key for job in vae_jobs}), progress, interrupted)
    if not (vae_jobs or vision_jobs or caption_jobs):
        return 0.0
    started = time.monotonic()
    run_jobs(cache, vae_jobs, noun, progress, interrupted)
    run_jobs(cache, vision_jobs, "start frames for CLIP vision", progress, interrupted)
    run_jobs(cache, caption_jobs, "captions", progress, interrupted)
    return time.monotonic() - started


def _caption_jobs(captions: Sequence[tuple[ItemCaptions, ...]]) -> list[EncodeJob]:
    return [
        caption.job
        for item_captions in captions
        for variant_captions in item_captions
        for caption in variant_captions.all_captions
    ]


def _first_captions(plans: Sequence[SizePlan], captions: Sequence[tuple[ItemCaptions, ...]]) -> list[ItemCaptions]:
    """Return the captions of each item's first variant; of several sizes, those of the last, which are the same."""
    members = [index for size in plans for index in size.members]
    first = {index: item_captions[0] for index, item_captions in zip(members, captions, strict=True)}
    return [first[index] for index in sorted(first)]


def _views(variants: Sequence[tuple[ImageVariant, ...]]) -> list[list[View]]:
    return [[variant.view for variant in item_variants] for item_variants in variants]


def _made_with(options: PrepareOptions, fit: str, dataset: Dataset) -> dict[str, Any]:
    """Return the options for the summary of a run; further sizes only if there are any."""
    made_with = {
        "megapixels": options.megapixels,
        "max_graphs": options.max_graphs,
        "fit": fit,
        "max_text_length": AS_COMFYUI if options.max_text_length is None else options.max_text_length,
        "image_to_video": options.image_to_video,
        "control_megapixels": options.control_megapixels,
        "edit_prompt": options.edit_prompt,
        "folders": list(dataset.folders),
    }
    return made_with | ({"more_megapixels": list(options.more_megapixels)} if options.more_megapixels else {})


def _preparation(
    plans: Sequence[SizePlan],
    seconds: float,
    cache: Cache,
    keys: Sequence[tuple[ImageKeys, ...]],
    texts: Sequence[tuple[CaptionKeys, ...]],
) -> Preparation:
    """Describe the cropping of each size, and count the cache that the data take."""
    image_keys = {key for item_keys in keys for variant_keys in item_keys for key in variant_keys.all_keys}
    caption_keys = {key for item_keys in texts for variant_keys in item_keys for key in variant_keys.all_keys}
    cropping = [
        f"At {size.megapixels:g} megapixels: " * (len(plans) > 1) + describe_cropping(size.plan) for size in plans
    ]
    return Preparation(" ".join(cropping), seconds, sum(cache.size(key) for key in image_keys | caption_keys))


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
    plain = [_plain_keys(item_keys[0], words[0]) for item_keys, words in zip(keys, texts, strict=True)]
    parts = [(s.grid, s.tokens, s.repeats, s.references, s.clean_frames) for s in samples]
    variants = [
        _variant_keys(place, item, item_keys, words)
        for place, (item, item_keys, words) in enumerate(zip(items, keys, texts, strict=True))
        if len(item_keys) > 1 or item_keys[0].mask or item.options != UNCHANGED
    ]
    optional_parts = {
        "captions": [
            _form_keys(place, item.caption_variants, words)
            for place, (item, words) in enumerate(zip(items, texts, strict=True))
            if not item.caption_variants.plain
        ],
        "frame rates": [
            item.frame_rate for item, s in zip(items, samples, strict=True) if "frame_rate" in s.conditioning
        ],
        "folders": [(place, item.folder) for place, item in enumerate(items) if item.options.sample_ratio < 1],
    }
    named_parts = [part for name, value in optional_parts.items() if value for part in (name, value)]
    return fingerprint(plain, parts, *([variants] if variants else []), *named_parts)


def _plain_keys(images: ImageKeys, words: CaptionKeys) -> dict[str, Any]:
    """Return the keys of a first variant, as of an item without options."""
    return {
        "latent": images.latent,
        "text": words.forms[0],
        "references": images.references,
        "start": images.start,
        "vision": images.vision,
    }


def _variant_keys(place: int, item: Item, images: Sequence[ImageKeys], words: Sequence[CaptionKeys]) -> tuple[Any, ...]:
    """Return the keys of all variants of an item, and its options."""
    captions = [caption_keys.forms[0] for caption_keys in words]
    return place, [changed_fields(image_keys) for image_keys in images], captions, changed_fields(item.options)


def _form_keys(place: int, variants: CaptionVariants, words: Sequence[CaptionKeys]) -> tuple[Any, ...]:
    """Return the keys of an item's caption variants.

    The empty prompt follows from the encoder; it is part of the data if training shows it.
    """
    used_keys = words if variants.dropout else [replace(caption_keys, empty=None) for caption_keys in words]
    return place, [changed_fields(caption_keys) for caption_keys in used_keys], variants.weights, variants.dropout


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
            shapes_text(prepared.data.graph_keys(), _media_noun(clips, len(frames), "clips and pictures")),
            *prepared.notes,
        ]
    )


def _items_noun(items: Sequence[Item]) -> str:
    """Return the plural noun of the items, for progress texts."""
    return _media_noun(sum(item.pixels.frames > 1 for item in items), len(items), "pictures and clips")


def _media_noun(clips: int, count: int, mixed: str) -> str:
    """Return the plural noun for so many items of which some are clips. mixed: the noun if not all of them are."""
    if not clips:
        return "pictures"
    return "clips" if clips == count else mixed
