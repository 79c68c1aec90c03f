"""Video files to the frames of a clip, decoded one at a time: upright, cropped and scaled as images are.

A frame is identified by its time stamp, which can be read without decoding. Decoding starts at the key frame before
the clip and ends with the clip's last frame, so a long video is never decoded or held in memory completely.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, overload

import av
import numpy as np
import torch
from av.stream import Disposition
from av.video.reformatter import Colorspace, Interpolation
from PIL import Image
from torch import Tensor

from ...common.untrusted.budgets import CLIP, OverBudget, check_size
from ...common.untrusted.mp4_tables import claimed_samples
from ...common.untrusted.regular_files import file_state
from .decoding import (
    alpha_decoder,
    decoded_frames,
    has_alpha_layer,
    has_unordered_stamps,
    is_interlaced,
    is_interlaced_by_file,
)
from .remarks import ALPHA_LOST, CUT_OFF, HDR_FILM, INTERLACED

# A frame counts as shown from this many seconds before its stamp on: containers round stamps to milliseconds.
_SLACK = 0.0006
# A clip may last so many seconds, or so many for each of its frames, before its stamps are taken as wrong.
_LONGEST, _LONGEST_STAY = 600.0, 60.0
_MISSING = 1.0  # seconds before the end that the header promises from which on a file counts as cut off
SAME_SHAPE = 0.01  # the greatest difference of two log aspects (width / height): resizing rounds the sides
# FFmpeg detects a format by content, not by file name, and knows playlists that name other files to read.
_CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,gif,apng,avi,mpegts,mpeg,mxf,asf,flv"
# Codecs with packets that show no frame of their own; their frames are known only after decoding.
_HIDDEN_FRAMES = frozenset({"vp8"})
_STILLS = frozenset({"mjpeg", "png", "bmp"})  # codecs of covers
# Video without a colour matrix is BT.709 from this height on, and BT.601, the decoder's default, below.
_HD_LINES = 720
_UNSPECIFIED = 2
_HDR_CURVES = frozenset({16, 18})  # ITU-T H.273, transfer characteristics: PQ (SMPTE ST 2084) and HLG (BT.2100)
# Without these flags, which PyAV 16 lacks, colours come out up to three steps of 255 too dark.
_EXACT = ("BILINEAR", "ACCURATE_RND", "FULL_CHR_H_INT")
_CONVERSION = (
    Interpolation["BILINEAR"] | Interpolation["ACCURATE_RND"] | Interpolation["FULL_CHR_H_INT"]
    if all(name in Interpolation.__members__ for name in _EXACT)
    else Interpolation["BILINEAR"]
)


@dataclass(frozen=True)
class VideoFacts:
    """Facts of a video file for planning.

    digest: hash of its bytes, and of mirroring and track if those are unusual.
    size: (height, width) in pixels when upright and with square pixels.
    shape: (height, width) of the first frame in its own pixels, upright.
    stamps: time stamp of each frame, ascending, in units of `time_base`.
    end: time at which the last frame ends, in the same units.
    time_base: seconds of one unit.
    interlaced: its frames consist of two fields, and are deinterlaced.
    remarks: what a note should say of the file, see `remarks.py`.
    """

    digest: str
    size: tuple[int, int]
    shape: tuple[int, int]
    stamps: tuple[int, ...]
    end: int
    time_base: Fraction
    interlaced: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def fps(self) -> float:
        """Mean frames per second."""
        return len(self.stamps) / float((self.end - self.stamps[0]) * self.time_base)

    def frames_at(self, fps: float, name: str) -> Sequence[int]:
        """List the stamps of the frames shown at `fps` frames per second, from the first one on; 0 takes all.

        At a higher rate than the file's own, frames are repeated.

        name: name in messages.
        Raises ValueError if frames stay so long that their stamps must be wrong.
        """
        if fps == 0:
            return self.stamps
        length = float((self.end - self.stamps[0]) * self.time_base)
        if length > max(_LONGEST, _LONGEST_STAY * len(self.stamps)):
            raise ValueError(
                f"The clip {name!r} can't be taken at {fps:g} frames per second, as its {len(self.stamps)} frames are "
                f"spread over {length:.0f} s; save it again as MP4 (H.264), set fps to 0, or take it out of the folder."
            )
        return _FramesAt(self, fps, max(1, int(length * fps + fps * _SLACK)))


class _FramesAt(Sequence[int]):
    """Stamps of the frames shown at a constant rate, looked up on access, as a still may last for minutes."""

    def __init__(self, facts: VideoFacts, fps: float, count: int) -> None:
        self._stamps = facts.stamps
        self._fps = fps
        self._count = count
        self._seconds = [float((stamp - facts.stamps[0]) * facts.time_base) for stamp in facts.stamps]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[position] for position in range(self._count)[index]]
        place = range(self._count)[index]
        return self._stamps[bisect_right(self._seconds, place / self._fps + _SLACK) - 1]


def inspect_video(path: Path, name: str | None = None) -> VideoFacts:
    """Read a video file's bytes and decode its first frame.

    Unchanged files (`file_state`) are read once per process.

    name: name in messages; the file name by default.
    Raises ValueError if the file is not a video.
    """
    with _named_errors(name or path.name):
        return _inspect(path, file_state(path))


# Clips of one file have different names and ask for the same facts, so the name is not part of the cache key. The
# cache is small, as an hour of video has 86000 stamps.
@lru_cache(maxsize=1024)
def _inspect(path: Path, state: tuple[int, ...]) -> VideoFacts:
    remarks: list[str] = []
    with _opened(path) as (container, stream):
        stamps, end, missing = _timeline(container, stream)
        if missing > _MISSING:
            remarks.append(CUT_OFF)
    with _opened(path) as (container, stream):
        first = next(decoded_frames(container, stream))
        (_, is_mirrored), track = _orientation(first), container.streams.video.index(stream)
        interlaced = is_interlaced(stream, first)
        alpha = alpha_decoder(stream) is not None
        # Latents that were cached before these were read belong to other pixels.
        ways = [f"mirrored {is_mirrored}, track {track}"] * bool(is_mirrored or track)
        ways += ["deinterlaced"] * interlaced + ["alpha"] * alpha
        ways += ["fields by the file"] * is_interlaced_by_file(stream, first)
        digest = _digest(path, "".join(ways))
        upright, shape = _upright_size(first, stream.sample_aspect_ratio), _upright_size(first, None)
        if stream.codec_context.color_trc in _HDR_CURVES:
            remarks.append(HDR_FILM)
        if interlaced:
            remarks.append(INTERLACED)
        if has_alpha_layer(stream) and not alpha:
            remarks.append(ALPHA_LOST)
    assert stream.time_base is not None
    return VideoFacts(digest, upright, shape, tuple(stamps), end, stream.time_base, interlaced, tuple(remarks))


def _digest(path: Path, variant: str) -> str:
    """Hash a file's bytes. variant: says how they are read, if otherwise than usual."""
    digest = blake2b(variant.encode(), digest_size=20)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    check_size(CLIP, "it", items=claimed_samples(path))
    with av.open(str(path), options={"format_whitelist": _CONTAINERS}) as container:
        stream = _film_track(container.streams.video)
        if stream.codec_context is None:
            raise ValueError("the installed PyAV has no decoder for its codec")
        stream.thread_type = "AUTO"
        yield container, stream


