"""Sheet of the losses by picture: a thumbnail, a bar and a verdict for each, the picture that resists most first."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from ...common.canvas import FAINT, INK, SOFT, Canvas, Colour
from ...common.text import cut
from ...data.layouts.files import has_ending
from ...data.layouts.kinds import VIDEOS
from ...data.media.thumbnails import image_thumbnail, video_thumbnail
from .verdicts import LEARNS, PULLS_AWAY, RESISTS

# In pixels.
WIDTH = 1024
HEAD = 150  # height of what stands above the rows
ROW = 84
MARGIN = 16
SIDE = 76  # of a thumbnail
TEXT = 26
BAR_LEFT, BAR_RIGHT = 470, 1000
MOST_ROWS, MOST_BEST = 24, 8
COLOURS: dict[str, Colour] = {LEARNS: (43, 108, 176), RESISTS: (197, 74, 62), PULLS_AWAY: (217, 119, 6)}


def draw_sheet(report: Mapping[str, Any], files: Mapping[str, Path | None]) -> Image.Image:
    """Draw the report of `judge` as an RGB image.

    Of more than MOST_ROWS pictures those that resist most and the MOST_BEST that are learnt best are drawn.

    files: the file of each picture, for its thumbnail; None draws none.
    """
    pictures = list(reversed(report["pictures"]))
    rows = pictures if len(pictures) <= MOST_ROWS else [*pictures[: MOST_ROWS - MOST_BEST], *pictures[-MOST_BEST:]]
    canvas = Canvas(WIDTH, HEAD + ROW * len(rows) + MARGIN, oversampling=1)
    _draw_head(canvas, report, len(pictures) - len(rows))
    scale = _Scale([picture["relative"] for picture in pictures], report["held_out"])
    for row, picture in enumerate(rows):
        _draw_row(canvas, HEAD + row * ROW, picture, scale, files.get(picture["file"]))
    bottom = HEAD + ROW * len(rows)
    canvas.line([(scale.x(1.0), HEAD - 8), (scale.x(1.0), bottom)], INK, 2)
    canvas.text(scale.x(1.0), HEAD - 10, "base", 20, INK, "rb" if scale.x(1.0) > 900 else "mb")
    if report["held_out"] is not None:
        across = scale.x(report["held_out"])
        canvas.line([(across, HEAD - 8), (across, bottom)], SOFT, 2)
        canvas.text(across, HEAD - 36, "held out", 20, SOFT, "mb")
    return canvas.finish()


class _Scale:
    """Scale of relative losses along the bars, which holds all of them and the base model's 1."""

    def __init__(self, relative: Sequence[float], held_out: float | None) -> None:
        values = [*relative, 1.0, *([] if held_out is None else [held_out])]
        room = max(0.01, 0.05 * (max(values) - min(values)))
        self.low, self.high = max(0.0, min(values) - room), max(values) + room

    def x(self, relative: float) -> float:
        """Return the position of a relative loss in pixels."""
        return BAR_LEFT + (relative - self.low) / (self.high - self.low) * (BAR_RIGHT - BAR_LEFT)


def _draw_head(canvas: Canvas, report: Mapping[str, Any], hidden: int) -> None:
    counts = [sum(p["verdict"] == verdict for p in report["pictures"]) for verdict in (RESISTS, PULLS_AWAY, LEARNS)]
    canvas.text(MARGIN, 12, f"Loss by picture at step {report['step']}, compared with the base model", 34, INK)
    left = float(MARGIN)
    for verdict, count in zip((RESISTS, PULLS_AWAY, LEARNS), counts, strict=True):
        text = f"{verdict}: {count}"
        canvas.box(left, 66, left + 22, 88, COLOURS[verdict])
        canvas.text(left + 32, 62, text, TEXT, SOFT)
        left += 70 + canvas.text_width(text, TEXT)
    if hidden:
        canvas.text(left, 62, f"{hidden} between them are not drawn", TEXT, SOFT)


def _draw_row(canvas: Canvas, top: float, picture: Mapping[str, Any], scale: _Scale, file: Path | None) -> None:
    canvas.line([(0, top), (WIDTH, top)], FAINT)
    thumbnail = None if file is None else _thumbnail(file)
    if thumbnail is not None:
        left, down = (SIDE - thumbnail.width) // 2, (SIDE - thumbnail.height) // 2
        canvas.paste(thumbnail, MARGIN + left, round(top) + 4 + down)
    text_left = MARGIN + SIDE + 14
    canvas.text(text_left, top + 10, cut(picture["file"]), TEXT, INK, room=BAR_LEFT - text_left - 14)
    change = f"{picture['relative'] - 1:+.1%}"
    colour = COLOURS[picture["verdict"]]
    canvas.text(text_left, top + 44, f"{change}, {picture['verdict']}", TEXT, colour)
    ends = sorted((scale.x(1.0), scale.x(picture["relative"])))
    canvas.box(ends[0], top + 24, max(ends[1], ends[0] + 2), top + 60, colour)
    for _, relative in picture["earlier"]:
        across = min(max(scale.x(relative), BAR_LEFT), BAR_RIGHT)
        canvas.line([(across, top + 16), (across, top + 68)], SOFT, 2)


def _thumbnail(file: Path) -> Image.Image | None:
    """Read the thumbnail of a file; None if it is gone or can't be read any more."""
    make = video_thumbnail if has_ending(file.name, VIDEOS.read) else image_thumbnail
    with suppress(OSError, ValueError), Image.open(BytesIO(make(file)), formats=["WEBP"]) as image:
        thumbnail = image.convert("RGB")
        thumbnail.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
        return thumbnail
    return None
