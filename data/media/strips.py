"""Image scaling in strips of rows: takes little memory besides the decoded image, which is reduced first if large."""

from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageOps

LARGE = 1 << 25  # pixels; smaller images are never reduced
_STRIP = 1 << 22  # pixels of a strip
# Least ratio of a reduced image's side to the requested one. From 3 on the result "is indistinguishable from fair
# resampling in most cases" (Pillow's documentation of Image.resize, reducing_gap).
_GAP = 3

Box = tuple[float, float, float, float]


def is_large(size: tuple[int, int]) -> bool:
    """Return True if an image of this size in pixels may be reduced."""
    return size[0] * size[1] > LARGE


def scaling_factor(size: tuple[int, int], box: Box, height: int, width: int) -> int:
    """Power of two by which an image is reduced before `box` is scaled to height x width; 1 unless it is large."""
    ratio = min((box[2] - box[0]) / width, (box[3] - box[1]) / height)
    factor = 1
    while is_large(size) and 2 * factor * _GAP <= ratio:
        factor *= 2
    return factor


def mask_factor(size: tuple[int, int]) -> int:
    """Power of two by which a mask is reduced so that it is no longer large."""
    factor = 1
    while is_large((size[0] // factor, size[1] // factor)):
        factor *= 2
    return factor


def decode(image: Image.Image, factor: int) -> Image.Image:
    """Decode an opened image upright, with its sides divided by `factor` and rounded up; a JPEG while it is decoded."""
    width = image.width
    if factor > 1:
        image.draft(None, (width // factor, image.height // factor))
    remaining_factor = factor // max(1, round(width / image.width))
    ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies an image that is upright already
    return _reduce(image, remaining_factor) if remaining_factor > 1 else image


def strips(image: Image.Image, rows: int | None = None) -> Iterator[tuple[int, Image.Image]]:
    """Yield the image in strips of `rows` rows, about 4 megapixels by default, each with its first row."""
    rows = rows or max(1, _STRIP // image.width)
    for top in range(0, image.height, rows):
        yield top, image.crop((0, top, image.width, min(top + rows, image.height)))


def resize(
    image: Image.Image, planes: Callable[[Image.Image], list[np.ndarray]], box: Box, height: int, width: int
) -> list[np.ndarray]:
    """Scale `box` of each of an image's planes to (height, width) by Lanczos.

    planes: computes the planes (rows, W), float32, of a strip.

    Equal to Pillow's resize of the whole planes, bit for bit: that scales to the width first, row by row (newer Pillow
    not if only the height shrinks).
    """
    reach = 3 * max(1.0, (box[3] - box[1]) / height) + 1  # of Lanczos, in rows
    narrow: list[np.ndarray] = []
    for top, strip in strips(image):
        if top + strip.height < box[1] - reach or top > box[3] + reach:
            continue
        across = (box[0], 0, box[2], strip.height)
        for channel, plane in enumerate(planes(strip)):
            if channel == len(narrow):  # memory of rows that are not needed is never touched
                narrow.append(np.zeros((image.height, width), np.float32))
            scaled = Image.fromarray(plane).resize((width, strip.height), Image.Resampling.LANCZOS, box=across)
            narrow[channel][top : top + strip.height] = np.asarray(scaled)
    down = (0, box[1], width, box[3])
    return [
        np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.LANCZOS, box=down))
        for plane in narrow
    ]


def _reduce(image: Image.Image, factor: int) -> Image.Image:
    """Average squares of factor x factor pixels, of colours by their opacity."""
    rows = max(1, _STRIP // image.width // factor) * factor
    reduced: Image.Image | None = None
    for top, strip in strips(image, rows):
        part = _averageable(strip).reduce(factor)
        if reduced is None:
            reduced = Image.new(part.mode, (part.width, -(-image.height // factor)))
            reduced.info = dict(part.info)
        reduced.paste(part, (0, top // factor))
    assert reduced is not None
    return reduced


def _averageable(image: Image.Image) -> Image.Image:
    """Convert to a mode that can be averaged: no palette, no bits, no 16-bit numbers."""
    if image.mode.startswith("I;16"):
        return image.convert("I")
    if image.mode in ("1", "P", "PA") or "transparency" in image.info:
        return image.convert("RGBA" if image.has_transparency_data else "RGB" if image.mode != "1" else "L")
    return image
