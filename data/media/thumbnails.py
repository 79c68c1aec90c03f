"""Thumbnails of image and video files, bounded in time and memory whatever a file claims to hold."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...common.untrusted.budgets import THUMBNAIL_FRAME, THUMBNAIL_IMAGE
from ...common.untrusted.in_flight import page_pixels
from .colours import Colours, colours_of
from .decoding import alpha_decoder, deinterlaced, is_interlaced
from .images import _is_wide, _plane_reader, check_pillow, open_image
from .images import _named_errors as _named_image_errors
from .strips import decode, resize, strips
from .videos import _named_errors as _named_video_errors
from .videos import _opened, _upright, _upright_size

SIDE = 256  # of a thumbnail, in pixels
LARGE = 1024  # of a picture in an editor
QUALITY = 75
_HEADER = 1 << 20  # bytes, within which a file states its colours


def image_thumbnail(path: Path, name: str | None = None, side: int = SIDE) -> bytes:
    """Make the thumbnail of an image as training sees it: upright, sRGB, transparent parts white; as WebP.

    It waits for room, see `PixelGate`.

    name: name in messages; the file name by default.
    side: pixels of its longer side at most.
    Raises ValueError if the file is not an image, or is too large.
    """
    check_pillow()
    name = name or path.name
    with _named_image_errors(name, path):
        size = path.stat().st_size
    if size > THUMBNAIL_IMAGE.bytes:  # some formats are read whole when they are opened
        raise ValueError(_too_large("picture", name, f"{size / 1e6:.0f} MB"))
    with _named_image_errors(name, path):
        image = open_image(path, path)
    with image:
        if image.width * image.height > THUMBNAIL_IMAGE.pixels:
            raise ValueError(_too_large("picture", name, f"{image.width} x {image.height} pixels"))
        with _named_image_errors(name, path), page_pixels.decoding(image.width * image.height):
            with path.open("rb") as file:
                colours = colours_of(file.read(_HEADER))
            return _encoded(_scaled(image, colours, side))


def _scaled(image: Image.Image, colours: Colours | None, side: int) -> np.ndarray:
    """Decode an opened image and scale it: (H, W) or (H, W, 3), 0 to 1."""
    wide, factor = _is_wide(image), 1
    while 6 * factor * side <= max(image.size):  # no less than three times the size is left
        factor *= 2
    upright = decode(image, factor)
    height, width = _fitting(upright.height, upright.width, side)
    whole = (0, 0, upright.width, upright.height)
    planes = resize(upright, _plane_reader(upright, False, wide, colours), whole, height, width)
    return np.stack(planes, axis=-1) if len(planes) > 1 else planes[0]


def upright_image(path: Path, name: str, pixels: int) -> Image.Image:
    """Decode an image to its end: upright RGB of 8 bits, transparent parts white, its colours as they are stored.

    pixels: a larger one is reduced to about so many, and none is enlarged.
    Raises ValueError, naming the file, if it can't be decoded.
    """
    with _named_image_errors(name, path), open_image(path, path) as opened:
        wide, factor = _is_wide(opened), 1
        while opened.width * opened.height > 8 * pixels * factor * factor:
            factor *= 2
        image = decode(opened, factor)
        if image.mode[0] in "IF":
            grey = np.concatenate([_plane_reader(image, False, wide, None)(strip)[0] for _, strip in strips(image)])
            image = Image.fromarray((grey.clip(0, 1) * 255 + 0.5).astype(np.uint8))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        if image.width * image.height <= 1.1 * pixels:
            return image
        scale = (pixels / image.width / image.height) ** 0.5
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3)


def video_thumbnail(path: Path, name: str | None = None, side: int = SIDE) -> bytes:
    """Make the thumbnail of a video's first frame, as `image_thumbnail` does, with the same errors."""
    name = name or path.name
    with _named_video_errors(name), _opened(path) as (container, stream):
        across, down = stream.codec_context.width, stream.codec_context.height
        if across * down <= THUMBNAIL_FRAME.pixels:
            # The header may be wrong, so the decoder is bounded too.
            stream.codec_context.options = {"max_pixels": str(THUMBNAIL_FRAME.pixels)}
            stream.thread_type = "NONE"  # others would decode further frames
            with page_pixels.decoding(max(0, across) * max(0, down) or THUMBNAIL_FRAME.pixels):
                frame = _first_frame(container, stream)
                if is_interlaced(stream, frame):
                    # Twice: bwdif leaves a lone frame as it is.
                    frame = next(deinterlaced(iter([frame, frame]), stream))
                height, width = _fitting(*_upright_size(frame, stream.sample_aspect_ratio), side)
                pixels = Image.fromarray(np.ascontiguousarray(_upright(frame).clip(0, 255).astype(np.uint8)))
                scaled = pixels.resize((width, height), Image.Resampling.LANCZOS, reducing_gap=3)
            return _encoded(np.asarray(scaled, dtype=np.float32) / 255)
    raise ValueError(_too_large("clip", name, f"{across} x {down} pixels"))


def _first_frame(container: Any, stream: Any) -> Any:
    """Decode the first frame; raises ValueError if the beginning of the file holds none."""
    decoder = alpha_decoder(stream) or stream.codec_context
    for packet, _ in zip(container.demux(), range(THUMBNAIL_FRAME.items), strict=False):
        for frame in decoder.decode(packet) if packet.stream.index == stream.index else ():
            return frame
    raise ValueError("there is no frame at its beginning")


def _fitting(height: int, width: int, side: int = SIDE) -> tuple[int, int]:
    """Return the (height, width) of a thumbnail."""
    scale = min(1.0, side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def _encoded(pixels: np.ndarray) -> bytes:
    """Encode pixels from 0 to 1 as WebP."""
    data = BytesIO()
    Image.fromarray((pixels.clip(0, 1) * 255 + 0.5).astype(np.uint8)).save(data, "WEBP", quality=QUALITY)
    return data.getvalue()


def _too_large(noun: str, name: str, size: str) -> str:
    return f"The {noun} {name!r} ({size}) is too large to be shown here; it can be trained on."
