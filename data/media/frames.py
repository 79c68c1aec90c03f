"""Frames of an image or video file, and the crop of them that is trained on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from .images import load_image
from .videos import VideoFacts, load_frames

Box = tuple[float, float, float, float]


class Pixels(Protocol):
    """Frames of a file that can be encoded. size: (height, width) in pixels. key: names the content."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> tuple[int, int]: ...

    @property
    def frames(self) -> int: ...

    @property
    def key(self) -> Any: ...

    def load(self, box: Box, height: int, width: int) -> Tensor:
        """(frames, height, width, 3), float32, 0 to 1."""
        ...

    def first(self) -> "Pixels":
        """The first frame by itself."""
        ...


@dataclass(frozen=True)
class ImagePixels:
    """opaque: transparent parts show the colours that the file holds there, as alpha is a mask. wide: it holds numbers
    that are scaled by their range, which is in the key as older versions scaled them otherwise."""

    path: Path
    name: str
    digest: str
    size: tuple[int, int]
    opaque: bool = False
    wide: bool = False
    frames = 1

    @property
    def key(self) -> Any:
        more = (*["opaque"] * self.opaque, *["by range"] * self.wide)
        return (self.digest, *more) if more else self.digest

    def load(self, box: Box, height: int, width: int) -> Tensor:
        return load_image(self.path, box, height, width, digest=self.digest, name=self.name, opaque=self.opaque)

    def first(self) -> Pixels:
        return self


@dataclass(frozen=True)
class VideoPixels:
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

    def first(self) -> Pixels:
        return replace(self, stamps=self.stamps[:1])


@dataclass(frozen=True)
class Crop:
    """The part of a file's frames that is trained on, at the size of its grid. flip: mirrored left to right."""

    pixels: Pixels
    box: Box
    height: int
    width: int
    flip: bool = False

    @property
    def key(self) -> Any:
        return (self.pixels.key, *self.region)

    @property
    def region(self) -> tuple[Any, ...]:
        """Part of a key: the box, the size and the flip."""
        return (self.box, self.height, self.width, *(("flipped",) if self.flip else ()))

    def load(self) -> Tensor:
        frames = self.pixels.load(self.box, self.height, self.width)
        return frames.flip(2) if self.flip else frames

    def first(self) -> "Crop":
        return replace(self, pixels=self.pixels.first())
