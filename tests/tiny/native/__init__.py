"""Tiny models of ComfyUI's classes, which the native path trains: the table ROWS, a MODEL and samples of each row."""

from .row import NativeRow, build, core_forward, data_of, sample_of, source_of
from .rows import more_pictures, pictures, unets, videos, wan

NAMED = (*pictures.NAMED, *unets.NAMED, *videos.NAMED)
FURTHER = (*more_pictures.FURTHER, *unets.FURTHER, *videos.FURTHER, *wan.FURTHER)
ROWS: tuple[NativeRow, ...] = NAMED + FURTHER
TRAINED = tuple(row for row in ROWS if "training" not in row.left_out)

__all__ = [
    "FURTHER",
    "NAMED",
    "ROWS",
    "TRAINED",
    "NativeRow",
    "build",
    "core_forward",
    "data_of",
    "source_of",
    "sample_of",
]
