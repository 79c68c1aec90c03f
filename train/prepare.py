"""From a data set to training data: plan the grids, encode what is not in the cache yet, hand out lazy samples."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..models.latents import LatentPolicy, latent_policy
from ..models.text import CaptionTokens, text_policy
from .cache import Cache, Shape
from .captions import encode_caption
from .data import Sample, SampleTensors, TrainingData
from .dataset import Dataset, Picture, shortlist
from .fingerprint import fingerprint, weights_fingerprint
from .pictures import PictureFacts, inspect_picture, load_picture
from .plan_picture import describe_plan
from .tokens import BucketPlan, Placement, crop_box, plan_buckets

# Part of every key: raise it when the same inputs give other tensors than before.
_VERSION = 1

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done and how long it will take)."""


@dataclass(frozen=True)
class PreparedData:
    """What Prepare Dataset gives. sizes: (height, width) in pixels of each picture, in the order of the samples."""

    data: TrainingData
    plan: BucketPlan
    sizes: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Job:
    """What may have to be encoded: its cache key, the shapes its file must hold, how to make it, what to call it."""

    key: str
    shapes: Mapping[str, Shape]
    encode: Callable[[], Mapping[str, Tensor]]
    name: str


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
    progress: Progress = lambda done, total, text: None,
    interrupted: Callable[[], None] = lambda: None,
) -> PreparedData:
    """Encode a data set with a ComfyUI VAE and CLIP.

    The encoders and all pictures are checked before anything is encoded; an encoder is loaded only if the cache lacks
    something of it, the VAE for all pictures first, then the CLIP for all captions. `interrupted` is called before
    each and may raise; what is encoded by then stays in the cache.
    Raises ValueError for encoders of another family, unreadable pictures, and values out of range.
    """
    text, latents = text_policy(clip), latent_policy(vae)
    if max_text_length not in text.lengths:
        raise ValueError(f"max_text_length is {max_text_length}; choose one of {', '.join(map(str, text.lengths))}.")
    if not dataset.pictures:
        raise ValueError("The data set holds no pictures; connect Training Images.")
    pictures = dataset.pictures
    facts = _inspect(pictures, progress, interrupted)
    sizes = tuple(fact.size for fact in facts)
    plan = plan_buckets(
        sizes,
        megapixels=megapixels,
        pixels_per_token=latents.pixels_per_token,
        max_graphs=max_graphs,
        fit=fit,
        weights=[picture.repeats for picture in pictures],
    )
    captions = {p.caption: text.tokenize(clip, p.caption, max_text_length) for p in pictures}

    picture_jobs = _picture_jobs(pictures, facts, plan, vae, latents)
    caption_jobs = _caption_jobs(captions, clip)
    cache = Cache(cache_dir)
    _encode(cache, picture_jobs, "pictures", progress, interrupted)
    _encode(cache, list(caption_jobs.values()), "captions", progress, interrupted)

    samples = tuple(
        _sample(cache, picture, placement, job.key, caption_jobs[picture.caption].key, captions[picture.caption].length)
        for picture, placement, job in zip(pictures, plan.placements, picture_jobs, strict=True)
    )
    keys = [(job.key, caption_jobs[picture.caption].key) for picture, job in zip(pictures, picture_jobs, strict=True)]
    notes = tuple(_notes(pictures, captions))
    data = TrainingData(samples, fingerprint(keys, [(s.grid, s.tokens, s.repeats) for s in samples]), notes)
    return PreparedData(data, plan, sizes, notes)


def summary(prepared: PreparedData) -> str:
    """The preparation in a few lines: how much there is, what is cropped, which graphs training will compile."""
    samples, keys = prepared.data.samples, prepared.data.graph_keys()
    shapes = " and ".join(f"{tokens} + {length}" for tokens, length in keys)
    return "\n".join(
        [
            f"Pictures: {len(samples)}, seen per epoch with repeats: {sum(sample.repeats for sample in samples)}.",
            describe_plan(prepared.plan),
            f"Each kind of block is compiled for {len(keys)} of (picture + caption) tokens: {shapes}.",
            *prepared.notes,
        ]
    )


def _inspect(pictures: tuple[Picture, ...], progress: Progress, interrupted: Callable[[], None]) -> list[PictureFacts]:
    facts = []
    for index, picture in enumerate(pictures):
        interrupted()
        progress(index, len(pictures), f"Reading pictures: {index} of {len(pictures)}")
        facts.append(inspect_picture(picture.path))
    return facts


