"""Chart of the measured settings of Compile Model."""

from dataclasses import dataclass

from PIL import Image

from ...common.canvas import Canvas, Colour
from .results import Quartiles, TuneResult, label

_BACKGROUND = (255, 255, 255)
_INK = (55, 65, 81)
_FAINT = (130, 138, 150)
_EAGER = (164, 173, 186)
_COMPILED = (164, 199, 232)
_BEST = (23, 92, 163)

# Names, bars from here, at most to here, right edge of figures.
_LEFT = 24
_BARS = 430
_LONGEST = 740
_RIGHT = 1004
_TOP, _BOTTOM = 72, 500
_TEXT = 30  # pixels: on a node of 400 the chart is a third as large


@dataclass(frozen=True)
class _Row:
    """One line of the chart.

    name: label on the left.
    step: milliseconds of a step; None if not measured, as `note` says.
    colour: colour of the bar.
    note: text beside the bar.
    """

    name: str
    step: Quartiles | None
    colour: Colour = _FAINT
    note: str = ""


def plot_tuning(result: TuneResult, width: int = 1024, height: int = 512) -> Image.Image:
    """Plot a bar of milliseconds per step for eager and each setting, its quartiles as a thin line.

    Returns an RGB image. The other measurements are in `TuneResult.text`.
    """
    # Laid out for 1024 x 512.
    canvas = Canvas(width, height, _BACKGROUND, 3, (width / 1024, height / 512))
    title = f"{result.key['class']}, {result.key['size']}: one step"
    canvas.text(_LEFT, 36, title, 32, _INK, "lm", _RIGHT - _LEFT)
    rows = _rows(result)
    longest = max(row.step.high for row in rows if row.step is not None)
    pitch = min(56.0, (_BOTTOM - _TOP) / len(rows))
    for number, row in enumerate(rows):
        _plot_row(canvas, row, _TOP + (number + 0.5) * pitch, pitch, longest)
    return canvas.finish()


def _rows(result: TuneResult) -> list[_Row]:
    best = result.best()
    rows = [_Row("eager", result.eager, _EAGER, f"{result.eager.median:.4g} ms")]
    for row in result.measured:
        note = f"{row.step.median:.4g} ms, {row.gain.median:.2f}x"
        colour = _BEST if row is best else _COMPILED
        rows.append(_Row(label(row.settings), row.step, colour, note))
    rows += [_Row(label(u.settings), None, note="failed" if u.failed else "left out") for u in result.unmeasured]
    return rows


def _plot_row(canvas: Canvas, row: _Row, middle: float, pitch: float, longest: float) -> None:
    size = min(_TEXT, pitch * 0.72)
    half = min(20.0, pitch * 0.36)
    canvas.text(_LEFT, middle, row.name, size, _INK if row.step is not None else _FAINT, "lm", _BARS - _LEFT - 12)
    if row.step is None:
        canvas.text(_BARS, middle, row.note, size, _FAINT, "lm")
        return
    length = (_LONGEST - _BARS) / longest
    end = _BARS + row.step.median * length
    _bar(canvas, _BARS, middle - half, end, middle + half, row.colour)
    low, high = _BARS + row.step.low * length, _BARS + row.step.high * length
    _bar(canvas, low, middle - 1.5, high, middle + 1.5, _INK)
    for edge in (low, high):
        _bar(canvas, edge - 1.5, middle - half / 2, edge + 1.5, middle + half / 2, _INK)
    text_x = max(end, high) + 12
    canvas.text(text_x, middle, row.note, size, _INK, "lm", _RIGHT - text_x)


def _bar(canvas: Canvas, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
    """Draw a filled box, at least one pixel wide even if `x1` is near or before `x0`."""
    canvas.box(x0, y0, max(x0 + 1, x1), y1, colour)
