"""Masks that are drawn on a page: where they are saved, and the pictures that the page shows."""

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from ...common.files import write_atomically
from ...common.untrusted.budgets import MASK_FILE, check_size
from ...common.untrusted.in_flight import page_pixels
from ..layouts.companions import MASK_EXTENSION
from ..layouts.pairing import optional_masks
from ..layouts.subsets import Example
from ..media.images import inspect_image, load_mask

MASKS = "masks"  # folder beside a picture, see `sort_companions`
SHOWN = 1024  # pixels of the longer side of a picture that is drawn on
_MOST_PIXELS = 25_000_000  # of a saved mask; that of a larger picture has its shape only


def mask_place(example: Example, mask_folder: Path | None) -> Path:
    """Return the file of a picture's mask, existing or not: its present one, or `masks/a.png` beside `a.jpg`.

    mask_folder: folder of masks that the user chose, in which `sub/a.jpg` has `sub/a.png`.
    Raises ValueError for a mask in another format than PNG.
    """
    if mask_folder is not None:
        (present,) = optional_masks([example.name], mask_folder)
        place = present or mask_folder / Path(example.name).with_suffix(".png")
    else:
        place = example.mask or example.path.parent / MASKS / f"{example.path.stem}.png"
    if place.suffix.lower() not in (".png", MASK_EXTENSION):
        raise ValueError(f"The mask {place.name!r} isn't a PNG, so it can't be drawn on; save it as PNG.")
    return place


def shown_mask(place: Path) -> bytes:
    """Encode an existing mask as a grey PNG, its longer side SHOWN pixels at most.

    Raises ValueError if it is broken, or past its budget.
    """
    height, width = inspect_image(place).size
    check_size(MASK_FILE, f"The mask {place.name!r}", pixels=height * width)
    with page_pixels.decoding(height * width):
        levels = load_mask(place, alpha=False)
    image = Image.fromarray((levels * 255 + 0.5).astype(np.uint8))
    image.thumbnail((SHOWN, SHOWN), Image.Resampling.BOX)
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def save_mask(place: Path, drawn: bytes, size: tuple[int, int]) -> None:
    """Save a drawn mask, a PNG whose brightness counts, in the shape of its picture.

    size: (height, width) of the picture.
    Raises ValueError for anything but a PNG within its budget, OSError if it can't be saved.
    """
    check_size(MASK_FILE, "The mask", bytes=len(drawn))
    try:
        with Image.open(BytesIO(drawn), formats=["PNG"]) as image:
            check_size(MASK_FILE, "The mask", pixels=image.width * image.height)
            with page_pixels.decoding(image.width * image.height):
                grey = image.convert("L")
    except (OSError, SyntaxError) as error:
        raise ValueError("The mask is not a PNG; draw it again.") from error
    height, width = size
    scale = min(1.0, (_MOST_PIXELS / (height * width)) ** 0.5)
    shape = (max(1, round(width * scale)), max(1, round(height * scale)))
    whole = grey if grey.size == shape else grey.resize(shape, Image.Resampling.BILINEAR)
    write_atomically(place, lambda file: whole.save(file, "PNG"))
