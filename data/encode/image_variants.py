"""Crop and flip variants: each variant of an image or video is encoded and cached separately."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.progress import Interrupted, Progress
from ..buckets.grids import Placement
from ..cache import Cache, EncodeJob, missing_jobs, run_jobs
from ..folders.items import Item
from ..media.frames import Crop, ImagePixels
from ..media.masks import FAINT, TOKENS, check_masks, token_weights
from .augmentation import View, make_views
from .vae import VaeEncoder, vision_job


@dataclass(frozen=True)
class ImageVariant:
    """One variant of an item.

    view: crop window and flip.
    crop: the visible part of the item.
    controls: the same part of its control images.
    mask: job of the token means of its mask, None without a mask.
    """

    view: View
    crop: Crop
    controls: tuple[Crop, ...]
    mask: EncodeJob | None


@dataclass(frozen=True)
class ImageKeys:
    """Cache keys of one variant. Fingerprints of data contain the field names, which must therefore not change.

    latent: of the image or video.
    references: of the control images.
    start: of the start frame.
    vision: of the CLIP vision output.
    mask: of the token means of the mask.
    """

    latent: str
    references: tuple[str, ...] = ()
    start: str | None = None
    vision: str | None = None
    mask: str | None = None

    @property
    def all_keys(self) -> tuple[str, ...]:
        """All keys."""
        return tuple(key for key in (self.latent, *self.references, self.start, self.vision, self.mask) if key)


@dataclass(frozen=True)
class VariantJobs:
    """VAE and CLIP vision jobs of one variant.

    variant: the variant.
    latent: job of the image or video.
    references: jobs of the control images.
    start: job of the start frame, None without one.
    vision: job of the CLIP vision output, None without one.
    """

    variant: ImageVariant
    latent: EncodeJob
    references: tuple[EncodeJob, ...]
    start: EncodeJob | None
    vision: EncodeJob | None

    @property
    def vae_jobs(self) -> tuple[EncodeJob, ...]:
        """All jobs of the VAE."""
        return (self.latent, *self.references, *([self.start] if self.start else []))

    @property
    def encoded_crops(self) -> tuple[tuple[EncodeJob, Crop], ...]:
        """Latent and reference jobs, each with the crop that it encodes."""
        return tuple(zip((self.latent, *self.references), (self.variant.crop, *self.variant.controls), strict=True))

    def keys(self) -> ImageKeys:
        """Cache keys of the jobs."""
        references = tuple(job.key for job in self.references)
        return ImageKeys(self.latent.key, references, _key(self.start), _key(self.vision), _key(self.variant.mask))


def make_variants(
    items: Sequence[Item],
    placements: Sequence[Placement],
    controls: Sequence[tuple[Placement, ...]],
    encoder: VaeEncoder,
) -> list[tuple[ImageVariant, ...]]:
    """Make the variants of each item.

    controls: placements of its control images, which are cropped and mirrored the same way.
    """
    variants_per_item = []
    for item, placement, control_placements in zip(items, placements, controls, strict=True):
        size, pixels_per_token = item.pixels.size, encoder.policy.pixels_per_token
        variants = []
        for view in make_views(item.pixels.key, size, placement, pixels_per_token, item.options):
            crop = encoder.crop(item.pixels, placement, view)
            control_crops = tuple(
                encoder.crop(pixels, control_placement, view)
                for pixels, control_placement in zip(item.controls, control_placements, strict=True)
            )
            variants.append(
                ImageVariant(view, crop, control_crops, item.mask.job(crop, placement) if item.mask else None)
            )
        variants_per_item.append(tuple(variants))
    return variants_per_item


def read_masks(
    items: Sequence[Item],
    placements: Sequence[Placement],
    variants: Sequence[tuple[ImageVariant, ...]],
    cache: Cache,
    progress: Progress,
    interrupted: Interrupted,
) -> tuple[list[tuple[ImageVariant, ...]], list[float]]:
    """Drop the variants that are entirely masked out.

    Returns the remaining variants of each item, and for each masked item the mean token weight of its first variant.
    Raises ValueError naming masks that leave nothing of any variant, and masks that are nowhere bright.
    """
    jobs = missing_jobs(
        cache, [variant.mask for item_variants in variants for variant in item_variants if variant.mask]
    )
    run_jobs(cache, jobs, "masks", progress, interrupted)
    remaining, counted = [], []
    empty: list[str] = []
    faint: list[str] = []
    for item, placement, item_variants in zip(items, placements, variants, strict=True):
        if item.mask is None:
            remaining.append(item_variants)
            continue
        masks = [cache.read(variant.mask.key)[TOKENS] for variant in item_variants if variant.mask]
        # `faint` decodes the mask file again, so the cached token means are checked first.
        if all(mask.max() < FAINT for mask in masks) and item.mask.faint:
            faint.append(item.mask.name)
        means = [float(token_weights(mask, placement, item.options.unmasked_weight).mean()) for mask in masks]
        visible = tuple(variant for variant, mean in zip(item_variants, means, strict=True) if mean > 0)
        empty += [] if visible else [item.mask.name]
        remaining.append(visible)
        counted.append(means[0])
    check_masks(faint, empty)
    return remaining, counted


def variant_jobs(
    variants: Sequence[tuple[ImageVariant, ...]], encoder: VaeEncoder, start: bool, clip_vision: Any
) -> list[tuple[VariantJobs, ...]]:
    """Make the jobs of each variant.

    start: encode the first frame of each video as its start image, also by `clip_vision` if given.
    """

    def jobs(variant: ImageVariant) -> VariantJobs:
        references = tuple(encoder.latent(crop) for crop in variant.controls)
        start_job = encoder.start(variant.crop) if start else None
        vision = vision_job(clip_vision, variant.crop) if start and clip_vision else None
        return VariantJobs(variant, encoder.latent(variant.crop), references, start_job, vision)

    return [tuple(map(jobs, item_variants)) for item_variants in variants]


def images_to_encode(jobs: Sequence[VariantJobs], keys: Collection[str]) -> list[ImagePixels]:
    """List the image files, each once, that jobs under these cache keys encode."""
    images = (crop.pixels for variant in jobs for job, crop in variant.encoded_crops if job.key in keys)
    return list({pixels.path: pixels for pixels in images if isinstance(pixels, ImagePixels)}.values())


def _key(job: EncodeJob | None) -> str | None:
    return None if job is None else job.key
