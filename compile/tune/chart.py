"""Chart of the measured settings of Compile Model."""

from dataclasses import dataclass

from PIL import Image

from ...common.canvas import Canvas, Colour
from .results import Quartiles, TuneResult, label

_BACKGROUND, _TEXT, _FAINT = (255, 255, 255), (55, 65, 81), (130, 138, 150)
_EAGER, _COMPILED, _BEST = (164, 173, 186), (164, 199, 232), (23, 92, 163)

_LEFT, _BARS, _LONGEST, _COMPILE = 24, 320, 690, 1000  # names, bars from here, at most to here, right edge of seconds
_TOP, _BOTTOM = 96, 476


@dataclass(frozen=True)
class _Row:
    """One line of the chart. step: milliseconds, None for what was not measured, which `note` says."""

    name: str
    step: Quartiles | None
    colour: Colour = _FAINT
    note: str = ""
    compile_seconds: float | None = None


def plot_tuning(result: TuneResult, width: int = 1024, height: int = 512) -> Image.Image:
    """Plot a bar of milliseconds per step for eager and each setting, its quartiles as a thin line.

    The seconds of compiling stand at the right. Returns an RGB image.
    """
    # Laid out for 1024 x 512.
    canvas = Canvas(width, height, _BACKGROUND, 3, (width / 1024, height / 512))
    title = f"{result.key['class']}, {result.key['size']}"
    canvas.text(_LEFT, 30, canvas.fitting(title, _COMPILE - _LEFT, 20), 20, _TEXT, "lm")
    machine = f"{result.key['device']}, torch {result.key['torch']}, {result.measured_at}"
    canvas.text(_LEFT, 58, canvas.fitting(machine, 600, 14), 14, _FAINT, "lm")
    canvas.text(_COMPILE, 76, "compile", 14, _FAINT, "rm")
    rows = _rows(result)
    longest = max(row.step.high for row in rows if row.step is not None)
    pitch = min(56.0, (_BOTTOM - _TOP) / len(rows))
    for number, row in enumerate(rows):
        _plot_row(canvas, row, _TOP + (number + 0.5) * pitch, pitch, longest)
    canvas.text(_LEFT, 496, canvas.fitting(result.recommendation(), _COMPILE - _LEFT, 14), 14, _TEXT, "lm")
    return canvas.finish()


def _rows(result: TuneResult) -> list[_Row]:
    best = result.best()
    rows = [_Row("eager", result.eager, _EAGER, f"{result.eager.median:.4g} ms/step")]
    for row in result.measured:
        note = f"{row.step.median:.4g} ms, {row.gain.median:.2f}x"
        colour = _BEST if row is best else _COMPILED
        rows.append(_Row(label(row.settings), row.step, colour, note, row.compile_seconds))
    rows += [_Row(label(u.settings), None, note="failed" if u.failed else "left out") for u in result.unmeasured]
    return rows


def _plot_row(canvas: Canvas, row: _Row, middle: float, pitch: float, longest: float) -> None:
    size = min(16.0, pitch * 0.5)
    half = min(15.0, pitch * 0.36)
    name = canvas.fitting(row.name, _BARS - _LEFT - 12, size)
    canvas.text(_LEFT, middle, name, size, _TEXT if row.step is not None else _FAINT, "lm")
    if row.step is None:
        canvas.text(_BARS, middle, row.note, size, _FAINT, "lm")
        return
    length = (_LONGEST - _BARS) / longest
    end = _BARS + row.step.median * length
    _bar(canvas, _BARS, middle - half, end, middle + half, row.colour)
    low, high = _BARS + row.step.low * length, _BARS + row.step.high * length
    _bar(canvas, low, middle - 0.8, high, middle + 0.8, _TEXT)
    for edge in (low, high):
        _bar(canvas, edge - 0.8, middle - half / 2, edge + 0.8, middle + half / 2, _TEXT)
    canvas.text(max(end, high) + 12, middle, row.note, size, _TEXT, "lm")
    if row.compile_seconds is not None:
        canvas.text(_COMPILE, middle, f"{row.compile_seconds:.1f} s", size, _TEXT, "rm")


def _bar(canvas: Canvas, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
    """A filled box, which a right end near or before the left one leaves a pixel wide."""
    canvas.box(left, top, max(left + 1, right), bottom, colour)
