"""Decoding of a film's track to whole pictures: with the alpha of VP8 and VP9, deinterlaced, and in order of time.

AVI stores no order of time: FFmpeg numbers the packets as they come, and frames of a codec that reorders them get each
other's stamps. Such a film is decoded from its start, and its frames are numbered as they are shown.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import av
from av.filter import Graph

# Decoders that read alpha, which FFmpeg's own of these codecs leave out.
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_INTERLACED_ORDERS = frozenset({2, 3, 4, 5})  # FFmpeg's AVFieldOrder: top or bottom field first
_TOP_FIRST = frozenset({2, 5})  # those of which the top field is shown first
_BWDIF = "mode=send_frame:parity=auto:deint=interlaced"  # a frame for each frame; progressive ones pass as they are
_BWDIF_ALL = "mode=send_frame:parity={}:deint=all"


def has_alpha_layer(stream: Any) -> bool:
    """Return whether a VP8 or VP9 track has a second picture for its alpha (AlphaMode of WebM)."""
    modes = [value for name, value in stream.metadata.items() if name.lower() == "alpha_mode"]
    return stream.codec_context.name in _ALPHA_DECODERS and "1" in modes


def alpha_decoder(stream: Any) -> Any | None:
    """Open the decoder of a track with an alpha layer; None if there is no such layer, or the build has no decoder."""
    if not has_alpha_layer(stream):
        return None
    try:
        decoder = av.CodecContext.create(_ALPHA_DECODERS[stream.codec_context.name], "r")
    except av.codec.codec.UnknownCodecError:
        return None
    decoder.options = dict(stream.codec_context.options)
    return decoder


def has_unordered_stamps(container: Any, stream: Any) -> bool:
    """Return whether the stamps of a film's frames are in the order in which they are stored."""
    return "avi" in container.format.name.split(",") and bool(stream.codec_context.has_b_frames)


def is_interlaced(stream: Any, frame: Any) -> bool:
    """Return whether a track, with this first frame, has pictures of two fields."""
    return stream.codec_context.field_order in _INTERLACED_ORDERS or bool(frame.interlaced_frame)


def is_interlaced_by_file(stream: Any, frame: Any) -> bool:
    """Return whether a track is interlaced by its file alone: codecs such as FFV1 and PNG mark no frame."""
    context = stream.codec_context
    return context.field_order in _INTERLACED_ORDERS and not frame.interlaced_frame and not context.codec.reorder


def decoded_frames(container: Any, stream: Any, interlaced: bool = False) -> Iterator[Any]:
    """Yield the frames from the container's position on. With unordered stamps, from the film's start on only.

    interlaced: whether to deinterlace them.
    """
    decoder = alpha_decoder(stream)
    frames = container.decode(stream) if decoder is None else _by_decoder(decoder, container, stream)
    if has_unordered_stamps(container, stream):
        frames = _numbered(frames)
    return deinterlaced(frames, stream) if interlaced else frames


def _by_decoder(decoder: Any, container: Any, stream: Any) -> Iterator[Any]:
    for packet in container.demux(stream):
        yield from decoder.decode(packet)


def _numbered(frames: Iterator[Any]) -> Iterator[Any]:
    for number, frame in enumerate(frames):
        frame.pts = number  # AVI's time base is a frame
        yield frame
        del frame


def deinterlaced(frames: Iterator[Any], stream: Any) -> Iterator[Any]:
    """Deinterlace the frames of two fields by FFmpeg's bwdif; stamps, sizes and order stay."""
    graph: Any = None
    stamps: deque[int] = deque()  # bwdif counts in half units, and some files have none
    for frame in frames:
        if graph is None:
            graph = _bwdif(frame, stream)
        stamps.append(frame.pts)
        graph.push(frame)
        del frame
        yield from _pulled(graph, stamps)
    if graph is not None:
        graph.push(None)
        yield from _pulled(graph, stamps)


def _bwdif(frame: Any, stream: Any) -> Any:
    """Build the filter graph for a track's frames, of which this is one."""
    options = _BWDIF
    if is_interlaced_by_file(stream, frame):
        options = _BWDIF_ALL.format("tff" if stream.codec_context.field_order in _TOP_FIRST else "bff")
    graph = Graph()
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format.name, time_base=stream.time_base
    )
    bwdif, sink = graph.add("bwdif", options), graph.add("buffersink")
    source.link_to(bwdif)
    bwdif.link_to(sink)
    graph.configure()
    return graph


def _pulled(graph: Any, stamps: deque[int]) -> Iterator[Any]:
    while True:
        try:
            frame = graph.pull()
        except (av.error.BlockingIOError, av.error.EOFError):
            return
        frame.pts = stamps.popleft()
        yield frame
        del frame
