"""Deletion of runs: their files are moved to a folder for the day, and restored or removed from there.

Only files that this pack writes are touched. Other files in a run's folder stay there, and links are left alone.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from ...common.files import UNFINISHED
from ...common.untrusted.folders import folder_below
from ..preview.gallery import FOLDER as PREVIEWS
from ..preview.gallery import INDEX, SHEET
from .run_folder import FoundRun, RunFolder, all_runs
from .run_names import PICTURE_SHEET, REPORT_PAGE, REPORT_PICTURE, STATE_SUFFIX, STEPS
from .run_record import RECORD

_DAY = re.compile(r"(\d{4}-\d\d-\d\d)(?: \((\d+)\))?")


@dataclass(frozen=True)
class FolderBelow:
    """Folder below a root.

    root: root; links are followed on the path to it.
    relative_path: path below the root, on which no link is followed.
    """

    root: Path
    relative_path: Path


def own_files(folder: RunFolder) -> list[Path]:
    """List the files of a run that this pack wrote, relative to its folder."""
    name = re.escape(normalize("NFC", folder.name))
    lora = rf"{name}-step\d{{6,}}\.safetensors"
    fixed = "|".join(map(re.escape, (*RECORD, PICTURE_SHEET, REPORT_PAGE, REPORT_PICTURE)))
    run_pattern = rf"{fixed}|{name}(-best)?\.safetensors|{lora}|{name}\.(workflow|api)\.json"
    run_pattern += rf"|{name}\.preview\.(png|webp)|state-\d{{6,}}{re.escape(STATE_SUFFIX)}"
    preview_pattern = rf"step\d{{6,}}_\d+\.(png|webp)|{re.escape(SHEET)}|{re.escape(INDEX)}"
    patterns = {"": run_pattern, f"{folder.name}{STEPS}": lora, PREVIEWS: preview_pattern}
    return [
        Path(place, name)
        for place, pattern in patterns.items()
        for name in _plain_files(folder.path / place)
        if re.fullmatch(rf"{pattern}|{UNFINISHED}", normalize("NFC", name))
    ]


def _plain_files(folder: Path) -> Iterator[str]:
    if _is_link(folder):
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))


def _is_link(folder: Path) -> bool:
    return folder.resolve() != folder.parent.resolve() / folder.name  # also true for a junction on Windows


def move_to_trash(folder: RunFolder, root: Path, trash: Path, day: str) -> tuple[Path, int]:
    """Move a run's files to `trash/<day>`. Returns the folder there, and the number of foreign files left behind.

    root: folder of all runs; the run keeps its path relative to it in the trash.
    day: such as 2026-11-24.
    Raises ValueError if the files can't be moved; then they are restored to their original place.
    """
    place = folder.path.relative_to(root)
    number = 1
    while os.path.lexists(target := trash / (day if number == 1 else f"{day} ({number})") / place):
        number += 1
    source, destination = FolderBelow(root, place), FolderBelow(trash.parent, target.relative_to(trash.parent))
    _move(folder, source, own_files(folder), destination)
    return target, sum(len(files) for _, _, files in os.walk(folder.path))


def deleted_runs(trash: Path) -> Iterator[tuple[Path, FoundRun]]:
    """Yield the runs in the trash with the folder of their day, the last day first; nothing if the trash is a link."""
    if _is_link(trash):
        return
    try:
        days = [day for day in trash.iterdir() if _DAY.fullmatch(day.name) and day.is_dir() and not day.is_symlink()]
    except OSError:
        return
    for day in sorted(days, key=_order, reverse=True):
        yield from ((day, run) for run in all_runs(day))


def _order(day: Path) -> tuple[str, int]:
    match = _DAY.fullmatch(day.name)
    assert match is not None
    return match[1], int(match[2] or 1)


def restore(folder: RunFolder, target: Path, root: Path, trash: Path) -> None:
    """Move a run's files from the trash back to `target`, its place below `root`.

    Raises ValueError if another run or file has taken its place; then the files stay in the trash.
    """
    files = own_files(folder)
    conflicts = [name for name in (*map(Path, RECORD), *files) if os.path.lexists(target / name)]
    if conflicts:
        raise ValueError(f"{target.name} is the folder of another run by now; rename that one, then undo again.")
    source = FolderBelow(trash.parent, folder.path.relative_to(trash.parent))
    _move(folder, source, files, FolderBelow(root, target.relative_to(root)))
    _remove_empty_above(folder, trash)


def remove_for_good(folder: RunFolder, trash: Path) -> None:
    """Remove the files of a run in the trash, its record last, so that a partly removed run is still listed.

    Raises OSError for the first file that can't be removed.
    """
    files, place = own_files(folder), FolderBelow(trash.parent, folder.path.relative_to(trash.parent))
    try:
        for file in sorted(files, key=lambda file: file.name in RECORD):
            with folder_below(place.root, place.relative_path / file.parent) as parent:
                parent.unlink(file.name)
    finally:
        _remove_empty(place, files)
    _remove_empty_above(folder, trash)


def _remove_empty_above(folder: RunFolder, trash: Path) -> None:
    """Remove the empty parent folders of a run's folder, up to and including the trash itself."""
    for place in folder.path.parents:
        try:
            place.rmdir()
        except OSError:
            return
        if place == trash:
            return


def _move(folder: RunFolder, source: FolderBelow, files: Sequence[Path], target: FolderBelow) -> None:
    """Move files between two folders, all or none. No link is followed below either root."""
    moved_files: list[Path] = []
    try:
        for file in files:
            _move_file(source, target, file)
            moved_files.append(file)
    except OSError as error:
        for file in moved_files:
            with contextlib.suppress(OSError):
                _move_file(target, source, file)
        _remove_empty(target, files)
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ValueError(
                f"{folder.path.name}: there is a link on the way to {target.relative_path.name}, and none is followed."
            ) from error
        raise ValueError(f"{folder.path.name}: a file can't be moved: {error.strerror or error}.") from error
    _remove_empty(source, files)


def _move_file(source: FolderBelow, target: FolderBelow, file: Path) -> None:
    with (
        folder_below(source.root, source.relative_path / file.parent) as source_folder,
        folder_below(target.root, target.relative_path / file.parent, make=True) as target_folder,
    ):
        source_folder.move(file.name, target_folder)


def _remove_empty(place: FolderBelow, files: Sequence[Path]) -> None:
    """Remove the folders of moved files if they are empty."""
    for parent in sorted({file.parent for file in files}, key=lambda parent: len(parent.parts), reverse=True):
        emptied = place.relative_path / parent
        with contextlib.suppress(OSError), folder_below(place.root, emptied.parent) as parent_folder:
            parent_folder.rmdir(emptied.name)
