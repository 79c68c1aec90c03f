"""Names of run folders, and the key of the run in a folder.

A run's folder is `<name> (003)`. Its key is in `run.json`. Version 0.1 called it `<name>-<first 8 digits of the key>`,
with a number appended if that name existed: such folders keep their names and can be read.
"""

import re
from pathlib import Path, PurePosixPath
from unicodedata import normalize

from .run_record import RUN, SUMMARY, RunReader

TRASH = ".tessera-trash"  # next to the folder of all runs: holds the deleted runs, one folder per day
STEPS = "_steps"  # suffix of the folder with a run's intermediate LoRAs
_NUMBERED = re.compile(r"(?P<name>.+) \((?P<number>\d{3,6})\)", re.DOTALL)
_KEYED = re.compile(r"(?P<name>.+)-(?P<key>[0-9a-f]{8})(-\d{1,6})?", re.DOTALL)
_MARK = re.compile(r"( \(\d{3,6}\)|-[0-9a-f]{8}(-\d{1,6})?)(?=/)")

# For each folder, the stamp of the file that the key was read from, and the key.
_keys: dict[Path, tuple[tuple[str, int, int, int], str]] = {}


def numbered(name: str, number: int) -> str:
    """Return the folder name of the run with this number of an output name."""
    return f"{name} ({number:03d})"


def number_of(folder: str) -> int:
    """Return the number in a folder's name; 0 for a folder of version 0.1 or one that is not a run's."""
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
    folder = normalize("NFC", folder)
    match = _NUMBERED.fullmatch(folder) or _KEYED.fullmatch(folder)
    return match["name"] if match else None


def early_key(folder: str) -> str:
    """Return the first 8 digits of the key in a folder name from version 0.1; empty for any other."""
    match = _KEYED.fullmatch(folder)
    return match["key"] if match else ""


def without_numbers(path: str) -> str:
    """Remove the number or key of each run folder in a path with forward slashes."""
    return _MARK.sub("", path)


def key_of(folder: Path) -> str:
    """Return the key of the run in a folder; its first 8 digits if only the folder's name has it; empty without one.

    A file is read again only after it has changed, so that thousands of folders are searched quickly.
    """
    for file in (RUN, SUMMARY):
        try:
            file_stat = (folder / file).lstat()
        except OSError:
            continue
        stamp = file, file_stat.st_mtime_ns, file_stat.st_size, file_stat.st_ino
        if folder not in _keys or _keys[folder][0] != stamp:
            key = RunReader(folder).facts().get("key")
            _keys[folder] = stamp, key if isinstance(key, str) else ""
        if key := _keys[folder][1]:
            return key
        break
    return early_key(folder.name)


def has_key(folder: Path, key: str) -> bool:
    """Return whether the run in a folder has this key. key: its first 8 digits suffice."""
    folder_key = key_of(folder)
    return len(folder_key) >= 8 and folder_key[: len(key)] == key[: len(folder_key)]


def step_loras(folder: Path, name: str) -> dict[int, Path]:
    """Map the number of each `<name>-step<number>.safetensors` of a run folder to its path, in ascending order.

    The files are in `<name>_steps`, or in the folder itself, where version 0.1 put them.
    """
    pattern = re.compile(rf"{re.escape(name)}-step(\d{{6,}})\.safetensors")
    places = [place for place in (folder, folder / f"{name}{STEPS}") if place.is_dir()]
    matches = ((pattern.fullmatch(path.name), path) for place in places for path in place.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
