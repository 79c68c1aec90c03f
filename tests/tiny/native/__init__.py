"""Tiny models of ComfyUI's classes, which the native path trains: the table ROWS, a MODEL and samples of each row."""

from . import more_pictures, pictures, unets, videos, wan
from .row import NativeRow, build, core_forward, data_of, drawn, sample_of

NAMED = (*pictures.NAMED, *unets.NAMED, *videos.NAMED)
FURTHER = (*more_pictures.FURTHER, *unets.FURTHER, *videos.FURTHER, *wan.FURTHER)
ROWS: tuple[NativeRow, ...] = NAMED + FURTHER

__all__ = ["FURTHER", "NAMED", "ROWS", "NativeRow", "build", "core_forward", "data_of", "drawn", "sample_of"]
