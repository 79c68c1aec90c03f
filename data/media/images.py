"""Image files to pixels: sRGB colours, upright, cropped and scaled in one pass."""

import re
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image, ImageCms, UnidentifiedImageError, features
from torch import Tensor

from ...common.untrusted.budgets import PICTURE, OverBudget
from ...common.untrusted.in_flight import page_pixels
from ...common.untrusted.regular_files import file_state, read_regular
from .colours import Colours, colours_of
from .remarks import BROKEN_PROFILE, HDR_PICTURE, SEVERAL_PICTURES, UNKNOWN_COLOURS
from .strips import decode, mask_factor, resize, scaling_factor, strips

# HEIC, with the package pillow-heif.
HEIF_EXTENSIONS = frozenset({".heic", ".heif", ".hif"})
_HAS_HEIF = find_spec("pillow_heif") is not None
# Extensions of each format that is read, by Pillow's name of it. No other decoder is tried, whatever a file is called:
# that of EPS starts Ghostscript.
FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png", ".apng"),
    "WEBP": (".webp",),
    "AVIF": (".avif",),
    "BMP": (".bmp",),
    "TIFF": (".tiff", ".tif"),
    "JPEG2000": (".jp2", ".j2k", ".jpf", ".jpx"),
    "TGA": (".tga",),
    **({"HEIF": tuple(sorted(HEIF_EXTENSIONS))} if _HAS_HEIF else {}),
}
# Formats without a mark in their first bytes, so that anything might be one: read by extension only.
_UNMARKED = frozenset({"TGA"})
EXTENSIONS = frozenset(extension for extensions in FORMATS.values() for extension in extensions)
# Extensions of image formats that can't be read; a note lists such files, so that none is missed unnoticed.
UNREAD_EXTENSIONS = (
    frozenset(
        {".jxl", ".gif", ".psd", ".psb", ".exr", ".hdr", ".svg", ".xcf", ".kra", ".ppm", ".pgm", ".pfm", ".ico", ".dds"}
        | {".raw", ".cr2", ".cr3", ".nef", ".dng", ".arw", ".raf", ".orf", ".rw2", ".jpm", ".jxr", ".wdp", ".eps"}
        | HEIF_EXTENSIONS
    )
    - EXTENSIONS
)
LEAST_PILLOW = (10, 4)

_ORIENTATION = 0x0112  # EXIF tag
_PROFILE_SPACE = {"RGB": "RGB", "CMYK": "CMYK", "L": "GRAY"}
# Byte patterns of PNG chunks that may carry an orientation. These chunks may follow the pixels, so a search of the
# bytes saves decoding.
_PNG_ORIENTATION_MARKS = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")

# (least, white, most): white level of floats whose maximum is within. Filters and HDR exceed white somewhat.
_FLOAT_WHITES = ((float("-inf"), 1, 4.0), (32.0, 255, 320.0), (4096.0, 65535, 70000.0))

# Descriptions of profiles that are sRGB itself. Others contain the word but mean another curve (linear sRGB).
_SRGB_PROFILES = frozenset({"sRGB IEC61966-2.1", "sRGB built-in"})


@dataclass(frozen=True)
class ImageFacts:
    """Facts of an image file for planning.

    digest: hash of its bytes.
    size: (height, width) in pixels when upright.
    alpha: it may have transparent parts.
    wide: it holds 32-bit numbers, whose white level is found by their range.
    remarks: what a note should say of the file, see `remarks.py`.
    """

    digest: str
    size: tuple[int, int]
    alpha: bool = False
    wide: bool = False
    remarks: tuple[str, ...] = ()


def check_pillow(version: str = PIL.__version__) -> None:
    """Check that the installed Pillow is recent enough to read images correctly.

    Raises ValueError if it is not.
    """
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < LEAST_PILLOW:
        least = ".".join(map(str, LEAST_PILLOW))
        raise ValueError(
            f"Pillow {version} is installed and {least} or newer is needed to read pictures; run "
            f"`pip install -U pillow` in ComfyUI's Python and restart ComfyUI."
        )


