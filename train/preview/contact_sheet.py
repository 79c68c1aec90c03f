"""Contact sheets: images in titled rows and columns, and the choice of video frames to show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from PIL import Image

from ...common.canvas import FAINT, PAPER, Canvas, Font, load_font

if TYPE_CHECKING:
    from torch import Tensor

MOST_PIXELS = 8192  # largest side of a sheet
_GAP = (244, 245, 246)
_SPACE, _BETWEEN = 8, 4
_MOST_LINES = 3
_PICTURE, _MOVING = 1024, 512  # largest side of an image, and of one on an animated sheet
_MOST_MOVING = 2048  # largest side of an animated sheet, all frames of which are in memory at once
# (row, column).
Cell = tuple[int, int]
Item = TypeVar("Item")


def to_picture(pixels: Tensor) -> Image.Image:
    """Convert (H, W, 3), 0 to 1, to an 8-bit image, truncated like core's Save Image."""
    return Image.fromarray(np.clip(255.0 * pixels.float().cpu().numpy(), 0, 255).astype(np.uint8))


def middle(clip: Tensor) -> Tensor:
    """Return the middle frame of a video (frames, H, W, 3); of an image its only frame."""
    return clip[len(clip) // 2]


def spread(items: Sequence[Item], max_items: int) -> list[Item]:
    """Select up to `max_items` (at least 2) items, evenly spaced from the first to the last."""
    if len(items) <= max_items:
        return list(items)
    return [items[round(i * (len(items) - 1) / (max_items - 1))] for i in range(max_items)]


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Stack images of one size in a column, from top to bottom."""
    width, height = pictures[0].size
    column = Image.new("RGB", (width, len(pictures) * (height + _BETWEEN) - _BETWEEN), PAPER)
    for number, picture in enumerate(pictures):
        column.paste(picture, (0, number * (height + _BETWEEN)))
    return column


def render_sheet(
    rows: Sequence[str], columns: Sequence[str], cells: Mapping[Cell, Image.Image], most_side: int = MOST_PIXELS
) -> Image.Image:
    """Render a contact sheet.

    rows, columns: titles.
    cells: images by (row, column); a missing one leaves a blank cell.
    most_side: largest side of an image on the sheet, in pixels. All images are scaled down by one factor if an image or
        the sheet would be larger.
    """
    sizes = [_largest(cells[cell].size for cell in cells if cell[0] == row) for row in range(len(rows))]
    factor = _factor(sizes, len(columns), most_side)
    heights = [max(1, int(height * factor)) for _, height in sizes]
    widths = [max(1, int(width * factor)) for width, _ in sizes]
    width = max([*widths, 48])
    size = min(24, max(11, width // 16))
    font, line = load_font(size), round(1.35 * size)
    total = _SPACE + (width + _SPACE) * len(columns)
    heads = [_wrapped(name, font, width) for name in columns]
    head = line * max(len(lines) for lines in heads)
    names = [_wrapped(name, font, total - 2 * _SPACE) for name in rows]
    tall = head + 2 * _SPACE + sum(line * len(n) + h + 2 * _SPACE for n, h in zip(names, heights, strict=True))
    sheet = Canvas(total, tall, oversampling=1)
    for column, lines in enumerate(heads):
        for number, text in enumerate(lines):
            centre = _SPACE + column * (width + _SPACE) + width / 2
            sheet.text(centre, _SPACE + number * line, text, size, anchor="ma")
    top = head + 2 * _SPACE
    for row, lines in enumerate(names):
        sheet.line([(0, top - _SPACE / 2), (total, top - _SPACE / 2)], FAINT)
        for number, text in enumerate(lines):
            sheet.text(_SPACE, top + number * line, text, size)
        top += line * len(lines)
        for column in range(len(columns)):
            left_edge = _SPACE + column * (width + _SPACE)
            picture = cells.get((row, column))
            if picture is None:
                sheet.box(left_edge, top, left_edge + width - 1, top + heights[row] - 1, _GAP)
                continue
            if factor < 1:
                small = (max(1, int(picture.width * factor)), max(1, int(picture.height * factor)))
                picture = picture.resize(small, Image.Resampling.LANCZOS)
            sheet.paste(picture.convert("RGB"), left_edge + (width - picture.width) // 2, top)
        top += heights[row] + 2 * _SPACE
    return sheet.finish()


def _largest(sizes) -> tuple[int, int]:
    size_list = list(sizes) or [(64, 64)]
    return max(w for w, _ in size_list), max(h for _, h in size_list)


def _factor(sizes: Sequence[tuple[int, int]], columns: int, most_side: int) -> float:
    wide, tall = max(w for w, _ in sizes), sum(h for _, h in sizes)
    side = max(max(size) for size in sizes)
    room = MOST_PIXELS - _SPACE * (columns + 1)
    return min(1.0, most_side / side, room / (wide * columns), MOST_PIXELS / tall)


def _wrapped(text: str, font: Font, width: float) -> list[str]:
    """Wrap the text to lines of at most `width` pixels; the middle of a too long text is replaced by an ellipsis."""
    lines: list[str] = []
    rest = " ".join(text.split()) or " "
    while rest and len(lines) < _MOST_LINES:
        length = next((n for n in range(len(rest), 1, -1) if font.getlength(rest[:n]) <= width), 1)
        if length < len(rest):
            if len(lines) == _MOST_LINES - 1:
                keep = max(1, length // 2 - 1)
                rest = f"{rest[:keep]}...{rest[-keep:]}"
                length = len(rest)
            elif (space := rest.rfind(" ", 1, length + 1)) > length // 2:
                length = space
        lines.append(rest[:length].strip())
        rest = rest[length:].strip()
    return lines


def render_frames(clips: Mapping[Cell, Tensor], frames: int) -> Iterator[tuple[dict[Cell, Image.Image], int]]:
    """Yield (images by cell, largest side of an image in pixels) for each sheet.

    clips: videos by cell, (frames, H, W, 3); an image has one frame.
    frames: 1 shows the middle frame. More are stacked, evenly spaced from first to last. 0 yields one sheet per frame
        of the longest video; shorter ones stay at their last frame.
    """
    if frames == 1:
        yield {cell: to_picture(middle(clip)) for cell, clip in clips.items()}, _PICTURE
    elif frames > 1:
        yield {cell: _in_a_column(clip, frames) for cell, clip in clips.items()}, MOST_PIXELS
    else:
        across = max(max(row, column) for row, column in clips) + 1
        for moment in range(max(map(len, clips.values()))):
            cells = {cell: to_picture(clip[min(moment, len(clip) - 1)]) for cell, clip in clips.items()}
            yield cells, min(_MOVING, _MOST_MOVING // across)


def _in_a_column(clip: Tensor, frames: int) -> Image.Image:
    pictures = [to_picture(clip[number]) for number in spread(range(len(clip)), frames)]
    for picture in pictures:
        picture.thumbnail((_PICTURE, _PICTURE), Image.Resampling.LANCZOS)
    return stacked(pictures)