def _film_track(tracks: Sequence[Any]) -> Any:
    """Choose the default film track, or the first one; a cover picture is none.

    Matroska files made by remuxing have their cover as an ordinary track, even as the default one. So a track in the
    codec of a still picture comes after all others.
    """
    films = [track for track in tracks if not track.disposition & Disposition.attached_pic]
    if not films:
        raise ValueError("it has a cover picture and no film" if tracks else "it has no video track")

    def rank(track: Any) -> tuple[bool, bool]:
        is_still = track.codec_context is not None and track.codec_context.name in _STILLS
        return is_still, not track.disposition & Disposition.default

    return min(films, key=rank)


def _timeline(container: Any, stream: Any) -> tuple[list[int], int, float]:
    """List the stamps of all frames, ascending, from the packets without decoding.

    Returns them, the end of the last one, and the seconds that the file's header promises after the end of all tracks.
    """
    last_end = 0.0
    if stream.codec_context.name in _HIDDEN_FRAMES or has_unordered_stamps(container, stream):
        entries: Iterator[Any] = decoded_frames(container, stream)
    else:
        entries = (packet for packet in container.demux() if packet.size and not packet.is_discard)
    lengths: dict[int, int] = {}
    for entry in entries:
        if isinstance(entry, av.Packet) and entry.stream.index != stream.index:
            last_end = max(last_end, _end(entry))
            continue
        if entry.pts is None:
            raise ValueError("its frames have no time stamps; save it again as MP4")
        last_end = max(last_end, _end(entry))
        lengths[entry.pts] = max(entry.duration or 0, 0)
        check_size(CLIP, "it", items=len(lengths))
    missing = (container.duration or 0) / av.time_base - last_end  # that of Matroska is the time of the end
    if not lengths:
        raise ValueError("it has no frames")
    stamps = sorted(lengths)
    steps = [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]
    usual = sorted(steps)[len(steps) // 2] if steps else max(1, round(1 / 24 / stream.time_base))
    return stamps, stamps[-1] + (lengths[stamps[-1]] or usual), missing


def _end(entry: Any) -> float:
    """Return the second at which a packet or frame ends, 0 without a stamp."""
    return float((entry.pts + (entry.duration or 0)) * entry.time_base) if entry.pts is not None else 0.0


def load_frames(
    path: Path,
    facts: VideoFacts,
    stamps: Sequence[int],
    box: tuple[float, float, float, float],
    height: int,
    width: int,
    *,
    name: str | None = None,
) -> Tensor:
    """Decode the frames with these stamps, crop each to `box` and scale it: (T, height, width, 3), float32, 0 to 1.

    stamps: ascending; a repeated stamp repeats the frame.
    box: (left, top, right, bottom) in pixels of `facts.size`, fractions allowed.
    name: name in messages; the file name by default.

    The filter is that of images (Lanczos, antialiased); transparent parts become white. At most two decoded frames are
    held at a time.
    Raises ValueError, naming the file, if it can't be decoded or was changed since it was inspected.
    """
    name = name or path.name
    if inspect_video(path, name).digest != facts.digest:
        raise ValueError(f"The clip {name!r} was changed while the data set was prepared; queue again.")
    clip = torch.empty(len(stamps), height, width, 3)
    with _named_errors(name):
        for index, pixels in enumerate(_scaled(_frames_at(path, facts, stamps), facts, box, height, width)):
            clip[index] = torch.from_numpy(pixels)
    return clip


def _scaled(
    frames: Iterator[Any], facts: VideoFacts, box: tuple[float, float, float, float], height: int, width: int
) -> Iterator[np.ndarray]:
    """Yield each frame cropped and scaled: (height, width, 3), 0 to 1."""
    last: int | None = None
    pixels = np.empty(0)
    for frame in frames:
        if frame.pts != last:  # a repeated frame is scaled once
            upright = _upright(frame)
            _check_shape(upright.shape[:2], facts.shape)
            pixels, last = _scale(upright, facts.size, box, height, width), frame.pts
        del frame  # a generator holds its locals while suspended, here a decoded frame
        yield pixels


def _check_shape(shape: tuple[int, ...], first: tuple[int, int]) -> None:
    """Raise ValueError for a frame whose (height, width) is not of the first frame's shape; an equal shape of another
    size is scaled like the first."""
    if abs(math.log(shape[1] / shape[0]) - math.log(first[1] / first[0])) > SAME_SHAPE:
        raise ValueError(
            f"its size changes from {first[1]} x {first[0]} to {shape[1]} x {shape[0]} within the film, so cut it there"
        )


class _StartsLater(Exception):
    """The first decoded frame comes after the requested one."""


def _frames_at(path: Path, facts: VideoFacts, stamps: Sequence[int]) -> Iterator[Any]:
    """Yield the frame shown at each of the ascending stamps: the last one with a stamp up to it."""
    try:
        with _opened(path) as (container, stream):
            if not has_unordered_stamps(container, stream):
                container.seek(stamps[0], stream=stream)
            yield from _pick(decoded_frames(container, stream, facts.interlaced), stamps)
    except _StartsLater:
        # Files without an index, and GIF, seek to a later frame or to nowhere. They are decoded from the start.
        with _opened(path) as (container, stream):
            yield from _pick(decoded_frames(container, stream, facts.interlaced), stamps)


def _pick(frames: Iterator[Any], stamps: Sequence[int]) -> Iterator[Any]:
    """Yield the frame shown at each of the ascending stamps.

    Raises _StartsLater if the first frame is later than the first stamp.
    """
    previous = next(frames, None)
    if previous is None or previous.pts > stamps[0]:
        raise _StartsLater
    place = 0
    for frame in frames:
        while stamps[place] < frame.pts:
            yield previous
            place += 1
            if place == len(stamps):
                return
        previous = frame
    for stamp in stamps[place:]:
        if stamp > previous.pts:
            raise ValueError("it ends before its last frame")
        yield previous


def _upright(frame: Any) -> np.ndarray:
    """Convert a frame to RGB, turned and mirrored as the file says: (H, W, 3), 0 to 255."""
    matrix = Colorspace.ITU709 if frame.colorspace == _UNSPECIFIED and frame.height >= _HD_LINES else None
    if any(component.is_alpha for component in frame.format.components):
        rgba = frame.to_ndarray(format="rgba", interpolation=_CONVERSION).astype(np.float32)
        alpha = rgba[..., 3:] / 255
        pixels = rgba[..., :3] * alpha + 255 * (1 - alpha)
    else:
        pixels = frame.to_ndarray(format="rgb24", src_colorspace=matrix, interpolation=_CONVERSION)
    turns, is_mirrored = _orientation(frame)
    return np.rot90(pixels[:, ::-1] if is_mirrored else pixels, turns)


def _orientation(frame: Any) -> tuple[int, bool]:
    """Return (counterclockwise quarter turns, whether to mirror left and right before turning).

    Both come from the display matrix, nine numbers of fixed point (a, b, u, c, d, v, x, y, w): a step to the right in
    the stored frame goes by (a, b) on the screen, a step down by (c, d); y points down (ISO/IEC 14496-12, 6.2.2).
    """
    stored = frame.side_data.get("DISPLAYMATRIX")
    if stored is None:
        return 0, False
    a, b, _, c, d = np.frombuffer(bytes(stored), np.int32)[:5].astype(float)
    is_mirrored = bool(a * d - b * c < 0)
    right = (-a, -b) if is_mirrored else (a, b)
    return round(-math.atan2(right[1], right[0]) / (math.pi / 2)) % 4, is_mirrored


def _upright_size(frame: Any, aspect: Fraction | None) -> tuple[int, int]:
    """Return (height, width) with square pixels, after rotation."""
    height, width = frame.height, round(frame.width * float(aspect or 1))
    return (width, height) if _orientation(frame)[0] % 2 else (height, width)


def _scale(
    pixels: np.ndarray, size: tuple[int, int], box: tuple[float, float, float, float], height: int, width: int
) -> np.ndarray:
    """Crop and scale one frame (H, W, 3) from 0 to 255: (height, width, 3), 0 to 1.

    The frame is narrower or wider than `size` if its pixels are not square.
    """
    down, across = pixels.shape[0] / size[0], pixels.shape[1] / size[1]
    frame_box = (
        box[0] * across,
        box[1] * down,
        min(box[2] * across, pixels.shape[1]),
        min(box[3] * down, pixels.shape[0]),
    )
    planes = [Image.fromarray(np.ascontiguousarray(pixels[..., c], dtype=np.float32) / 255) for c in range(3)]
    scaled = [np.asarray(p.resize((width, height), Image.Resampling.LANCZOS, box=frame_box)) for p in planes]
    return np.stack(scaled, axis=-1).clip(0.0, 1.0)


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Turn errors of reading and decoding into a ValueError that names the video and a remedy."""
    try:
        yield
    except OverBudget as error:
        raise ValueError(f"The clip {name!r} can't be read: {error}") from error
    except (av.error.FFmpegError, OSError, ValueError, StopIteration, _StartsLater) as error:
        if isinstance(error, FileNotFoundError):
            raise ValueError(
                f"The clip {name!r} can't be read (it's gone, or a link to a missing file); put the file there, or "
                "take it out of the folder and queue again."
            ) from error
        has_reason = isinstance(error, (OSError, ValueError)) and not isinstance(error, av.error.FFmpegError)
        reason = error if has_reason else "it's damaged or not a video"
        fix = "save it again as MP4 (H.264), or take it out of the folder"
        raise ValueError(f"The clip {name!r} can't be read ({reason}); {fix}.") from error
