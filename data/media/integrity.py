"""Integrity check of image files before an encoder is loaded."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Lock

from ...common.progress import Interrupted, Progress
from ...common.text import shortlist
from .frames import ImagePixels
from .images import load_image, open_image
from .strips import is_large

THREADS = 8
_TURN = Lock()  # of large images, each of which takes memory for all its pixels


def check_images(pictures: Sequence[ImagePixels], progress: Progress, interrupted: Interrupted) -> None:
    """Check that all images decode to their end.

    Files are checked on several threads, as Pillow releases the GIL while it decodes. A file that fails there is
    decoded again as training reads it, and that result decides; so are images of 32-bit numbers, whose white level may
    be unknown.
    Raises ValueError that names up to five truncated or damaged images.
    """
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    failed: list[tuple[str, ValueError]] = []
    try:
        sound = pool.map(is_intact, [picture.path for picture in pictures])
        for completed, (picture, whole) in enumerate(zip(pictures, sound, strict=True)):
            interrupted()
            progress(completed, len(pictures), f"Checking pictures: {completed} of {len(pictures)}")
            if whole and not picture.wide:
                continue
            try:
                load_image(picture.path, (0, 0, 1, 1), 1, 1, digest=picture.digest, name=picture.name)
            except ValueError as error:
                failed.append((picture.name, error))
    finally:
        pool.shutdown(cancel_futures=True)
    if len(failed) == 1:
        raise failed[0][1]
    if failed:
        raise ValueError(
            f"{len(failed)} pictures can't be read, because they are damaged or incomplete: "
            f"{shortlist([name for name, _ in failed])}; save them again as PNG or JPEG, or take them out of their "
            "folder."
        ) from failed[0][1]


def is_intact(path: Path) -> bool:
    """Return True if an image file is intact, by the cheapest complete reading.

    That is the checksums of a PNG, a JPEG decoded at an eighth of its size, and a full decode of other formats; large
    images take turns, as each holds its pixels.
    """
    try:
        with open_image(path, path) as image, _TURN if is_large(image.size) else nullcontext():
            if image.format == "PNG":
                image.verify()
            else:
                image.draft(image.mode, (image.width // 8, image.height // 8))
                image.load()
    except Exception:  # Pillow's decoders raise many kinds of errors; the second reading reports which one it is
        return False
    return True
