"""Measures of a picture for the check of its folder, cached by the content of its file."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...common.fingerprint import fingerprint
from ...common.progress import Interrupted, Progress
from ..cache import Cache
from ..media.images import inspect_image
from ..media.strips import is_large
from ..media.thumbnails import upright_image
from .borders import find_borders
from .perceptual_hash import Signature, make_signature, signature_of
from .sharpness import Sharpness, measure_sharpness

# Part of every key: raise it when the same picture gives other measures than before.
VERSION = 1
MOST_THREADS = 8
_NUMBERS, _REDUCED = "numbers", "reduced"
_EMBEDDED = 512 * 512  # pixels that an encoder gets; it reduces them to a few hundred along a side
_TURN = Lock()  # of large pictures, each of which takes memory for all its pixels


@dataclass(frozen=True)
class Measures:
    """Measures of a picture.

    digest: hash of the file's bytes.
    size: its (height, width) in pixels.
    measured: (height, width) at which it was measured, smaller for a large picture.
    sharpness: how sharp it is at that size.
    borders: left, top, right and bottom, as parts of the side.
    signature: of its picture, to find its doubles.
    remarks: oddities of its file, see `media/remarks.py`.
    """

    digest: str
    size: tuple[int, int]
    measured: tuple[int, int]
    sharpness: Sharpness
    borders: tuple[float, float, float, float]
    signature: Signature
    remarks: tuple[str, ...] = ()

    @property
    def detail(self) -> float:
        """Number of pixels that its detail needs."""
        return self.measured[0] * self.measured[1] / self.sharpness.factor**2


@dataclass(frozen=True)
class Measured:
    """Result for one picture.

    measures: its measures; None for a broken picture.
    error: sentence on why a broken picture can't be read, else empty.
    """

    measures: Measures | None = None
    error: str = ""


def measure_pictures(
    pictures: Sequence[tuple[Path, str]], pixels: int, cache: Cache, progress: Progress, interrupted: Interrupted
) -> list[Measured]:
    """Measure pictures on several threads, as decoding and transforms release the GIL.

    pictures: file and name of each.
    pixels: size that larger pictures are reduced to, that of training.
    """
    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "tessera-check")
    measured: list[Measured] = []
    try:
        for result in pool.map(lambda picture: _measured(picture[0], picture[1], pixels, cache), pictures):
            interrupted()
            measured.append(result)
            progress(len(measured), len(pictures), f"Checking pictures: {len(measured)} of {len(pictures)}")
    finally:
        pool.shutdown(cancel_futures=True)
    return measured


def _measured(path: Path, name: str, pixels: int, cache: Cache) -> Measured:
    try:
        facts = inspect_image(path, name)
        key = fingerprint("review", VERSION, pixels, facts.digest)
        numbers, reduced = _read(cache, key) or _measure(path, name, pixels, facts.size, cache, key)
    except ValueError as error:
        return Measured(error=str(error))
    factor, enlarged, height, width, *borders = (float(number) for number in numbers)
    left, top, right, bottom = borders
    sharpness = Sharpness(factor, bool(enlarged))
    signature = signature_of(reduced)
    size = (int(height), int(width))
    borders_found = (left, top, right, bottom)
    return Measured(Measures(facts.digest, facts.size, size, sharpness, borders_found, signature, facts.remarks))


def _read(cache: Cache, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        stored = cache.read(key)
    except FileNotFoundError:
        return None
    return stored[_NUMBERS].numpy(), stored[_REDUCED].numpy()


def _measure(
    path: Path, name: str, pixels: int, size: tuple[int, int], cache: Cache, key: str
) -> tuple[np.ndarray, np.ndarray]:
    with _TURN if is_large(size) else nullcontext():
        image = upright_image(path, name, pixels)
    grey = image.convert("L")
    levels = np.asarray(grey, dtype=np.float32)
    sharpness = measure_sharpness(levels)
    borders = find_borders(np.asarray(image))
    numbers = np.array([sharpness.factor, sharpness.enlarged, *levels.shape, *borders], dtype=np.float64)
    reduced = make_signature(grey).reduced
    cache.write(key, {_NUMBERS: torch.from_numpy(numbers), _REDUCED: torch.from_numpy(reduced.copy())})
    return numbers, reduced


def embed_pictures(
    pictures: Sequence[tuple[Path, str, str]],
    encoder: Any,
    key: Any,
    cache: Cache,
    progress: Progress,
    interrupted: Interrupted,
) -> np.ndarray:
    """Compute the embeddings of pictures by a vision encoder, (N, D) of length 1.

    pictures: file, name and digest of each.
    encoder: function of an image (1, H, W, 3) that returns (1, D).
    key: cache key of the encoder.
    """
    rows: list[Tensor] = []
    for number, (path, name, digest) in enumerate(pictures):
        interrupted()
        progress(number, len(pictures), f"Comparing pictures: {number} of {len(pictures)}")
        entry = fingerprint("review embedding", VERSION, key, digest)
        try:
            row = cache.read(entry)["embedding"]
        except FileNotFoundError:
            image = np.asarray(upright_image(path, name, _EMBEDDED), dtype=np.float32) / 255
            row = encoder(torch.from_numpy(image)[None])[0].float().cpu()
            cache.write(entry, {"embedding": row})
        rows.append(row / row.norm().clamp(min=1e-9))
    return torch.stack(rows).numpy()
