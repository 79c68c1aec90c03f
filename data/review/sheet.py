"""Sheet of the pictures with findings: a thumbnail of each, and its faults below it."""

from collections.abc import Sequence
from io import BytesIO
from math import ceil
from pathlib import Path

from PIL import Image

from ...common.canvas import INK, SOFT, Canvas
from ...common.progress import Interrupted
from ...common.text import quantity
from ..media.thumbnails import SIDE, image_thumbnail
from .findings import Finding

MOST_SHOWN = 60
_MOST_COLUMNS = 6
_MARGIN = 12  # pixels, as are the next two
_HEAD = 30
_LINE = 15
_LINES = 4  # below a thumbnail
_RED = (176, 32, 32)


def draw_sheet(
    pictures: Sequence[tuple[Path, str, Sequence[Finding]]], count: int, interrupted: Interrupted
) -> Image.Image:
    """Draw the first MOST_SHOWN pictures with findings.

    pictures: file, name and findings of each.
    count: pictures in the folder.
    """
    shown = pictures[:MOST_SHOWN]
    columns = min(_MOST_COLUMNS, max(2, ceil(len(shown) ** 0.5)))  # few of them are large on the node
    rows = -(-len(shown) // columns)
    cell = (SIDE + _MARGIN, SIDE + _MARGIN + _LINE * _LINES)
    canvas = Canvas(columns * cell[0] + _MARGIN, _HEAD + rows * cell[1] + _MARGIN, oversampling=1)
    rest = len(pictures) - len(shown)
    head = f"{quantity(count, 'picture')}, {len(pictures):,} with a finding" + (
        f", {rest:,} of them not shown" if rest else ""
    )
    canvas.text(_MARGIN, 8, head, 15)
    for number, (path, name, findings) in enumerate(shown):
        interrupted()
        left, top = _MARGIN + number % columns * cell[0], _HEAD + number // columns * cell[1]
        _draw(canvas, left, top, path, name, findings)
    return canvas.finish()


def _draw(canvas: Canvas, left: int, top: int, path: Path, name: str, findings: Sequence[Finding]) -> None:
    try:
        with Image.open(BytesIO(image_thumbnail(path, name)), formats=["WEBP"]) as image:
            canvas.paste(image.convert("RGB"), left + (SIDE - image.width) // 2, top + (SIDE - image.height) // 2)
    except Exception:  # decoders raise many kinds of errors for broken files, which the finding names
        canvas.text(left + SIDE / 2, top + SIDE / 2, "can't be shown", 13, SOFT, "mm")
    lines = [(_fitting(name), INK)]
    lines += [(_fitting(f"{f.fault}: {f.detail}" if f.detail else f.fault), _RED) for f in findings]
    for line, (text, colour) in enumerate(lines[:_LINES]):
        canvas.text(left, top + SIDE + 4 + line * _LINE, text, 12, colour, room=SIDE)


def _fitting(text: str) -> str:
    """Cut a text so that it stays readable in the width of a thumbnail."""
    return text if len(text) <= 48 else f"{text[:47]}…"
