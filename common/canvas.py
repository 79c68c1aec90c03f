"""A drawing surface for charts, made with Pillow alone so that it works on every ComfyUI."""

from collections.abc import Sequence
from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, ...]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Point = tuple[float, float]

INK = (32, 33, 36)
SOFT = (107, 112, 120)
FAINT = (224, 227, 231)
PAPER = (253, 253, 252)


class Canvas:
    """RGB drawing with positions in pixels of the finished image, fractions allowed.

    Pillow draws lines and boxes with hard edges: everything is drawn `oversampling` times larger and scaled down.
    unit: finished pixels for each unit of a position, (across, down), for a chart laid out for another size.
    Sizes of text are multiplied by the smaller of the two.
    """

    def __init__(
        self,
        width: int,
        height: int,
        background: Colour = PAPER,
        oversampling: int = 2,
        unit: tuple[float, float] = (1, 1),
    ) -> None:
        self.size = (width, height)
        self.background = background
        self.oversampling = oversampling
        self._scale = (unit[0] * oversampling, unit[1] * oversampling)
        self._image = Image.new("RGB", (width * oversampling, height * oversampling), background)
        self._draw = ImageDraw.Draw(self._image)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        colour: Colour = INK,
        anchor: str = "la",
        room: float | None = None,
    ) -> None:
        """Write one line of text, shrunk to fit if it is wider than `room`.

        anchor: Pillow's, such as "la" for a position at the left of its top.
        """
        if room is not None:
            size *= min(1.0, room * self._scale[0] / self._font(size).getlength(text))
        self._draw.text(self._place((x, y)), text, colour, self._font(size), anchor)

    def text_width(self, text: str, size: float) -> float:
        """Measure the text in finished pixels."""
        return self._font(size).getlength(text) / self.oversampling

    def line(self, points: Sequence[Point], colour: Colour = INK, width: float = 1) -> None:
        """Draw a line through the points, `width` finished pixels wide."""
        places = [self._place(point) for point in points]
        self._draw.line(places, colour, max(1, round(width * self.oversampling)), joint="curve")

    def box(
        self,
        left: float,
        top: float,
        right: float,
        bottom: float,
        fill: Colour | None = None,
        outline: Colour | None = None,
        width: float = 1,
    ) -> None:
        """Draw a rectangle; width: of the outline."""
        corners = [self._place((left, top)), self._place((right, bottom))]
        self._draw.rectangle(corners, fill, outline, round(width * self.oversampling))

    def polygon(self, points: Sequence[Point], fill: Colour) -> None:
        """Fill the polygon through the points."""
        self._draw.polygon([self._place(point) for point in points], fill)

    def dot(self, x: float, y: float, radius: float, fill: Colour) -> None:
        """Fill a circle, `radius` in finished pixels."""
        self._draw.circle(self._place((x, y)), radius * self.oversampling, fill)

    def paste(self, image: Image.Image, left: int, top: int) -> None:
        """Put an image in its own pixels at the position; the canvas must not be oversampled."""
        assert self.oversampling == 1
        self._image.paste(image, (left, top))

    def nearest(self, position: float) -> float:
        """Round a position to the nearest drawn pixel; Pillow itself would truncate."""
        return round(position * self.oversampling) / self.oversampling

    def finish(self) -> Image.Image:
        """Scale the drawing down to its size."""
        if self.oversampling == 1:
            return self._image
        return self._image.resize(self.size, Image.Resampling.LANCZOS)

    def _place(self, point: Point) -> Point:
        return point[0] * self._scale[0], point[1] * self._scale[1]

    def _font(self, size: float) -> Font:
        return load_font(size * min(self._scale))


@lru_cache(maxsize=32)
def load_font(size: float) -> Font:
    """Load Pillow's own font; cached, so that it isn't read for each line of text."""
    return ImageFont.load_default(size)
