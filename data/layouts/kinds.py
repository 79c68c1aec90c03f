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
    other: extensions of files that the node of the other kind reads.
    node: name of that node.
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
    VIDEO_EXTENSIONS - EXTENSIONS - UNREAD_EXTENSIONS,
    "Training Clips",
)
VIDEOS = FileKind(
    "clip",
    VIDEO_EXTENSIONS,
    UNREAD_VIDEO_EXTENSIONS,
    "MP4 (H.264)",
    EXTENSIONS - VIDEO_EXTENSIONS,
    "Training Images",
)
