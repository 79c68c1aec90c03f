"""Frames of an image or video file, and the crop of them that is trained on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .images import load_image
from .videos import VideoFacts, load_frames

Box = tuple[float, float, float, float]


class Pixels(Protocol):
    """Frames of a file that can be encoded.

    name: name in messages.
    size: (height, width) in pixels.
    frames: number of frames.
    key: content key of the frames, part of cache keys.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def frames(self) -> int: ...

    @property
    def key(self) -> Any: ...

    def load(self, box: Box, height: int, width: int) -> Tensor:
        """Load the crop `box`, scaled to height x width: (frames, height, width, 3), float32, 0 to 1."""
        ...

    def first(self, count: int = 1) -> "Pixels":
        """Return the first `count` frames alone."""
        ...


@dataclass(frozen=True)
class ImagePixels:
    """Pixels of an image file.

    path: image file.
    name: name in messages.
    digest: hash of its bytes.
    size: (height, width) in pixels when upright.
    opaque: ignore alpha and show the colours under transparent parts, as alpha is a mask.
    wide: it holds 32-bit numbers, which are scaled by their range.
    """

    path: Path
    name: str
    digest: str
    size: tuple[int, int]
    opaque: bool = False
    wide: bool = False
    frames = 1

    @property
    def key(self) -> Any:
        return (self.digest, "opaque") if self.opaque else self.digest

    def load(self, box: Box, height: int, width: int) -> Tensor:
        return load_image(self.path, box, height, width, digest=self.digest, name=self.name, opaque=self.opaque)

    def first(self, count: int = 1) -> Pixels:
        return self


@dataclass(frozen=True)
class VideoPixels:
    """Frames of a video file.

    path: video file.
    name: name in messages.
    facts: facts of the file.
    stamps: time stamps of the frames, ascending.
    """

    path: Path
    name: str
    facts: VideoFacts
    stamps: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        return self.facts.size

    @property
    def frames(self) -> int:
        return len(self.stamps)

    @property
    def key(self) -> Any:
        return (self.facts.digest, self.stamps)

    def load(self, box: Box, height: int, width: int) -> Tensor:
        return load_frames(self.path, self.facts, self.stamps, box, height, width, name=self.name)

    def first(self, count: int = 1) -> Pixels:
        return replace(self, stamps=self.stamps[:count])


@dataclass(frozen=True)
class Crop:
    """Part of a file's frames that is trained on, scaled to its grid.

    pixels: frames of the file.
    box: (left, top, right, bottom) in pixels of the file.
    height: height after scaling, in pixels.
    width: width after scaling, in pixels.
    flip: mirrored left to right.
    """

    pixels: Pixels
    box: Box
    height: int
    width: int
    flip: bool = False

    @property
    def key(self) -> Any:
        """Content key of the crop."""
        return (self.pixels.key, *self.region)

    @property
    def region(self) -> tuple[Any, ...]:
        """Part of a cache key: the box, the size and the flip."""
        return (self.box, self.height, self.width, *(("flipped",) if self.flip else ()))

    def load(self) -> Tensor:
        """Load the crop: (frames, height, width, 3), float32, 0 to 1."""
        frames = self.pixels.load(self.box, self.height, self.width)
        return frames.flip(2) if self.flip else frames

    def first(self) -> "Crop":
        """Return the crop of the first frame alone."""
        return replace(self, pixels=self.pixels.first())
