"""Draw the pictures of the Try it workflow, with their captions, into `pictures/try_it`.

Run: python tools/try_it/draw.py
"""

from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

FOLDER = Path(__file__).resolve().parents[2] / "pictures" / "try_it"
SIDE, FINER = 256, 4  # pixels; drawn that much larger and made smaller, so that edges are smooth


class Pen:
    """Draws on a picture of 100 by 100."""

    def __init__(self, ground: str) -> None:
        self.image = Image.new("RGB", (SIDE * FINER, SIDE * FINER), ground)
        self._pen = ImageDraw.Draw(self.image)

    def _scaled(self, numbers: tuple[float, ...]) -> list[float]:
        return [number * SIDE * FINER / 100 for number in numbers]

    def box(self, colour: str, *corners: float) -> None:
        self._pen.rectangle(self._scaled(corners), fill=colour)

    def oval(self, colour: str, *corners: float) -> None:
        self._pen.ellipse(self._scaled(corners), fill=colour)

    def area(self, colour: str, *points: float) -> None:
        self._pen.polygon(self._scaled(points), fill=colour)


def boat(pen: Pen) -> None:
    pen.oval("#ffd23f", 10, 8, 30, 28)
    pen.box("#1b4f9c", 0, 68, 100, 100)
    pen.area("#b3261e", 16, 62, 84, 62, 72, 80, 28, 80)
    pen.box("#4a3020", 48, 14, 51, 62)
    pen.area("#ffffff", 53, 14, 53, 57, 84, 57)
    pen.area("#f28c28", 46, 22, 46, 57, 22, 57)


def house(pen: Pen) -> None:
    pen.oval("#f3efd2", 74, 8, 92, 26)
    pen.oval("#3c8a3f", -30, 66, 130, 150)
    pen.box("#f4d35e", 26, 44, 74, 80)
    pen.area("#a4243b", 18, 46, 50, 16, 82, 46)
    pen.box("#5a3921", 44, 58, 56, 80)
    pen.box("#2d5d8b", 30, 52, 40, 62)
    pen.box("#2d5d8b", 60, 52, 70, 62)


def cat(pen: Pen) -> None:
    pen.area("#26232b", 22, 48, 22, 10, 52, 34)
    pen.area("#26232b", 78, 48, 78, 10, 48, 34)
    pen.oval("#26232b", 16, 26, 84, 92)
    for x in (36, 64):
        pen.oval("#7bd148", x - 10, 46, x + 10, 66)
        pen.oval("#26232b", x - 3, 48, x + 3, 64)
    pen.area("#f2a3b3", 44, 70, 56, 70, 50, 78)


# name: (who draws it, its ground, its caption)
PICTURES: dict[str, tuple[Callable[[Pen], None], str, str]] = {
    "boat": (boat, "#a8d8ea", "a sailing boat on the sea"),
    "cat": (cat, "#e85d9e", "the face of a black cat"),
    "house": (house, "#232a5c", "a yellow house at night"),
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (draw, ground, caption) in PICTURES.items():
        pen = Pen(ground)
        draw(pen)
        picture = pen.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS).quantize(64).convert("RGB")
        picture.save(FOLDER / f"{name}.png", optimize=True)
        (FOLDER / f"{name}.txt").write_text(caption + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
