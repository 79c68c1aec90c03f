"""Crops of the files prepared by Prepare Dataset since the server started, for Training Images to draw."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ...data.layouts.files import file_state
from ...data.media.frames import Box, Crop, ImagePixels, VideoPixels

MOST_FILES = 50_000
MOST_FRAMES = 8  # per file

_lock = threading.Lock()  # nodes run in one thread, routes in others
_frames: OrderedDict[str, tuple[str, tuple[Box, ...]]] = OrderedDict()


def remember_crops(crops: Sequence[Crop]) -> None:
    """Store the crops of a plan, replacing older ones of the same files."""
    boxes_by_path: dict[Path, dict[Box, None]] = {}
    for crop in crops:
        if isinstance(crop.pixels, ImagePixels | VideoPixels):
            height, width = crop.pixels.size
            left, top, right, bottom = crop.box
            box = (left / width, top / height, right / width, bottom / height)
            boxes_by_path.setdefault(crop.pixels.path, {})[box] = None
    with _lock:
        for path, boxes in boxes_by_path.items():
            key = os.path.realpath(path)
            _frames.pop(key, None)
            _frames[key] = (file_state(path), tuple(boxes)[:MOST_FRAMES])
        while len(_frames) > MOST_FILES:
            _frames.popitem(last=False)


def crops_of(path: Path) -> tuple[Box, ...]:
    """Return the crops of a file in the newest plan with it: (left, top, right, bottom) as fractions of its sides.

    Empty for a file modified since.
    """
    with _lock:
        state, boxes = _frames.get(os.path.realpath(path), ("", ()))
    return boxes if boxes and state == file_state(path) else ()