def open_image(source: Path | BytesIO, path: Path) -> Image.Image:
    """Open an image of one of FORMATS, which is detected from its bytes.

    path: its file, whose extension decides for formats without a mark.
    Raises UnidentifiedImageError for anything else.
    """
    Image.init()  # so that a format that this Pillow lacks is known to be missing
    if _HAS_HEIF and "HEIF" not in Image.OPEN:
        import_module("pillow_heif").register_heif_opener()
    by_name = {name for name in _UNMARKED if path.suffix.lower() in FORMATS[name]}
    return Image.open(
        source, formats=[name for name in FORMATS if name in Image.OPEN and name not in _UNMARKED - by_name]
    )


def inspect_image(path: Path, name: str | None = None) -> ImageFacts:
    """Read an image file's bytes and header, not its pixels.

    Unchanged files (`file_state`) are read once per process.

    name: name in messages; the file name by default.
    Raises ValueError if the file is not an image.
    """
    check_pillow()
    name = name or path.name
    with _named_errors(name, path):
        state = file_state(path)
    return _inspect(path, name, state)


@lru_cache(maxsize=65536)
def _inspect(path: Path, name: str, state: tuple[int, ...]) -> ImageFacts:
    with _named_errors(name, path):
        data = read_regular(path, PICTURE)
        with open_image(BytesIO(data), path) as image:
            remarks = tuple(_remarks(image, data))
            width, height = _upright_size(image, data)
            alpha = image.has_transparency_data
            wide = _is_wide(image)
    return ImageFacts(_digest(data), (height, width), alpha, wide, remarks)


def _remarks(image: Image.Image, data: bytes) -> Iterator[str]:
    """Yield the remarks on an opened image, which is not decoded."""
    # The further pictures of a JPEG are previews and gain maps.
    if image.format not in ("JPEG", "MPO") and getattr(image, "n_frames", 1) > 1:
        yield SEVERAL_PICTURES
    colours = colours_of(data)
    profile = image.info.get("icc_profile")
    if profile and not (colours and colours.changes_pixels) and not _fits(image, profile):
        yield BROKEN_PROFILE
    elif colours and colours.hdr and not profile:
        yield HDR_PICTURE
    elif colours and not colours.known and not profile:
        yield UNKNOWN_COLOURS


def _fits(image: Image.Image, profile: bytes) -> bool:
    """Return whether an embedded profile is read, and is for the image's kind of colours."""
    if image.mode[0] in "IF":  # numbers, whose profile is not used
        return True
    modes = {image.mode, "RGB"} & _PROFILE_SPACE.keys()
    try:
        space = ImageCms.ImageCmsProfile(BytesIO(profile)).profile.xcolor_space.strip()
        if space not in {_PROFILE_SPACE[mode] for mode in modes}:
            return False
        _srgb_transform(next(mode for mode in modes if _PROFILE_SPACE[mode] == space), profile)
    except (ImageCms.PyCMSError, OSError):
        return False
    return True


def _digest(data: bytes) -> str:
    """Hash the bytes. Latents that were cached before colours were converted belong to other pixels."""
    colours = colours_of(data)
    return blake2b(data, digest_size=20, person=b"colours" if colours and colours.changes_pixels else b"").hexdigest()


def _upright_size(image: Image.Image, data: bytes) -> tuple[int, int]:
    """Return (width, height) after `exif_transpose`, without decoding if the header suffices."""
    if image.format == "TIFF":  # Pillow rotates these itself, when it decodes or before, depending on its version
        with page_pixels.decoding(image.width * image.height):
            return decode(image, 1).size
    may_turn = image.format != "PNG" or any(mark in data for mark in _PNG_ORIENTATION_MARKS)
    sides_swapped = may_turn and image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    return (image.height, image.width) if sides_swapped else image.size


