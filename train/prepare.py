"""From a data set to training data: plan the grids, encode what is not in the cache yet, hand out lazy samples."""

import copy
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ..models.latents import LatentPolicy, latent_policy
from ..models.text import CaptionTokens, TextPolicy, text_policy
from .cache import Cache, Shape
from .captions import encode_caption
from .data import Sample, SampleTensors, TrainingData
from .dataset import Dataset, Picture, shortlist
from .fingerprint import fingerprint, weights_fingerprint
from .pictures import PictureFacts, inspect_picture, load_picture
from .plan_picture import describe_plan
from .tokens import RAGGED_EDGE, BucketPlan, Placement, crop_box, plan_buckets

# Part of every key: raise it when the same inputs give other tensors than before.
_VERSION = 2
_BYTES = 4  # of a number in the cache: core's encoders give float32

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
    """What may have to be encoded.

    Its cache key, the shapes its file must hold, about how many bytes that takes, how to make it, what to call it.
    """

    key: str
    shapes: Mapping[str, Shape]
    bytes: int
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
    Raises ValueError for encoders of another family, unreadable pictures, values out of range and a disk that is too
    small, and core's out-of-memory error where a picture does not fit through the VAE whole.
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
    captions, caption_jobs = _read_captions(pictures, clip, text, max_text_length, progress, interrupted)
    picture_jobs = _picture_jobs(pictures, facts, plan, vae, latents)
    cache = Cache(cache_dir)
    lacking_pictures, lacking_captions = _lacking(cache, picture_jobs), _lacking(cache, caption_jobs.values())
    _check_space(cache_dir, sum(job.bytes for job in (*lacking_pictures, *lacking_captions)))
    _encode(cache, lacking_pictures, "pictures", progress, interrupted)
    _encode(cache, lacking_captions, "captions", progress, interrupted)

    samples = tuple(
        _sample(cache, picture, placement, job.key, caption_jobs[picture.caption].key, captions[picture.caption].length)
        for picture, placement, job in zip(pictures, plan.placements, picture_jobs, strict=True)
    )
    keys = [(job.key, caption_jobs[picture.caption].key) for picture, job in zip(pictures, picture_jobs, strict=True)]
    notes = (*dataset.notes, *_notes(pictures, captions, fit, max_graphs))
    data = TrainingData(samples, fingerprint(keys, [(s.grid, s.tokens, s.repeats) for s in samples]), notes)
    return PreparedData(data, plan, sizes, notes)


def summary(prepared: PreparedData) -> str:
    """The preparation in a few lines: how much there is, what is cropped, which graphs training will compile."""
    samples, keys = prepared.data.samples, prepared.data.graph_keys()
    shapes = " and ".join(" + ".join(map(str, (tokens, *references, length))) for tokens, references, length in keys)
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
        facts.append(inspect_picture(picture.path, picture.name))
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
        encode = partial(_encode_picture, _without_tiles(vae), picture, fact.digest, box, height, width)
        size = policy.channels * prod(cells) * _BYTES
        jobs.append(_Job(key, {"latent": (policy.channels, *cells)}, size, encode, picture.name))
    return jobs


def _read_captions(
    pictures: tuple[Picture, ...],
    clip: Any,
    policy: TextPolicy,
    max_length: int,
    progress: Progress,
    interrupted: Callable[[], None],
) -> tuple[dict[str, CaptionTokens], dict[str, _Job]]:
    """The tokens and the job of each distinct caption."""
    encoder = (weights_fingerprint(clip.patcher), clip.layer_idx)
    captions: dict[str, CaptionTokens] = {}
    jobs: dict[str, _Job] = {}
    distinct = dict.fromkeys(picture.caption for picture in pictures)
    for index, caption in enumerate(distinct):
        interrupted()
        progress(index, len(distinct), f"Reading captions: {index} of {len(distinct)}")
        tokens = policy.tokenize(clip, caption, max_length)
        captions[caption] = tokens
        jobs[caption] = _Job(
            fingerprint("caption", _VERSION, json.dumps(tokens.tokens), encoder),
            {"cond": (1, tokens.length, None), "pooled_output": (1, None)},
            tokens.length * policy.width * _BYTES,
            partial(encode_caption, clip, tokens),
            f"the caption {caption[:40]!r}",
        )
    return captions, jobs


class _NoTiles(Exception):
    """The VAE ran out of memory, where core would encode in tiles."""


def _without_tiles(vae: Any) -> Any:
    """The VAE as a shallow copy that raises where core goes on in tiles: their seams would stay in the cache."""

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise _NoTiles

    whole = copy.copy(vae)
    for name in ("encode_tiled_", "_encode_tiled_owned"):
        setattr(whole, name, refuse)
    return whole


@torch.inference_mode()
def _encode_picture(
    vae: Any, picture: Picture, digest: str, box: tuple[float, float, float, float], height: int, width: int
) -> dict[str, Tensor]:
    pixels = load_picture(picture.path, box, height, width, digest=digest, name=picture.name)
    try:
        return {"latent": vae.encode(pixels)[0]}
    except _NoTiles:
        # Of core's own kind, upon which core unloads all models.
        raise comfy.model_management.OOM_EXCEPTION(
            f"The VAE ran out of memory encoding {picture.name!r} at {width} x {height} pixels; lower megapixels, or "
            f"close what else uses the device's memory. What is encoded is kept."
        ) from None


def _lacking(cache: Cache, jobs: Iterable[_Job]) -> list[_Job]:
    """What the cache does not hold, each key once."""
    return [job for job in {job.key: job for job in jobs}.values() if not cache.holds(job.key, job.shapes)]


def _check_space(folder: Path, wanted: int) -> None:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if wanted > free:
        raise ValueError(
            f"Encoding the data set takes about {wanted / 1e9:.2f} GB and the disk with the cache folder "
            f"({folder.parent.name}/{folder.name} in ComfyUI's user folder) has {free / 1e9:.2f} GB free; free some "
            f"space, or start ComfyUI with --user-directory on a larger disk."
        )


def _encode(cache: Cache, lacking: list[_Job], what: str, progress: Progress, interrupted: Callable[[], None]) -> None:
    """Encode one at a time and write it at once."""
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


def _notes(
    pictures: tuple[Picture, ...], captions: dict[str, CaptionTokens], fit: str, max_graphs: int
) -> Iterator[str]:
    if fit == RAGGED_EDGE and max_graphs > 1:
        yield f"max_graphs has no effect with fit {RAGGED_EDGE}, where one token count serves all pictures."
    cut = [(p.name, captions[p.caption]) for p in pictures if captions[p.caption].dropped]
    if cut:
        listed = shortlist([f"{name} ({tokens.dropped} tokens)" for name, tokens in cut])
        yield f"Cut at the end, being longer than {cut[0][1].length} tokens, the captions of {listed}."
