"""What is encoded of each picture or clip: for each form in which it is shown a set of tensors of its own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.progress import Interrupted, Progress
from ..buckets.grids import Placement
from ..cache import Cache, Job, encode, lacking
from ..folders.items import Item
from ..media.frames import Cut, StillPixels
from ..media.masks import FAINT, TOKENS, check_masks, token_weights
from .augmentation import View, views_of
from .vae import PictureEncoder, vision_job


@dataclass(frozen=True)
class PictureForm:
    """One form of an item: the part of it that is shown, the same of its control pictures, and what is encoded."""

    view: View
    cut: Cut
    controls: tuple[Cut, ...]
    mask: Job | None


@dataclass(frozen=True)
class PictureKeys:
    """Where the tensors of one form are in the cache."""

    latent: str
    references: tuple[str, ...] = ()
    start: str | None = None
    vision: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class FormJobs:
    """What the VAE and CLIP vision encode of one form."""

    form: PictureForm
    latent: Job
    references: tuple[Job, ...]
    start: Job | None
    vision: Job | None

    @property
    def of_vae(self) -> tuple[Job, ...]:
        return (self.latent, *self.references, *([self.start] if self.start else []))

    @property
    def shown(self) -> tuple[tuple[Job, Cut], ...]:
        """What is encoded of files in whole, with the part that it shows."""
        return tuple(zip((self.latent, *self.references), (self.form.cut, *self.form.controls), strict=True))

    def keys(self) -> PictureKeys:
        references = tuple(job.key for job in self.references)
        return PictureKeys(self.latent.key, references, _key(self.start), _key(self.vision), _key(self.form.mask))


def make_forms(
    items: Sequence[Item],
    placements: Sequence[Placement],
    controls: Sequence[tuple[Placement, ...]],
    encoder: PictureEncoder,
) -> list[tuple[PictureForm, ...]]:
    """The forms of each item. controls: where its control pictures lie, which are cropped and mirrored along."""
    made = []
    for item, placement, of in zip(items, placements, controls, strict=True):
        size, pixels_per_token = item.pixels.size, encoder.policy.pixels_per_token
        forms = []
        for view in views_of(item.pixels.key, size, placement, pixels_per_token, item.treatment):
            cut = encoder.cut(item.pixels, placement, view)
            seen = tuple(encoder.cut(pixels, where, view) for pixels, where in zip(item.controls, of, strict=True))
            forms.append(PictureForm(view, cut, seen, item.mask.job(cut, placement) if item.mask else None))
        made.append(tuple(forms))
    return made


def read_masks(
    items: Sequence[Item],
    placements: Sequence[Placement],
    forms: Sequence[tuple[PictureForm, ...]],
    cache: Cache,
    progress: Progress,
    interrupted: Interrupted,
) -> tuple[list[tuple[PictureForm, ...]], list[float]]:
    """The forms of each item of which something counts, and for each masked item how much of its first one does.

    ValueError names masks that leave nothing of any form, and those that are nowhere bright. Of the files only those
    are read again of which no token is bright.
    """
    jobs = lacking(cache, [form.mask for of in forms for form in of if form.mask])
    encode(cache, jobs, "masks", progress, interrupted)
    kept, counted = [], []
    empty: list[str] = []
    faint: list[str] = []
    for item, placement, of in zip(items, placements, forms, strict=True):
        if item.mask is None:
            kept.append(of)
            continue
        masks = [cache.read(form.mask.key)[TOKENS] for form in of if form.mask]
        if all(mask.max() < FAINT for mask in masks) and item.mask.faint:
            faint.append(item.mask.name)
        means = [float(token_weights(mask, placement, item.treatment.unmasked_weight).mean()) for mask in masks]
        left = tuple(form for form, mean in zip(of, means, strict=True) if mean > 0)
        empty += [] if left else [item.mask.name]
        kept.append(left)
        counted.append(means[0])
    check_masks(faint, empty)
    return kept, counted


def form_jobs(
    forms: Sequence[tuple[PictureForm, ...]], encoder: PictureEncoder, start: bool, clip_vision: Any
) -> list[tuple[FormJobs, ...]]:
    """The jobs of each form. start: clips have their first frame as start picture, which clip_vision sees if given."""

    def jobs(form: PictureForm) -> FormJobs:
        references = tuple(encoder.latent(cut) for cut in form.controls)
        given = encoder.start(form.cut) if start else None
        vision = vision_job(clip_vision, form.cut) if start and clip_vision else None
        return FormJobs(form, encoder.latent(form.cut), references, given, vision)

    return [tuple(map(jobs, of)) for of in forms]


def pictures_of(jobs: Sequence[FormJobs], keys: Collection[str]) -> list[StillPixels]:
    """The pictures, each once, of which something under these keys is encoded."""
    shown = (cut.pixels for one in jobs for job, cut in one.shown if job.key in keys)
    return list({pixels.path: pixels for pixels in shown if isinstance(pixels, StillPixels)}.values())


def _key(job: Job | None) -> str | None:
    return None if job is None else job.key
