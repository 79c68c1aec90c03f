"""Crops of the files that Prepare Dataset has prepared since the server started, for Training Images to draw."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ...data.folders.files import file_state
from ...data.media.frames import Box, Crop, ImagePixels, VideoPixels

MOST_FILES = 50_000
MOST_FRAMES = 8  # of one file

_lock = threading.Lock()  # nodes run in one thread, routes in others
_frames: OrderedDict[str, tuple[str, tuple[Box, ...]]] = OrderedDict()


def remember_crops(crops: Sequence[Crop]) -> None:
    """Remember the crops of a plan, in place of older ones of the same files."""
    found: dict[Path, dict[Box, None]] = {}
    for crop in crops:
        if isinstance(crop.pixels, ImagePixels | VideoPixels):
            height, width = crop.pixels.size
            left, top, right, bottom = crop.box
            box = (left / width, top / height, right / width, bottom / height)
            found.setdefault(crop.pixels.path, {})[box] = None
    with _lock:
        for path, boxes in found.items():
            key = os.path.realpath(path)
            _frames.pop(key, None)
            _frames[key] = (file_state(path), tuple(boxes)[:MOST_FRAMES])
        while len(_frames) > MOST_FILES:
            _frames.popitem(last=False)


def crops_of(path: Path) -> tuple[Box, ...]:
    """Return the crops of a file in the newest plan that held it: (left, top, right, bottom) as parts of its sides.

    None of a file that was written to since.
    """
    with _lock:
        state, boxes = _frames.get(os.path.realpath(path), ("", ()))
    return boxes if boxes and state == file_state(path) else ()
