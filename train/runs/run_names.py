"""Names of run folders, and the key of the run in a folder.

A run's folder is `<name> (003)`. Its key is in `run.json`.
"""

import re
from pathlib import Path, PurePosixPath
from unicodedata import normalize

from .run_record import RUN, RunReader

STATE_SUFFIX = ".tessera"  # of the files of states
TRASH = ".tessera-trash"  # next to the folder of all runs: holds the deleted runs, one folder per day
STEPS = "_steps"  # suffix of the folder with a run's intermediate LoRAs
PICTURE_SHEET = "loss_by_picture.png"
REPORT_PAGE, REPORT_PICTURE = "report.html", "report.png"
_NUMBERED = re.compile(r"(?P<name>.+) \((?P<number>\d{3,6})\)", re.DOTALL)
_NUMBER = re.compile(r" \(\d{3,6}\)(?=/)")

# For each folder, the stamp of its run.json, and the key in it.
_keys: dict[Path, tuple[tuple[int, int, int], str]] = {}


def numbered(name: str, number: int) -> str:
    """Return the folder name of the run with this number of an output name."""
    return f"{name} ({number:03d})"


def number_of(folder: str) -> int:
    """Return the number in a folder's name; 0 for any other folder."""
    match = _NUMBERED.fullmatch(folder)
    return int(match["number"]) if match else 0


def deleted_numbers(root: Path, place: PurePosixPath) -> list[int]:
    """Return the numbers of the runs of an output name that are in the trash. root: folder of all runs."""
    days = (root.parent / TRASH).glob("*")
    names = (path.name for day in days for path in (day / place.parent).glob("*"))
    return [number_of(name) for name in names if name_of(name) == place.name]


def name_of(folder: str) -> str | None:
    """Return the last part of the output name in a run folder's name; None for any other folder."""
    # macOS may list a name in another Unicode normal form than it was created with.
    match = _NUMBERED.fullmatch(normalize("NFC", folder))
    return match["name"] if match else None


def without_numbers(path: str) -> str:
    """Remove the number of each run folder in a path with forward slashes."""
    return _NUMBER.sub("", path)


def key_of(folder: Path) -> str:
    """Return the key of the run in a folder; empty without one.

    run.json is read again only after it has changed, so that thousands of folders are searched quickly.
    """
    try:
        file_stat = (folder / RUN).lstat()
    except OSError:
        return ""
    stamp = file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino
    if folder not in _keys or _keys[folder][0] != stamp:
        key = RunReader(folder).facts().get("key")
        _keys[folder] = stamp, key if isinstance(key, str) else ""
    return _keys[folder][1]


def step_loras(folder: Path, name: str) -> dict[int, Path]:
    """Map the number of each `<name>-step<number>.safetensors` of a run folder to its path, in ascending order."""
    pattern = re.compile(rf"{re.escape(name)}-step(\d{{6,}})\.safetensors")
    steps = folder / f"{name}{STEPS}"
    matches = ((pattern.fullmatch(path.name), path) for path in (steps.iterdir() if steps.is_dir() else ()))
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
