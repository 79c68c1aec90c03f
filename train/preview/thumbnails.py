"""Small pictures of previews, decoded within the budgets for files that anybody may have written."""

from io import BytesIO

from PIL import Image

from ...common.untrusted.budgets import PREVIEW
from ...common.untrusted.in_flight import page_pixels

_REDUCIBLE = ("L", "LA", "RGB", "RGBA")  # modes in which adjacent pixels can be averaged


def small_picture(data: bytes, side: int) -> Image.Image | None:
    """Decode an image, or the first frame of a video, in RGB; None if it can't be read or is over the budget.

    data: contents of a PNG or WEBP file.
    side: longest side of the result in pixels.
    """
    try:
        with Image.open(BytesIO(data), formats=["PNG", "WEBP"]) as opened:
            if opened.width * opened.height > PREVIEW.pixels:
                return None
            with page_pixels.decoding(opened.width * opened.height):
                picture = _reduced(opened, side).convert("RGB")
        picture.thumbnail((side, side))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError):
        return None
    return picture


def _reduced(opened: Image.Image, side: int) -> Image.Image:
    """Decode a picture, downscaled by an integer if far larger than the result, to keep its copies small."""
    factor = max(opened.size) // (3 * side)
    return opened.reduce(factor) if factor > 1 and opened.mode in _REDUCIBLE else opened
