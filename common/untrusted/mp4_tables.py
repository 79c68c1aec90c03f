"""Count of the samples that an MP4 or MOV file claims to have.

FFmpeg makes an index of them when it opens a file. A table that gives all samples one size takes a few bytes for any
number, so that a file of a kilobyte would fill the memory.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .regular_files import open_regular

MOST_BOXES = 1_000_000  # a fragmented film has some for each second
_DEEPEST = 20
# Boxes that hold others, for FFmpeg at any place; of `meta` the first four bytes are no box.
_OUTER = frozenset(
    b"moov trak mdia minf stbl moof traf mvex edts dinf udta tref wave gmhd ilst iprp ipco sinf schi tapt".split()
)


@dataclass
class _Track:
    """Table of the samples of a track.

    samples: number of samples.
    sound: the track is sound.
    even: all samples last one unit of time; FFmpeg makes no index of such sound.
    """

    samples: int = 0
    sound: bool = False
    even: bool = False

    @property
    def indexed(self) -> int:
        return 0 if self.sound and self.even else self.samples

    def read_sizes(self, data: bytes) -> None:
        self.samples = max(self.samples, _number(data, 8))

    def read_handler(self, data: bytes) -> None:
        self.sound = self.sound or data[8:12] == b"soun"

    def read_durations(self, data: bytes) -> None:
        self.even = _number(data, 4) == 1 and _number(data, 12) == 1


def claimed_samples(path: Path) -> int:
    """Count the samples that FFmpeg would index; 0 for a file of another format.

    Raises ValueError for a compressed or endless header, OSError if there is no regular file.
    """
    tracks = [_Track()]
    fragments = 0
    with open_regular(path) as file:
        for kind, start in _boxes(file, os.fstat(file.fileno()).st_size):
            if kind == b"trak":
                tracks.append(_Track())
            elif kind == b"cmov":
                raise ValueError("its header is compressed")
            elif kind == b"trun":
                fragments += _number(_head(file, start), 4)
            elif kind in _READERS:
                _READERS[kind](tracks[-1], _head(file, start))
    return sum(track.indexed for track in tracks) + fragments


_READERS = {
    b"stsz": _Track.read_sizes,
    b"stz2": _Track.read_sizes,
    b"hdlr": _Track.read_handler,
    b"stts": _Track.read_durations,
}


def _head(file: BinaryIO, start: int) -> bytes:
    """Read the first fields of a box, which all that is counted fits in."""
    file.seek(start)
    return file.read(20)


def _boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int]]:
    """Yield the kind of each box, and the place of its content."""
    open_ends = [size]
    place = 0
    for _ in range(MOST_BOXES):
        while open_ends and place + 8 > open_ends[-1]:
            place = open_ends.pop()
        if not open_ends:
            return
        file.seek(place)
        head = file.read(16)
        length, kind = _number(head, 0), head[4:8]
        start = place + 8
        if length == 1:
            length, start = int.from_bytes(head[8:16], "big"), place + 16
        end = open_ends[-1] if length == 0 else place + length
        if end < start:
            return
        end = min(end, open_ends[-1])
        yield kind, start
        if kind in _OUTER or kind == b"meta":
            if len(open_ends) > _DEEPEST:
                raise ValueError("its header has too many boxes inside one another")
            open_ends.append(end)
            place = start + 4 * (kind == b"meta")
        else:
            place = end
    raise ValueError("its header has too many boxes")


def _number(data: bytes, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "big")
