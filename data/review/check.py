"""Check of a folder of pictures: findings, a report, a sheet, and the pictures that training is better without."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...common.progress import Interrupted, Progress
from ..cache import Cache
from ..layouts.layout import FolderLayout
from ..media.remarks import BROKEN_PROFILE, HDR_PICTURE, SEVERAL_PICTURES, UNKNOWN_COLOURS
from .captions import caption_faults, read_texts
from .findings import BLURRED, BORDER, BROKEN, COLOURS, DOUBLE, ENLARGED, SMALL, Finding, left_out, report
from .measures import Measured, Measures, embed_pictures, measure_pictures
from .perceptual_hash import near_doubles, near_embeddings
from .sheet import draw_sheet

MEGAPIXEL = 1024 * 1024
_MORE_DETAIL = 1.1  # ratio of pixels from which on one of two doubles shows more
_LIKE = 0.96  # cosine of the embeddings of near-doubles
_REMARKS = {
    BROKEN_PROFILE: "its colour profile is damaged",
    HDR_PICTURE: "HDR",
    SEVERAL_PICTURES: "several pictures in one file",
    UNKNOWN_COLOURS: "colours of an unknown kind",
}
_SIDES = ("left", "top", "right", "bottom")


@dataclass(frozen=True)
class Encoder:
    """Vision encoder that compares pictures.

    encode: function of an image (1, H, W, 3) that returns its embedding, (1, D).
    key: its cache key.
    """

    encode: Callable[[Any], Any]
    key: Any


@dataclass(frozen=True)
class CheckOptions:
    """Options of a check.

    megapixels: size at which the pictures are trained, in units of 1024 x 1024 pixels.
    factor: a picture that is enlarged by less, or is no less sharp, counts as sound.
    trigger_words: words that each caption should hold.
    caption_length: see `caption_faults`.
    encoder: finds near-doubles too, besides the perceptual hash.
    """

    megapixels: float = 1.0
    factor: float = 1.4
    trigger_words: str = ""
    caption_length: Callable[[str], tuple[int, int]] | None = None
    encoder: Encoder | None = None


@dataclass(frozen=True)
class FolderCheck:
    """Result of a check.

    findings: faults, in the order of the folder for each kind.
    report: the same in words.
    left_out: names of the pictures that training is better without, one in a line.
    sheet: thumbnails of the pictures with findings.
    """

    findings: tuple[Finding, ...]
    report: str
    left_out: str
    sheet: Image.Image


def check_folder(
    layout: FolderLayout, cache: Cache, options: CheckOptions, progress: Progress, interrupted: Interrupted
) -> FolderCheck:
    """Check the pictures of a folder and their captions."""
    examples = [example for subset in layout.subsets for example in subset.examples]
    pictures = [(example.path, example.name) for example in examples]
    texts, findings = read_texts(layout.subsets)
    pixels = round(options.megapixels * MEGAPIXEL)
    results = measure_pictures(pictures, pixels, cache, progress, interrupted)
    findings += [fault for result in zip(pictures, results, strict=True) for fault in _faults(*result, options, pixels)]
    sound = [(path, name, r.measures) for (path, name), r in zip(pictures, results, strict=True) if r.measures]
    findings += _doubles(sound, _pairs(sound, options.encoder, cache, progress, interrupted))
    findings += caption_faults(texts, options.trigger_words, options.caption_length)
    places = {name: path for path, name in pictures}
    return FolderCheck(
        tuple(findings),
        report(len(pictures), findings, layout.notes),
        left_out(findings),
        draw_sheet([(places[name], name, own) for name, own in _by_name(findings)], len(pictures), interrupted),
    )


def _by_name(findings: Iterable[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    by_name: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        by_name[finding.name].append(finding)
    yield from by_name.items()


def _faults(picture: tuple[Path, str], result: Measured, options: CheckOptions, pixels: int) -> Iterator[Finding]:
    """Yield the faults of a picture on its own."""
    _, name = picture
    measures = result.measures
    if measures is None:
        yield Finding(name, BROKEN, _cause(result.error), True)
        return
    height, width = measures.size
    factor, sharpness = (pixels / (height * width)) ** 0.5, measures.sharpness
    if factor >= options.factor:
        yield Finding(name, SMALL, f"{width} x {height} pixels, enlarged {factor:.1f} times", True)
    if sharpness.factor >= options.factor:
        size = f"{measures.measured[1] / sharpness.factor:.0f} x {measures.measured[0] / sharpness.factor:.0f}"
        if sharpness.enlarged:
            yield Finding(name, ENLARGED, f"{sharpness.factor:.1f} times, from about {size}", True)
        else:
            yield Finding(name, BLURRED, f"the detail of {size} pixels", True)
    if any(measures.borders):
        parts = zip(_SIDES, measures.borders, (width, height, width, height), strict=True)
        listed = ", ".join(f"{side} {part * length:.0f}" for side, part, length in parts if part)
        yield Finding(name, BORDER, f"{listed} pixels")
    for remark in measures.remarks:
        yield Finding(name, COLOURS, _REMARKS[remark])


def _cause(error: str) -> str:
    """Return the cause in brackets of an error about a picture, or all of it."""
    return error.partition("can't be read (")[2].rpartition("); ")[0] or error


def _pairs(
    sound: Sequence[tuple[Path, str, Measures]],
    encoder: Encoder | None,
    cache: Cache,
    progress: Progress,
    interrupted: Interrupted,
) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of pictures that are near-doubles."""
    yield from near_doubles([measures.signature for _, _, measures in sound])
    if encoder is not None and len(sound) > 1:
        named = [(path, name, measures.digest) for path, name, measures in sound]
        embeddings: np.ndarray = embed_pictures(named, encoder.encode, encoder.key, cache, progress, interrupted)
        yield from near_embeddings(embeddings, _LIKE)


def _doubles(sound: Sequence[tuple[Path, str, Measures]], pairs: Iterable[tuple[int, int]]) -> Iterator[Finding]:
    """Yield a finding for each picture that is a near-double of another one, which shows more detail."""
    root = list(range(len(sound)))

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for one, other in pairs:
        first, second = sorted((find(one), find(other)))
        root[second] = first
    groups: dict[int, list[int]] = defaultdict(list)
    for index in range(len(sound)):
        groups[find(index)].append(index)
    for group in groups.values():
        best = max(group, key=lambda index: (round(log(sound[index][2].detail, _MORE_DETAIL)), -index))
        for index in group:
            if index != best:
                same = sound[index][2].digest == sound[best][2].digest
                yield Finding(sound[index][1], DOUBLE, f"{'the same as' if same else 'of'} {sound[best][1]}", True)
