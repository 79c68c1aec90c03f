"""Video files whose frames identify themselves by their grey."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CODECS = {".mp4": ("libx264", "yuv420p"), ".gif": ("gif", "rgb8"), ".webm": ("libvpx-vp9", "yuv420p")}


def grey(index: int) -> int:
    """The grey of frame `index` of a film of up to 30 frames."""
    return 8 * index + 8


def plain(index: int, height: int, width: int) -> np.ndarray:
    """One grey all over, which names the frame."""
    return np.full((height, width, 3), grey(index), np.uint8)


def write_film(
    path: Path,
    frames: int | Sequence[np.ndarray] = 25,
    *,
    fps: int = 16,
    size: tuple[int, int] = (48, 64),
    codec: tuple[str, str] | None = None,
    draw: Callable[[int, int, int], np.ndarray] = plain,
    stamps: Sequence[int] | None = None,
    caption: str | None = None,
    set_up: Callable[[Any], None] = lambda stream: None,
) -> Path:
    """Write a film of `size` (height, width) with PyAV, with a key frame every ten frames and frames out of order as
    encoders make them.

    stamps: when each frame is shown, in units of 1 / fps seconds; one after the other without it.
    """
    import av

    height, width = size
    name, pixel_format = codec or CODECS.get(path.suffix, CODECS[".mp4"])
    pictures = [draw(index, height, width) for index in range(frames)] if isinstance(frames, int) else frames
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(name, rate=fps)
        stream.width = width
        stream.height = height
        stream.pix_fmt = pixel_format
        if name == "libx264":
            stream.codec_context.options = {"crf": "4"}
        stream.codec_context.gop_size = 10
        set_up(stream)
        for index, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            if stamps is not None:
                frame.pts = stamps[index]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path
