"""Draw the icon and the banner that ComfyUI's registry shows, into docs/pictures.

Run: python tools/brand.py
A mosaic with the most gaps in the upper left.
"""

import random
from pathlib import Path

from PIL import Image, ImageDraw

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
GROUND, TILES = "#16181d", ("#3f789e", "#5b9bc2", "#8cc0d9", "#e8b75d", "#d9774b")


def mosaic(width: int, height: int, tiles: int) -> Image.Image:
    """A picture of (width, height) pixels with `tiles` rows of tiles, four times oversampled."""
    scale = 4
    image = Image.new("RGB", (width * scale, height * scale), GROUND)
    draw, draws = ImageDraw.Draw(image), random.Random(7)
    side = height * scale / (tiles + 1)
    columns = int(width * scale / side) - 1
    margin = (width * scale - columns * side) / 2
    for row in range(tiles):
        for column in range(columns):
            threshold = (row + 1) / tiles + (column + 1) / columns
            if draws.random() > threshold - 0.2:
                continue
            x = margin + column * side
            y = side / 2 + row * side
            gap = side * 0.06
            turn = side * 0.04
            corners = [(x + gap, y + gap), (x + side - gap, y + gap), (x + side - gap, y + side - gap)]
            corners.append((x + gap, y + side - gap))
            jittered = [(a + draws.uniform(-turn, turn), b + draws.uniform(-turn, turn)) for a, b in corners]
            draw.polygon(jittered, fill=draws.choices(TILES, (5, 4, 2, 2, 1))[0])
    return image.resize((width, height), Image.Resampling.LANCZOS)


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    mosaic(400, 400, 6).save(PICTURES / "icon.png", optimize=True)
    mosaic(1680, 720, 9).save(PICTURES / "banner.png", optimize=True)


if __name__ == "__main__":
    main()
