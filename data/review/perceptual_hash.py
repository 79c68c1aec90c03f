"""Perceptual hash of a picture, and the pairs of near-doubles among many.

The hash is the one known as pHash (Zauner 2010, Implementation and benchmarking of perceptual image hash functions):
the signs of the lowest frequencies of a cosine transform, against their median. What two hashes say is checked on the
pictures, reduced to a few pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image
from scipy import fft

SIDE = 32  # pixels of the reduced picture
_LOW = 8  # frequencies along each axis
_MOST_BITS = 14  # of the 64 that may differ
_LEAST_LIKENESS = 0.93  # correlation of the reduced pictures
_FLAT = 2.0  # levels of standard deviation, below which a picture is of one colour
_ROWS = 512  # compared with all others at once


@dataclass(frozen=True)
class Signature:
    """Features by which a picture is compared.

    bits: (64,), 0 or 1.
    mirrored: those of the mirrored picture.
    reduced: (SIDE, SIDE) levels of grey.
    """

    bits: np.ndarray
    mirrored: np.ndarray
    reduced: np.ndarray


def make_signature(grey: Image.Image) -> Signature:
    """Make the signature of a grey picture."""
    return signature_of(np.asarray(grey.resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=None)))


def signature_of(reduced: np.ndarray) -> Signature:
    """Make the signature of a reduced picture, (SIDE, SIDE)."""
    return Signature(_bits(reduced), _bits(reduced[:, ::-1]), reduced)


def _bits(reduced: np.ndarray) -> np.ndarray:
    low = fft.dctn(reduced.astype(np.float32), norm="ortho")[:_LOW, :_LOW].ravel()
    return (low > np.median(low[1:])).astype(np.float32)  # the first is the brightness


def near_doubles(signatures: list[Signature]) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of near-doubles, mirrored ones too, the smaller index first."""
    if len(signatures) < 2:
        return
    bits = np.stack([signature.bits for signature in signatures]) * 2 - 1
    mirrored = np.stack([signature.mirrored for signature in signatures]) * 2 - 1
    least = bits.shape[1] - 2 * _MOST_BITS
    for first in range(0, len(bits), _ROWS):
        rows = bits[first : first + _ROWS]
        near = np.maximum(rows @ bits.T, rows @ mirrored.T) >= least
        for row, column in np.argwhere(near):
            one, other = first + int(row), int(column)
            if one < other and _alike(signatures[one].reduced, signatures[other].reduced):
                yield one, other


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    return max(_likeness(one, other), _likeness(one, other[:, ::-1])) >= _LEAST_LIKENESS


def _likeness(one: np.ndarray, other: np.ndarray) -> float:
    """Compute the correlation of two reduced pictures; pictures of one colour are alike if that is the same."""
    first, second = one.astype(np.float32), other.astype(np.float32)
    if min(first.std(), second.std()) < _FLAT:
        return float(max(first.std(), second.std()) < _FLAT and abs(first.mean() - second.mean()) < _FLAT)
    return float(np.corrcoef(first.ravel(), second.ravel())[0, 1])


def near_embeddings(embeddings: np.ndarray, least: float) -> Iterator[tuple[int, int]]:
    """Yield the index pairs of embeddings, (N, D) of length 1, whose cosine is `least` or more."""
    for first in range(0, len(embeddings), _ROWS):
        near = embeddings[first : first + _ROWS] @ embeddings.T >= least
        for row, column in np.argwhere(near):
            if first + row < column:
                yield first + int(row), int(column)
