"""Windows of frames taken out of a video as clips, with the methods and names of musubi-tuner."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...common.text import quoted, within

HEAD = "head"
CHUNK = "chunk"
SLIDE = "slide"
UNIFORM = "uniform"
FULL = "full"
EXTRACTIONS = (HEAD, CHUNK, SLIDE, UNIFORM, FULL)
# Video VAEs encode the first frame by itself and then four frames to each latent frame. MiniMax H3's takes chunks of 17
# frames followed by 5 (ComfyUI, comfy_extras/nodes_minimax_h3.py). Frames of such a number that another VAE can't use
# are cut off when the clip is encoded.
FRAMES_PER_LATENT = 4
MINIMAX_CHUNK, MINIMAX_REST = 17, 5
_DIGITS = 9  # of a number of frames
_LENGTHS = 100  # of clips, in one list
MOST = {"frame_stride": 100_000, "frame_sample": 10_000, "max_frames": 100_000}
"""Limits of the inputs of Training Clips."""


@dataclass(frozen=True)
class Extraction:
    """Method by which clips are taken out of a video.

    target_frames: frames of a clip, each 4n + 1 or 17n + 5; a video gives clips of every one of these lengths.
    fps: frames per second of the clips, by dropping or repeating frames; 0 takes the video's own rate.
    method: head (the first frames), chunk (one clip after the other), slide (a clip every `frame_stride` frames),
        uniform (`frame_sample` clips spread evenly), full (all frames up to `max_frames`; no target_frames).
    frame_stride: frames from one clip to the next, for slide.
    frame_sample: number of clips, for uniform.
    max_frames: most frames of a clip, for full.
    Raises ValueError for an unknown method and values out of range.
    """

    target_frames: tuple[int, ...] = (25,)
    fps: float = 16.0
    method: str = HEAD
    frame_stride: int = 10
    frame_sample: int = 4
    max_frames: int = 81

    def __post_init__(self) -> None:
        if self.method not in EXTRACTIONS:
            raise ValueError(f"extraction is {quoted(self.method)}; choose one of {', '.join(EXTRACTIONS)}.")
        if not 0 <= self.fps <= 1000:
            raise ValueError(f"fps is {self.fps}; set it to frames per second, or to 0 to take each clip's own.")
        for name, most in MOST.items():
            within(name, getattr(self, name), 1, most)
        assert self.target_frames and all(round_down_frames(count) == count for count in self.target_frames)

    def windows(self, frames: int) -> list[tuple[int, int]]:
        """List (first frame, number of frames) of each clip of a video of `frames` frames.

        The list is empty if the video is too short.
        """
        if self.method == FULL:
            return [(0, round_down_frames(min(frames, self.max_frames)))]
        return [(start, count) for count in self.target_frames for start in self._starts(frames, count)]

    def too_long(self, frames: int) -> list[int]:
        """List the target_frames that exceed a video of `frames` frames."""
        return [] if self.method == FULL else [count for count in self.target_frames if count > frames]

    def _starts(self, frames: int, count: int) -> Sequence[int]:
        """List the first frames of the clips of `count` frames."""
        last = frames - count
        if last < 0:
            return []
        if self.method == HEAD:
            return [0]
        if self.method == CHUNK:
            return range(0, last + 1, count)
        if self.method == SLIDE:
            return range(0, last + 1, self.frame_stride)
        return np.unique(np.linspace(0, last, self.frame_sample).astype(int)).tolist()


def round_down_frames(count: int) -> int:
    """Round a number of frames down to 4n + 1 or 17n + 5, whichever is nearer."""
    usual = (count - 1) // FRAMES_PER_LATENT * FRAMES_PER_LATENT + 1
    return max(usual, (count - MINIMAX_REST) // MINIMAX_CHUNK * MINIMAX_CHUNK + MINIMAX_REST)


def parse_target_frames(text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Parse a list such as "1, 25, 49".

    Returns the distinct counts in ascending order, and a note if one was rounded down to a number that a VAE takes.
    Raises ValueError for anything but positive whole numbers.
    """
    parts = [part for part in re.split(r"[,;\s]+", text.strip().strip("[]")) if part]
    # Python turns no text of more than 4300 digits into a number.
    if len(parts) > _LENGTHS:
        raise ValueError(f"target_frames has {len(parts)} numbers; write at most {_LENGTHS}.")
    if not parts or not all(part.isdecimal() and len(part) <= _DIGITS and int(part) >= 1 for part in parts):
        raise ValueError(
            f"target_frames is {quoted(text)}; write the numbers of frames with commas between them, such as 1, 25, 49."
        )
    counts = sorted({int(part) for part in parts})
    lowered = [f"{count} to {round_down_frames(count)}" for count in counts if round_down_frames(count) != count]
    notes = (
        (f"target_frames has to be 4n + 1 (for MiniMax H3 17n + 5), as the VAE takes: lowered {', '.join(lowered)}.",)
        if lowered
        else ()
    )
    return tuple(sorted({round_down_frames(count) for count in counts})), notes