def _picture_jobs(
    pictures: tuple[Picture, ...], facts: list[PictureFacts], plan: BucketPlan, vae: Any, policy: LatentPolicy
) -> list[_Job]:
    encoder = (weights_fingerprint(vae.patcher), str(vae.vae_dtype))
    jobs = []
    for picture, fact, placement in zip(pictures, facts, plan.placements, strict=True):
        box, (height, width) = crop_box(fact.size, placement.grid, policy.pixels_per_token)
        cells = (height // policy.pixels_per_latent, width // policy.pixels_per_latent)
        key = fingerprint("picture", _VERSION, fact.digest, box, height, width, encoder)
        encode = partial(_encode_picture, vae, picture, box, height, width)
        jobs.append(_Job(key, {"latent": (policy.channels, *cells)}, encode, picture.name))
    return jobs


def _caption_jobs(captions: dict[str, CaptionTokens], clip: Any) -> dict[str, _Job]:
    encoder = (weights_fingerprint(clip.patcher), clip.layer_idx)
    return {
        caption: _Job(
            fingerprint("caption", _VERSION, tokens.tokens, encoder),
            {"cond": (1, tokens.length, None), "pooled_output": (1, None)},
            partial(encode_caption, clip, tokens),
            f"the caption {caption[:40]!r}",
        )
        for caption, tokens in captions.items()
    }


@torch.inference_mode()
def _encode_picture(
    vae: Any, picture: Picture, box: tuple[float, float, float, float], height: int, width: int
) -> dict[str, Tensor]:
    return {"latent": vae.encode(load_picture(picture.path, box, height, width))[0]}


def _encode(cache: Cache, jobs: list[_Job], what: str, progress: Progress, interrupted: Callable[[], None]) -> None:
    """Encode what the cache lacks, one at a time, each key once, and write it at once."""
    lacking = [job for job in {job.key: job for job in jobs}.values() if not cache.holds(job.key, job.shapes)]
    start = time.monotonic()
    for done, job in enumerate(lacking):
        interrupted()
        left = _time_left(start, done, len(lacking))
        progress(done, len(lacking), f"Encoding {what}: {done} of {len(lacking)}{left}")
        tensors = job.encode()
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            raise ValueError(
                f"Encoding {job.name} gave values that are not finite; run the VAE or the text encoders in a wider "
                f"dtype (ComfyUI's --fp32-vae or --fp32-text-enc)."
            )
        cache.write(job.key, tensors)
        assert cache.holds(job.key, job.shapes), (job.name, {n: tuple(t.shape) for n, t in tensors.items()}, job.shapes)
    if lacking:
        progress(len(lacking), len(lacking), f"Encoding {what}: {len(lacking)} of {len(lacking)}")


def _time_left(start: float, done: int, total: int) -> str:
    if done == 0:
        return ""
    seconds = (time.monotonic() - start) / done * (total - done)
    return f", about {seconds:.0f} s left" if seconds < 90 else f", about {seconds / 60:.0f} min left"


def _sample(
    cache: Cache, picture: Picture, placement: Placement, latent_key: str, text_key: str, text_length: int
) -> Sample:
    grid = placement.grid
    return Sample(
        name=picture.name,
        grid=(grid.frames, grid.height, grid.width),
        tokens=placement.tokens,
        text_length=text_length,
        load=partial(_load, cache, picture.name, latent_key, text_key),
        repeats=picture.repeats,
    )


def _load(cache: Cache, name: str, latent_key: str, text_key: str) -> SampleTensors:
    try:
        latent, encoded = cache.read(latent_key)["latent"], cache.read(text_key)
    except FileNotFoundError as error:
        raise ValueError(
            f"The encoded data of {name!r} is gone from the cache folder; free ComfyUI's node cache (or restart it) "
            f"and queue again, so that Prepare Dataset encodes it anew."
        ) from error
    return SampleTensors(latent, encoded["cond"], {"pooled_output": encoded["pooled_output"]})


def _notes(pictures: tuple[Picture, ...], captions: dict[str, CaptionTokens]) -> Iterator[str]:
    cut = [(p.name, captions[p.caption]) for p in pictures if captions[p.caption].dropped]
    if cut:
        listed = shortlist([f"{name} ({tokens.dropped} tokens)" for name, tokens in cut])
        yield f"Cut at the end, being longer than {cut[0][1].length} tokens, the captions of {listed}."
