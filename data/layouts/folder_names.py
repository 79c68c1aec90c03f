"""Folder names of kohya's scripts and of AnimaLoraStudio: repeats, class and size."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .captions import CaptionFiles
from .files import relative_name
from .subsets import Pictures, Subset, own_captions

MOST_REPEATS = 1000
_NAME = re.compile(r"(?:(?P<size>\d{2,5})px_)?(?:(?P<repeats>\d+)_)?(?P<label>.+)", re.DOTALL)
_REGULARISATION = frozenset(
    {"reg", "regs", "regularization", "regularisation", "reg_images", "reg_data", "regularization_images"}
)


@dataclass(frozen=True)
class FolderName:
    """Parsed name of a folder.

    repeats: showings of each picture per epoch.
    label: rest of the name, the class in kohya's scripts.
    size: side of the training size in pixels, 0 for none.
    numbered: the name says how often.
    """

    repeats: int
    label: str
    size: int = 0
    numbered: bool = True

    @property
    def is_regularisation(self) -> bool:
        return self.label.lower() in _REGULARISATION

    @property
    def class_caption(self) -> str:
        """Caption of pictures without one: kohya's scripts take the class."""
        return "" if self.is_regularisation or self.size or not self.numbered else self.label.strip()


def parse_folder_name(name: str) -> FolderName | None:
    """Parse `10_ohwx man`, `1_reg`, `1024px_2_data` or `768px_data`; None for any other name.

    A leading zero, as in 01_front, counts folders and says no repeats; so does a number above MOST_REPEATS, such as a
    year.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    size, repeats = match["size"], match["repeats"]
    is_count = repeats is not None and not repeats.startswith("0") and 1 <= int(repeats[:5]) <= MOST_REPEATS
    if not size and not is_count:
        return None
    return FolderName(int(repeats) if is_count else 1, match["label"], int(size or 0), is_count)


def split_by_names(folder: Path, pictures: Pictures, captions: CaptionFiles) -> tuple[tuple[Subset, ...], str]:
    """Divide the files of a folder by the names of the folders that they are in.

    Returns the subsets, and a note on the parts of the names that were read; no subsets if no name says anything.
    """
    groups: dict[Path, list[Path]] = {}
    for file in pictures.files:
        groups.setdefault(_named_folder(folder, file), []).append(file)
    names = {group: parse_folder_name(group.name) for group in groups}
    in_regularisation = {group: _is_regularisation(folder, group) for group in groups}
    if not any(names.values()):
        return (), ""
    subsets = []
    for group, files in groups.items():
        name = names[group]
        treatment = {"regularisation": True} if in_regularisation[group] else {}
        caption = own_captions(captions, name.class_caption if name else "")
        examples = pictures.examples(folder, caption, files)
        subsets.append(Subset(group.name, examples, name.repeats if name else 1, treatment=treatment))
    return tuple(subsets), _note(folder, subsets, [name for name in names.values() if name])


def _named_folder(folder: Path, file: Path) -> Path:
    """Return the innermost folder around a file whose name says something, else the chosen folder."""
    for parent in file.parents:
        if parse_folder_name(parent.name) is not None or parent == folder:
            return parent
    return folder


def _is_regularisation(folder: Path, group: Path) -> bool:
    """Return True for a folder of regularisation pictures: `1_reg`, or any inside `reg`."""
    name = parse_folder_name(group.name)
    inside = [folder.name, *relative_name(folder, group).split("/")] if group != folder else [folder.name]
    return bool(name and name.is_regularisation) or any(part.lower() in _REGULARISATION for part in inside)


def _note(folder: Path, subsets: Sequence[Subset], names: Sequence[FolderName]) -> str:
    described = []
    for subset in subsets[:8]:
        regularisation = ", regularisation without trigger_words" if subset.treatment else ""
        described.append(f"{subset.name} ({subset.repeats} x{regularisation})")
    rest = f" and {len(subsets) - 8} more" if len(subsets) > 8 else ""
    classes = [
        subset for subset in subsets if any(not e.caption.file for e in subset.examples if e.caption is not None)
    ]
    by_class = "; pictures without a caption get the name after the number" if classes else ""
    size = "; sizes such as 1024px aren't used, set megapixels on Prepare Dataset" if any(n.size for n in names) else ""
    return (
        f"The folder {folder.name!r} has folder names of kohya's scripts, whose numbers multiply repeats: "
        f"{', '.join(described)}{rest}{by_class}{size}. Set layout to plain if the names mean something else."
    )
