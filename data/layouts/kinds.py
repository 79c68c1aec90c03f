"""Kinds of files that a folder is read for: pictures and clips."""

from dataclasses import dataclass

from ..media.images import EXTENSIONS, UNREAD_EXTENSIONS
from .files import VIDEO_EXTENSIONS

UNREAD_VIDEO_EXTENSIONS = frozenset(
    {".ogv", ".ogm", ".rm", ".rmvb", ".divx", ".y4m", ".mjpeg", ".h264", ".264", ".hevc", ".braw", ".r3d"}
)


@dataclass(frozen=True)
class FileKind:
    """Kind of files for which a folder is read.

    noun: one such file in messages.
    read: file extensions that are read.
    unread: known file extensions that are not.
    format: format in which the user should save unread files.
    other: extensions of the other kind's files.
    node: name of the node that reads the other kind.
    """

    noun: str
    read: frozenset[str]
    unread: frozenset[str]
    format: str
    other: frozenset[str]
    node: str


IMAGES = FileKind(
    "picture",
    EXTENSIONS,
    UNREAD_EXTENSIONS,
    "PNG or JPEG",
    (VIDEO_EXTENSIONS | UNREAD_VIDEO_EXTENSIONS) - UNREAD_EXTENSIONS,
    "Training Clips",
)
VIDEOS = FileKind(
    "clip",
    VIDEO_EXTENSIONS,
    UNREAD_VIDEO_EXTENSIONS,
    "MP4 (H.264)",
    (EXTENSIONS | UNREAD_EXTENSIONS) - VIDEO_EXTENSIONS,
    "Training Images",
)
