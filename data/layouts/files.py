"""Files of a folder and its subfolders, and their names in messages."""

import os
import stat
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from ...common.progress import Interrupted
from ...common.text import shortlist
from ...common.untrusted import regular_files
from ...common.untrusted.budgets import FOLDER, check_size
from ..media.images import EXTENSIONS

VIDEO_EXTENSIONS = frozenset(
    {".mp4", ".webm", ".mkv", ".mov", ".gif", ".apng", ".avi", ".m4v", ".f4v", ".3gp", ".flv", ".wmv", ".asf"}
    | {".ts", ".mts", ".m2ts", ".mpg", ".mpeg", ".vob", ".mxf"}
)
# Folders that systems and programs make beside pictures, in lower case: thumbnails, resource forks, recycle bins.
SYSTEM_FOLDERS = frozenset(
    {"@eadir", "__macosx", "#recycle", "@recycle", "$recycle.bin", "recycler", "lost+found"}
    | {"system volume information"}
)


def image_files(folder: Path, interrupted: Interrupted = lambda: None) -> list[Path]:
    """List the image files in a folder and its subfolders, without hidden ones, sorted by their path below it."""
    return files_in(folder, EXTENSIONS, (), interrupted)


def is_image(name: str) -> bool:
    """Return True if a file of this name belongs to a data set of images."""
    return has_ending(name, EXTENSIONS)


def is_video(name: str) -> bool:
    """Return True if a file of this name belongs to a data set of videos."""
    return has_ending(name, VIDEO_EXTENSIONS)


def has_ending(name: str, endings: frozenset[str]) -> bool:
    """Return True if a file of this name is not hidden and has one of these extensions (lower case, with the dot)."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in endings


def files_in(
    folder: Path, endings: frozenset[str], excluded: Sequence[Path] = (), interrupted: Interrupted = lambda: None
) -> list[Path]:
    """List the files of `all_files` with one of these extensions (lower case, with the dot)."""
    return [file for file in all_files(folder, excluded, interrupted) if has_ending(file.name, endings)]


def all_files(folder: Path, excluded: Sequence[Path] = (), interrupted: Interrupted = lambda: None) -> list[Path]:
    """List the files of a folder and its subfolders, sorted by their path below it.

    Hidden files and folders, those of the system (SYSTEM_FOLDERS), and the folders `excluded` are left out. Links to
    folders are followed last, unless they lead to a folder that was already read or to one of their own parents.
    interrupted: called in each folder; raises to stop. Raises OverBudget for more files than a data set has.
    """
    visited = {os.path.realpath(other) for other in excluded}
    matches: list[Path] = []
    starts = [folder]
    while starts:
        links: list[Path] = []
        for start in starts:
            for parent, names, _ in os.walk(start):
                interrupted()
                real_parent = os.path.realpath(parent)
                if real_parent in visited:
                    names.clear()
                    continue
                visited.add(real_parent)
                matches += [Path(parent, name) for name in _file_names(parent) if not name.startswith(".")]
                check_size(FOLDER, f"The folder {folder.name!r}", items=len(matches))
                names[:] = [name for name in names if not is_skipped(name)]
                # Links come last, so a file that is reachable both ways is listed under its own path.
                linked = [
                    name for name in names if os.path.realpath(Path(parent, name)) != os.path.join(real_parent, name)
                ]
                links += [Path(parent, name) for name in linked if not _leads_back(Path(parent, name))]
                names[:] = [name for name in names if name not in linked]
        starts = sorted(links)
    return sorted(matches, key=lambda path: relative_name(folder, path))


def _file_names(folder: str) -> list[str]:
    """List the files in a folder without pipes, sockets and devices, which would block who opens them."""
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if not entry.is_dir() and not _is_special(entry)]
    except OSError:
        return []


def _is_special(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False):
        return False
    try:
        mode = entry.stat().st_mode
    except OSError:  # a link to nothing, which whoever reads it names
        return False
    return not stat.S_ISREG(mode)


def is_skipped(folder: str) -> bool:
    """Return True for the name of a folder that is hidden, or one of the system."""
    return folder.startswith(".") or folder.lower() in SYSTEM_FOLDERS


def file_below(folder: Path, name: str, endings: frozenset[str]) -> Path | None:
    """Find a file by its path below the folder, if its name is one that `files_in` would list; None otherwise.

    Links are not resolved: the caller checks the file's real location.
    """
    parts = name.split("/")
    # On Windows these would start another folder, a drive or a stream of a file.
    stray = "\0" in name or (os.name == "nt" and any(mark in name for mark in "\\:"))
    if stray or any(not part or is_skipped(part) for part in parts) or not has_ending(parts[-1], endings):
        return None
    file = folder.joinpath(*parts)
    return file if file.is_file() else None


def _leads_back(link: Path) -> bool:
    """Return True if a link leads to a folder that contains it."""
    return Path(os.path.realpath(link.parent)).is_relative_to(os.path.realpath(link))


def same_folder(folder: Path, other: Path) -> bool:
    """Return True if both are the same folder, links resolved."""
    return os.path.realpath(folder) == os.path.realpath(other)


def relative_name(folder: Path, file: Path) -> str:
    """Name a file in messages: its path below the folder."""
    start = os.path.join(folder, "")
    path = str(file)
    if path.startswith(start):  # a tenth of the time of relative_to, which thousands of files take
        return path[len(start) :].replace(os.sep, "/")
    return file.relative_to(folder).as_posix()


def stem_of(name: str) -> str:
    """Remove the extension of a name, and compose its letters: macOS writes é as e and an accent (NFD)."""
    return unicodedata.normalize("NFC", os.path.splitext(name)[0])


def list_files(folder: Path, files: Sequence[Path]) -> str:
    """Name up to five of the files."""
    return shortlist([relative_name(folder, file) for file in files])


def file_state(file: Path) -> str:
    """Describe the state of a file, which changes when the file is written to."""
    try:
        return " ".join(map(str, regular_files.file_state(file)))
    except OSError:
        return "missing"
