"""Masks and control images beside the pictures that they belong to, as other trainers name them."""

import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...common.progress import Interrupted
from ..media.images import EXTENSIONS
from .files import has_ending, relative_name, stem_of
from .subsets import Pictures

MASK, CONTROL = "mask", "control"
MASK_EXTENSION = ".mask"  # a grey PNG of AnimaLoraStudio
# Ends of the names of companions. -masklabel and -condlabel are OneTrainer's; numbers are musubi-tuner's.
_ENDS = (
    (MASK, re.compile(r"(?:-masklabel|[_.-]mask)\Z")),
    (CONTROL, re.compile(r"-condlabel\Z")),
    (CONTROL, re.compile(r"_(\d+)\Z")),
)
_FOLDERS = {"masks": MASK, "mask": MASK, "conditioning": CONTROL, "control": CONTROL, "controls": CONTROL}


@dataclass(frozen=True)
class Sorted:
    """Files of a folder sorted into pictures and their companions.

    pictures: the files that are trained on, with their companions.
    spare: masks and control images that belong to none of them.
    """

    pictures: Pictures
    spare: tuple[Path, ...] = ()


def sort_companions(
    folder: Path,
    files: Sequence[Path],
    everything: Sequence[Path],
    has_caption: Callable[[Path], bool],
    interrupted: Interrupted = lambda: None,
) -> Sorted:
    """Sort out the masks and control images among the files of a folder.

    files: pictures or clips, in order.
    everything: all files of the folder.
    has_caption: predicate for files with a caption of their own, which are always pictures.
    interrupted: called before each file; raises to stop.

    `a.png` takes `a-masklabel.png`, `a_mask.png`, `a.mask` and `masks/a.png` as mask, and `a-condlabel.png`, `a_0.png`,
    `a_1.png`, … and `conditioning/a.png` as control images.
    """
    images = [file for file in everything if has_ending(file.name, EXTENSIONS | {MASK_EXTENSION})]
    loose = [file for file in images if file.suffix.lower() == MASK_EXTENSION or not has_caption(file)]
    stems: dict[str, list[Path]] = {}
    for file in files:
        stems.setdefault(stem_of(relative_name(folder, file)), []).append(file)
    masks: dict[Path, Path] = {}
    controls: dict[Path, list[tuple[int, Path]]] = {}
    companions, spare = set[Path](), []
    for file in loose:
        interrupted()
        match = next(_roles(folder, file, stems, has_caption), None)
        if match is not None:
            role, number, owners = match
            companions.add(file)
            for owner in owners:
                if role == MASK:
                    masks.setdefault(owner, file)
                else:
                    controls.setdefault(owner, []).append((number, file))
        elif _role_of_folder(folder, file) or file.suffix.lower() == MASK_EXTENSION:
            companions.add(file)
            spare.append(file)
    pictures = tuple(file for file in files if file not in companions)
    ordered = {owner: tuple(file for _, file in sorted(numbered)) for owner, numbered in controls.items()}
    return Sorted(Pictures(pictures, masks, ordered), tuple(spare))


def _roles(
    folder: Path, file: Path, stems: dict[str, list[Path]], has_caption: Callable[[Path], bool]
) -> Iterator[tuple[str, int, list[Path]]]:
    """Yield what a file may be: its role, its number among control images, and the files that it belongs to."""
    stem = stem_of(relative_name(folder, file))
    if file.suffix.lower() == MASK_EXTENSION:
        yield from ((MASK, 0, owners) for owners in [stems.get(stem, [])] if owners)
        return
    *parents, name = stem.split("/")
    for place, parent in enumerate(parents):
        role = _FOLDERS.get(parent.lower())
        if role is not None:
            number, owner_stem = _numbered("/".join((*parents[:place], *parents[place + 1 :], name)), role, stems)
            if owners := [owner for owner in stems.get(owner_stem, []) if owner != file]:
                yield role, number, owners
    for role, end in _ENDS:
        if match := end.search(stem):
            owners = [owner for owner in stems.get(stem[: match.start()], []) if owner != file and has_caption(owner)]
            if owners:
                yield role, int(match[1]) if match.lastindex else 0, owners


def _numbered(stem: str, role: str, stems: Container[str]) -> tuple[int, str]:
    """Split a control image's number off a stem that no picture has; 0 without a number, and for a mask."""
    match = re.fullmatch(r"(.+)_(\d+)", stem, re.DOTALL) if role == CONTROL and stem not in stems else None
    return (0, stem) if match is None else (int(match[2]), match[1])


def _role_of_folder(folder: Path, file: Path) -> str:
    """Return the role of the folders that a file is in, empty for a usual one."""
    parents = relative_name(folder, file).split("/")[:-1]
    return next((_FOLDERS[parent.lower()] for parent in parents if parent.lower() in _FOLDERS), "")
