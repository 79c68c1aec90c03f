"""Notes on files that are read otherwise than they look, or not as a whole; `{}` stands for their names."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ...common.text import shortlist

SEVERAL_PICTURES = (
    "These files hold several pictures, of which the first is used: {}; save the others as files of their own to train "
    "on them."
)
BROKEN_PROFILE = (
    "The colour profile of these pictures is damaged or for other colours, so they are read as sRGB: {}; save them "
    "again as sRGB if their colours look wrong."
)
HDR_PICTURE = "HDR pictures are read as SDR, so they look pale: {}; save them as SDR (sRGB) for true colours."
UNKNOWN_COLOURS = (
    "The colours of these pictures are of a kind that isn't known here, so they are read as sRGB: {}; save them again "
    "as sRGB if they look wrong."
)
HDR_FILM = "HDR video is read as SDR, so it looks pale: {}; save it as SDR (BT.709) for true colours."
INTERLACED = (
    "Interlaced clips are deinterlaced: {}; if they were deinterlaced before, save them again as progressive video."
)
ALPHA_LOST = (
    "The transparency of these clips can't be read by this PyAV: {}; save them again as ProRes 4444 or GIF, or install "
    "PyAV from its own wheel."
)
CUT_OFF = (
    "These clips end more than a second before the length that they state, so the copy may be incomplete: {}; copy "
    "them again."
)


def remark_notes(remarks: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """Yield a note for each kind of remark. remarks: (name, remarks) of each file."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, file_remarks in remarks:
        for remark in file_remarks:
            names[remark].append(name)
    for remark in sorted(names):
        yield remark.format(shortlist(list(dict.fromkeys(names[remark]))))