def load_image(
    path: Path,
    box: tuple[float, float, float, float],
    height: int,
    width: int,
    *,
    digest: str | None = None,
    name: str | None = None,
    opaque: bool = False,
) -> Tensor:
    """Decode an image, crop it to `box` and scale it: (1, height, width, 3), float32, sRGB, 0 to 1.

    box: (left, top, right, bottom) in pixels of the upright image, fractions allowed.
    digest: hash by `inspect_image`; a file with another one is refused.
    name: name in messages; the file name by default.
    opaque: ignore alpha and show the colours under transparent parts.

    The filter is Lanczos over the whole support of each output pixel (antialiased), in float. EXIF orientation is
    applied, an embedded colour profile or the colours that PNG and AVIF state are converted to sRGB, transparent parts
    become white, grey images become three equal channels, an animation gives its first frame. 16-bit grey retains its
    16 bits; of 16-bit colour Pillow reads the upper 8. Floats and 32-bit integers are scaled by their range. An image
    of more than LARGE pixels is reduced first, to no less than three times the requested size.
    Raises ValueError, naming the file, if the image can't be decoded or was changed.
    """
    name = name or path.name
    data = _read(path, name, digest)
    with _named_errors(name, path), open_image(BytesIO(data), path) as opened:
        wide, factor = _is_wide(opened), scaling_factor(opened.size, box, height, width)
        image = decode(opened, factor)
        left, top, right, bottom = box
        within = (left / factor, top / factor, right / factor, bottom / factor)
        scaled = resize(image, _plane_reader(image, opaque, wide, colours_of(data)), within, height, width)
    pixels = np.stack(scaled if len(scaled) == 3 else scaled * 3, axis=-1).clip(0.0, 1.0)
    return torch.from_numpy(pixels)[None]


def load_mask(path: Path, *, alpha: bool, digest: str | None = None, name: str | None = None) -> np.ndarray:
    """Decode a mask, upright: (H, W), float32, 0 to 1; a large one reduced by `mask_factor` of its size, rounded up.

    alpha: take the alpha channel; otherwise the brightness, with transparent parts black.
    digest, name: see `load_image`, with the same errors.
    """
    name = name or path.name
    data = _read(path, name, digest)
    with _named_errors(name, path), open_image(BytesIO(data), path) as opened:
        wide = _is_wide(opened)
        image = decode(opened, mask_factor(opened.size))
        white = _white_level(image, wide) if image.mode[0] in "IF" and not alpha else None
        transparent = image.has_transparency_data
        return np.concatenate([_mask_strip(strip, alpha, transparent, white) for _, strip in strips(image)])


def _mask_strip(image: Image.Image, alpha: bool, transparent: bool, white: float | None) -> np.ndarray:
    """Compute the mask of a strip: (rows, W), 0 to 1."""
    if white is not None:
        return _numbers(image, white).clip(0.0, 1.0)
    opacity = np.asarray(image.convert("RGBA").getchannel("A"), dtype=np.float32) if alpha or transparent else None
    if alpha and opacity is not None:
        return opacity / 255
    bright = np.asarray(image.convert("RGB").convert("L"), dtype=np.float32) / 255
    return bright if opacity is None else bright * opacity / 255


def _read(path: Path, name: str, digest: str | None) -> bytes:
    """Read the bytes of an image; raises ValueError if they no longer match the digest."""
    with _named_errors(name, path):
        data = read_regular(path, PICTURE)
    if digest is not None and _digest(data) != digest:
        _inspect.cache_clear()  # it may hold the old bytes under the size and time of the new ones
        raise ValueError(f"The picture {name!r} was changed while the data set was prepared; queue again.")
    return data


def _is_wide(image: Image.Image) -> bool:
    """Return True if an opened image holds floats or 32-bit integers; older Pillow opens 16-bit PNG as "I" too."""
    return image.mode == "F" or (image.mode == "I" and image.format != "PNG")


def _white_level(image: Image.Image, wide: bool) -> float:
    """Find the number that is white: 65535 for 16-bit grey.

    `wide` numbers have no white level of their own. For integers it is 255 if their maximum is at most 255, else 65535;
    for floats it is 1, 255 or 65535, by the range of their maximum in _FLOAT_WHITES.
    Raises ValueError if none of them fits, and for integers below 0 or above white.
    """
    if not wide:
        return 65535
    ends: list[float] = []
    for _, strip in strips(image):
        numbers = np.asarray(strip).astype(np.float32)
        finite = numbers[np.isfinite(numbers)]
        ends += [float(finite.min()), float(finite.max())] if finite.size else []
    lowest, highest = (min(ends), max(ends)) if ends else (0.0, 0.0)
    if image.mode == "F":
        white = next((white for low, white, high in _FLOAT_WHITES if low <= highest <= high), None)
    else:
        white = 255 if highest <= 255 else 65535
    if white is None or (image.mode == "I" and (lowest < 0 or highest > white)):
        raise ValueError(f"its values go from {lowest:g} to {highest:g}, so it is unclear what is white")
    return white


