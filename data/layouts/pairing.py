"""Pairing of images with their control images and masks, by file name."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...common.progress import Interrupted
from ...common.text import quantity, shortlist
from .files import image_files, list_files, relative_name, same_folder, stem_of


def match_controls(names: Sequence[str], folder: Path) -> tuple[list[tuple[Path, ...]], tuple[str, ...]]:
    """Match the control images of each image; returns them, and a note on those that belong to no image.

    names: of images, as paths below their folder.
    folder: control folder.

    `sub/a.jpg` takes `sub/a.png` of any image extension, then `sub/a_0.png`, `sub/a_1.png`, … in numerical order, as
    musubi-tuner names them. A file whose stem is that of another image belongs to that one.
    Raises ValueError that names up to five images without a control image.
    """
    stems = [stem_of(name) for name in names]
    files = _by_stem(folder, "control folder", "control picture")
    matched = _control_stems(stems, files)
    missing = [name for name, control_stems in zip(names, matched, strict=True) if not control_stems]
    if missing:
        stem, total = stem_of(missing[0]), quantity(len(names), "picture")
        raise ValueError(
            f"{quantity(len(missing), f'of {total} has', f'of {total} have')} no control picture in {folder.name!r}: "
            f"{shortlist(missing)}; put one of the same name there, such as {stem + '.png'!r} or {stem + '_0.png'!r} "
            f"for {missing[0]!r}, or take the picture out of its folder."
        )
    spare = sorted(files.keys() - {stem for control_stems in matched for stem in control_stems})
    notes = (
        "These control pictures belong to no picture and are ignored: "
        f"{list_files(folder, [files[s] for s in spare])}.",
    )
    return [tuple(files[stem] for stem in control_stems) for control_stems in matched], notes if spare else ()


def _control_stems(stems: Sequence[str], files: Mapping[str, Path]) -> list[list[str]]:
    """List the stems of the control images of each image, in their order."""
    numbered: dict[str, list[tuple[int, str]]] = {}
    for stem in files.keys() - set(stems):
        if match := re.fullmatch(r"(.*)_(\d+)", stem, re.DOTALL):
            numbered.setdefault(match[1], []).append((int(match[2]), stem))
    return [[stem] * (stem in files) + [other for _, other in sorted(numbered.get(stem, []))] for stem in stems]


def optional_controls(
    names: Sequence[str], folder: Path, interrupted: Interrupted = lambda: None
) -> list[tuple[Path, ...]]:
    """Match control images as `match_controls` does; an image may have none."""
    files = _by_stem(folder, "control folder", "control picture", interrupted)
    matched = _control_stems([stem_of(name) for name in names], files)
    return [tuple(files[stem] for stem in stems) for stems in matched]


def optional_masks(names: Sequence[str], folder: Path, interrupted: Interrupted = lambda: None) -> list[Path | None]:
    """Match masks as `match_masks` does; an image or video may have none."""
    files = _by_stem(folder, "mask folder", "mask", interrupted)
    return [files.get(stem_of(name)) for name in names]


def match_masks(names: Sequence[str], folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Match the mask of each image or video; returns the masks, and a note on those that belong to none.

    names: of images or videos, as paths below their folder. `sub/a.jpg` takes `sub/a.png` of any image extension.
    folder: mask folder.
    Raises ValueError that names up to five without a mask.
    """
    files = _by_stem(folder, "mask folder", "mask")
    missing = [name for name in names if stem_of(name) not in files]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} have no mask in {folder.name!r}: {shortlist(missing)}; put a picture of "
            f"the same name there, such as {stem_of(missing[0]) + '.png'!r} for {missing[0]!r} (all white where "
            f"nothing is to be masked), or keep those without masks in a folder of their own."
        )
    spare = sorted(files.keys() - {stem_of(name) for name in names})
    notes = (
        "These masks belong to no picture or clip and are ignored: "
        f"{list_files(folder, [files[stem] for stem in spare])}.",
    )
    return [files[stem_of(name)] for name in names], notes if spare else ()


def separate_folders(folder: Path, **companions: Path | None) -> tuple[Path, ...]:
    """List the companion folders that are set; keywords are the names of their inputs.

    Raises ValueError if one of them is the folder itself.
    """
    for name, other in companions.items():
        if other is not None and same_folder(folder, other):
            role = name.removesuffix("_folder")
            raise ValueError(
                f"{name} is {folder.name!r}, the folder of the pictures themselves; put the {role} pictures into a "
                f"folder of their own."
            )
    return tuple(other for other in companions.values() if other is not None)


def _by_stem(folder: Path, label: str, noun: str, interrupted: Interrupted = lambda: None) -> dict[str, Path]:
    """List the images of a folder by their names without extension; raises ValueError for two of one name."""
    files: dict[str, Path] = {}
    for file in image_files(folder, interrupted):
        stem = stem_of(relative_name(folder, file))
        if stem in files:
            raise ValueError(
                f"The {label} {folder.name!r} holds {files[stem].name!r} and {file.name!r}, which are the same {noun} "
                "by name; remove one."
            )
        files[stem] = file
    return files
