"""Measured settings of Compile Model as a picture, drawn with Pillow alone so that it works on every ComfyUI."""

from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from .results import Spread, TuneResult, label

# Pillow's lines have hard edges: everything is drawn this many times larger and scaled down.
_SUPERSAMPLING = 3
_BACKGROUND, _TEXT, _FAINT = (255, 255, 255), (55, 65, 81), (130, 138, 150)
_EAGER, _COMPILED, _BEST = (164, 173, 186), (164, 199, 232), (23, 92, 163)

_LEFT, _BARS, _LONGEST, _COMPILE = 24, 320, 690, 1000  # names, bars from here, at most to here, right edge of seconds
_TOP, _BOTTOM = 96, 476


@dataclass(frozen=True)
class _Row:
    """One line of the chart. step: milliseconds, None for what was not measured, which `note` says."""

    name: str
    step: Spread | None
    colour: tuple[int, int, int] = _FAINT
    note: str = ""
    compile_seconds: float | None = None


def draw_chart(result: TuneResult, width: int = 1024, height: int = 512) -> Image.Image:
    """A bar of milliseconds per step for eager and each setting, its quartiles as a thin line, and beside it what
    compiling took. Returns an RGB picture."""
    canvas = _Canvas(width, height)
    title = f"{result.key['class']}, {result.key['size']}"
    canvas.text(_LEFT, 30, canvas.fitting(title, _COMPILE - _LEFT, 20), size=20)
    machine = f"{result.key['device']}, torch {result.key['torch']}, {result.measured_at}"
    canvas.text(_LEFT, 58, canvas.fitting(machine, 600, 14), _FAINT, size=14)
    canvas.text(_COMPILE, 76, "compile", _FAINT, "rm", size=14)
    rows = _rows(result)
    longest = max(row.step.high for row in rows if row.step is not None)
    pitch = min(56.0, (_BOTTOM - _TOP) / len(rows))
    for number, row in enumerate(rows):
        canvas.row(row, _TOP + (number + 0.5) * pitch, pitch, longest)
    canvas.text(_LEFT, 496, canvas.fitting(result.recommendation(), _COMPILE - _LEFT, 14), size=14)
    return canvas.picture()


def _rows(result: TuneResult) -> list[_Row]:
    best = result.best()
    rows = [_Row("eager", result.eager, _EAGER, f"{result.eager.median:.4g} ms/step")]
    for row in result.measured:
        note = f"{row.step.median:.4g} ms, {row.gain.median:.2f}x"
        colour = _BEST if row is best else _COMPILED
        rows.append(_Row(label(row.settings), row.step, colour, note, row.compile_seconds))
    rows += [_Row(label(u.settings), None, note="failed" if u.failed else "left out") for u in result.unmeasured]
    return rows


class _Canvas:
    """Positions are in pixels of a picture of 1024 x 512."""

    def __init__(self, width: int, height: int):
        self.size = (width, height)
        self.scale = (width * _SUPERSAMPLING / 1024, height * _SUPERSAMPLING / 512)
        self.image = Image.new("RGB", (width * _SUPERSAMPLING, height * _SUPERSAMPLING), _BACKGROUND)
        self.draw = ImageDraw.Draw(self.image)

    def _font(self, size: float) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return ImageFont.load_default(size * min(self.scale))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: tuple[int, int, int] = _TEXT,
        anchor: str = "lm",
        size: float = 16,
    ) -> None:
        self.draw.text((x * self.scale[0], y * self.scale[1]), text, colour, self._font(size), anchor)

    def fitting(self, text: str, width: float, size: float) -> str:
        """The text, cut to what fits into `width`."""
        font, most = self._font(size), width * self.scale[0]
        if font.getlength(text) <= most:
            return text
        while text and font.getlength(text + "…") > most:
            text = text[:-1]
        return text + "…"

    def box(self, left: float, top: float, right: float, bottom: float, colour: tuple[int, int, int]) -> None:
        x, y = self.scale
        self.draw.rectangle([left * x, top * y, max(left + 1, right) * x, bottom * y], colour)

    def row(self, row: _Row, middle: float, pitch: float, longest: float) -> None:
        size = min(16.0, pitch * 0.5)
        half = min(15.0, pitch * 0.36)
        name = self.fitting(row.name, _BARS - _LEFT - 12, size)
        self.text(_LEFT, middle, name, _TEXT if row.step is not None else _FAINT, size=size)
        if row.step is None:
            self.text(_BARS, middle, row.note, _FAINT, size=size)
            return
        length = (_LONGEST - _BARS) / longest
        end = _BARS + row.step.median * length
        self.box(_BARS, middle - half, end, middle + half, row.colour)
        low, high = _BARS + row.step.low * length, _BARS + row.step.high * length
        self.box(low, middle - 0.8, high, middle + 0.8, _TEXT)
        for edge in (low, high):
            self.box(edge - 0.8, middle - half / 2, edge + 0.8, middle + half / 2, _TEXT)
        self.text(max(end, high) + 12, middle, row.note, size=size)
        if row.compile_seconds is not None:
            self.text(_COMPILE, middle, f"{row.compile_seconds:.1f} s", anchor="rm", size=size)

    def picture(self) -> Image.Image:
        return self.image.resize(self.size, Image.Resampling.LANCZOS)