def _numbers(image: Image.Image, white: float) -> np.ndarray:
    """Scale the one channel of a strip of numbers to white at 1; floats may exceed 1 somewhat."""
    numbers = np.asarray(image).astype(np.float32) / np.float32(white)
    return np.nan_to_num(numbers, nan=0.0, posinf=1.0, neginf=0.0)


def _plane_reader(
    image: Image.Image, opaque: bool, wide: bool, colours: Colours | None
) -> Callable[[Image.Image], list[np.ndarray]]:
    """Make the function that computes the one (grey) or three (RGB) channels of a strip, (rows, W), 0 to 1."""
    convert = colours.to_srgb if colours and colours.changes_pixels else None
    if image.mode[0] in "IF":
        white = _white_level(image, wide)
        return lambda strip: convert([_numbers(strip, white)]) if convert else [_numbers(strip, white)]
    transparent = image.has_transparency_data
    mode = "RGB" if transparent or image.mode not in _PROFILE_SPACE else image.mode
    transform = None if convert else _transform_if_sound(mode, image.info.get("icc_profile"))

    def planes(strip: Image.Image) -> list[np.ndarray]:
        alpha = None
        if transparent:
            strip = strip.convert("RGBA")
            alpha = None if opaque else np.asarray(strip.getchannel("A")).astype(np.float32) / 255
        strip = strip if strip.mode == mode else strip.convert(mode)
        if transform is not None:
            strip = ImageCms.applyTransform(strip, transform) or strip
        strip = strip if strip.mode in ("RGB", "L") else strip.convert("RGB")
        channels = [np.asarray(band).astype(np.float32) / 255 for band in strip.split()]
        channels = convert(channels) if convert else channels
        return channels if alpha is None else [plane * alpha + (1 - alpha) for plane in channels]

    return planes


def _transform_if_sound(mode: str, profile: bytes | None) -> ImageCms.ImageCmsTransform | None:
    """Build the conversion to sRGB of an embedded profile; None for a damaged one, see BROKEN_PROFILE."""
    try:
        return _srgb_transform(mode, profile) if profile else None
    except (ImageCms.PyCMSError, OSError):
        return None


def _srgb_transform(mode: str, profile: bytes) -> ImageCms.ImageCmsTransform | None:
    """Build the conversion to sRGB of a profile, if it fits the colour mode and is not sRGB itself.

    Raises PyCMSError or OSError for a damaged profile.
    """
    source = ImageCms.ImageCmsProfile(BytesIO(profile))
    fits = source.profile.xcolor_space.strip() == _PROFILE_SPACE[mode]
    if not fits or ImageCms.getProfileDescription(source).strip() in _SRGB_PROFILES:
        return None
    return ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )


@contextmanager
def _named_errors(name: str, path: Path) -> Iterator[None]:
    """Turn errors of reading and decoding into a ValueError that names the image and a remedy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except OverBudget as error:
        raise ValueError(f"The picture {name!r} can't be read: {error}") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"The picture {name!r} is too large to open ({error}); scale it down.") from error
    except (OSError, SyntaxError, ValueError, EOFError, KeyError, TypeError, RuntimeError, struct.error) as error:
        if isinstance(error, FileNotFoundError):
            cause = "it's a link to a missing file" if path.is_symlink() else "it is gone"
            raise ValueError(
                f"The picture {name!r} can't be read ({cause}); put the file there, or take it out of the folder and "
                f"queue again."
            ) from error
        if isinstance(error, PermissionError):
            raise ValueError(f"The picture {name!r} can't be read; check its access rights.") from error
        if path.suffix.lower() == ".avif" and not features.check("avif"):
            fix = "this Pillow reads no AVIF: update Pillow to 11.3 or later, or save the picture as PNG"
        else:
            fix = "save it again as PNG or JPEG, or take it out of the folder"
        reason = "it's damaged or not a picture" if isinstance(error, UnidentifiedImageError) else error
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror  # without the path of this machine
        raise ValueError(f"The picture {name!r} can't be read ({reason}); {fix}.") from error
