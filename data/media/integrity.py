"""Check that images can be decoded to their end, before an encoder is loaded."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from ...common.progress import Interrupted, Progress
from ...common.text import shortlist
from .frames import ImagePixels
from .images import load_image

THREADS = 8


def check_images(pictures: Sequence[ImagePixels], progress: Progress, interrupted: Interrupted) -> None:
    """ValueError that names the pictures which break off or are damaged, up to five.

    On several threads, as Pillow lets go of the interpreter while it decodes. What fails there, and numbers whose white
    has to be told by their range, are decoded once more as training reads them, which decides.
    """
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    failed: list[tuple[str, ValueError]] = []
    try:
        sound = pool.map(is_intact, [picture.path for picture in pictures])
        for done, (picture, whole) in enumerate(zip(pictures, sound, strict=True)):
            interrupted()
            progress(done, len(pictures), f"Checking pictures: {done} of {len(pictures)}")
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
            f"{len(failed)} pictures can't be read, as they break off or are damaged: "
            f"{shortlist([name for name, _ in failed])}; save them again as PNG or JPEG, or take them out of their "
            f"folder."
        ) from failed[0][1]


def is_intact(path: Path) -> bool:
    """Tell if an image is intact, by the cheapest reading that goes to its end: the checksums of a PNG, a JPEG at an
    eighth of its size, others decoded."""
    try:
        with Image.open(path) as image:
            if image.format == "PNG":
                image.verify()
            else:
                image.draft(image.mode, (image.width // 8, image.height // 8))
                image.load()
    except Exception:  # Pillow's decoders raise of many kinds; the reading that follows says what it is
        return False
    return True
