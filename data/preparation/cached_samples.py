"""Samples of encoded data, whose tensors are read from the cache when a batch needs them."""

from dataclasses import replace
from functools import partial
from typing import Any

from ...models.text import TextPolicy
from ..buckets.grids import Placement
from ..cache import Cache
from ..encode.clip_vision import HIDDEN_STATES, vision_output
from ..encode.image_variants import ImageKeys
from ..encode.prompts import as_prompt
from ..encode.text import CaptionKeys
from ..folders.items import Item
from ..media.frames import ImagePixels, VideoPixels
from ..media.masks import TOKENS, token_weights
from ..samples import FIRST_VARIANT, Sample, SampleTensors, SampleVariant


def cached_sample(
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
    rate = item.frame_rate if takes_frame_rate and grid.frames > 1 else None
    conditioning = set[str]().union(*encoded) - {"cond"} | _image_conditioning(keys[0])
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
        conditioning=frozenset(conditioning | ({"frame_rate"} if rate else set())),
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


def _image_conditioning(keys: ImageKeys) -> set[str]:
    """Return the names of the conditioning that an image brings along besides its caption."""
    names: set[str] = set()
    if keys.references:
        names.add("reference_latents")
    if keys.start:
        names |= {"concat_latent_image", "concat_mask"}
    if keys.vision:
        names.add("clip_vision_output")
    return names


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
        class_prompt = None if class_key is None else as_prompt(cache.read(class_key), image_conditioning)
        empty = as_prompt(cache.read(words.key(None)), image_conditioning) if variant.empty_caption else None
    except FileNotFoundError as error:
        raise ValueError(
            f"The encoded data of {item.name!r} is gone from the cache folder; free ComfyUI's node cache (or restart "
            "ComfyUI) and queue again, so that Prepare Dataset encodes it again."
        ) from error
    weights = None if mask is None else token_weights(mask, placement, item.options.unmasked_weight)
    prompt = as_prompt(text, image_conditioning)
    return SampleTensors(latent, prompt.text, prompt.conditioning, weights, class_prompt, empty)
