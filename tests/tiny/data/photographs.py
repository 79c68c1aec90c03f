"""Photographs made by code: leaves of all sizes over one another, with the statistics of natural pictures.

The dead leaves model (Lee, Mumford and Huang 2001, Occlusion models for natural images) has their edges and their fall
of power with frequency.
"""

import random
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 256, 192
_FINER = 2  # drawn larger and reduced, so that edges are those of a lens
_LEAVES = 260


def make_photograph(seed: int, width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Draw a photograph; every tenth is a thing on a white ground."""
    rng = random.Random(seed)
    wide, high = width * _FINER, height * _FINER
    on_white = seed % 10 == 0
    image = Image.new("RGB", (wide, high), "white" if on_white else _colour(rng))
    draw = ImageDraw.Draw(image)
    for _ in range(_LEAVES):
        radius = min(min(wide, high) * 0.5, 3 * _FINER / rng.random() ** 0.7)
        across, down = rng.uniform(0, wide), rng.uniform(0, high)
        if on_white:
            radius = min(radius, high / 8)
            across, down = wide / 2 + (across - wide / 2) / 3, high / 2 + (down - high / 2) / 3
        shape = (across - radius, down - radius * rng.uniform(0.4, 1), across + radius, down + radius * 0.7)
        (draw.ellipse if rng.random() < 0.7 else draw.rectangle)(shape, fill=_colour(rng))
    return image.resize((width, height), Image.Resampling.LANCZOS)


def _colour(rng: random.Random) -> tuple[int, int, int]:
    level = rng.randrange(20, 220)
    return tuple(max(0, min(255, level + rng.randrange(-40, 41))) for _ in range(3))


def write_photographs(folder: Path, count: int, caption: str = "photo of sks thing number {}") -> None:
    """Write photographs with their captions: `000.jpg`, `000.txt` and on."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        make_photograph(seed).save(folder / f"{seed:03}.jpg", quality=88)
        (folder / f"{seed:03}.txt").write_text(caption.format(seed), encoding="utf-8")
