"""Names of run folders, and the key of the run in one.

A run's folder is `<name> (003)`. Its key is in `run.json`. Version 0.1 called it `<name>-<first 8 digits of the key>`,
with a number behind it where that was taken: such folders stay where they are, and are read.
"""

import re
from pathlib import Path, PurePosixPath
from unicodedata import normalize

from .run_record import RUN, SUMMARY, RunReader

TRASH = ".tessera-trash"  # beside the folder of all runs: holds, by days, those that were deleted
STEPS = "_steps"  # ending of the folder of a run's LoRAs of its steps
_NUMBERED = re.compile(r"(?P<name>.+) \((?P<number>\d{3,6})\)", re.DOTALL)
_KEYED = re.compile(r"(?P<name>.+)-(?P<key>[0-9a-f]{8})(-\d{1,6})?", re.DOTALL)
_MARK = re.compile(r"( \(\d{3,6}\)|-[0-9a-f]{8}(-\d{1,6})?)(?=/)")

# Of each folder the key, and the state of the file that it was read from.
_keys: dict[Path, tuple[tuple[str, int, int, int], str]] = {}


def numbered(name: str, number: int) -> str:
    """Return the name of the folder of this run of an output name."""
    return f"{name} ({number:03d})"


def number_of(folder: str) -> int:
    """Return the number in a folder's name; 0 for one of version 0.1 or of no run."""
    match = _NUMBERED.fullmatch(folder)
    return int(match["number"]) if match else 0


def deleted_numbers(root: Path, place: PurePosixPath) -> list[int]:
    """Return the numbers of the runs of an output name that are in the trash. root: folder of all runs."""
    days = (root.parent / TRASH).glob("*")
    found = (path.name for day in days for path in (day / place.parent).glob("*"))
    return [number_of(name) for name in found if name_of(name) == place.name]


def name_of(folder: str) -> str | None:
    """Return the last part of the output name that a run's folder was named after; None for another folder's name."""
    # macOS may list a name in another Unicode normal form than it was created with.
    folder = normalize("NFC", folder)
    match = _NUMBERED.fullmatch(folder) or _KEYED.fullmatch(folder)
    return match["name"] if match else None


def early_key(folder: str) -> str:
    """Return the first 8 digits of the key in a folder's name of version 0.1; empty for any other."""
    match = _KEYED.fullmatch(folder)
    return match["key"] if match else ""


def without_numbers(path: str) -> str:
    """Leave out number or key of each run folder of a path with forward slashes."""
    return _MARK.sub("", path)


def key_of(folder: Path) -> str:
    """Return the key of the run in a folder, only its first 8 digits where just the folder's name tells, or nothing.

    A file is read once for as long as it stays unchanged, so that thousands of folders are looked through quickly.
    """
    for file in (RUN, SUMMARY):
        try:
            found = (folder / file).lstat()
        except OSError:
            continue
        stamp = file, found.st_mtime_ns, found.st_size, found.st_ino
        if folder not in _keys or _keys[folder][0] != stamp:
            key = RunReader(folder).facts().get("key")
            _keys[folder] = stamp, key if isinstance(key, str) else ""
        if key := _keys[folder][1]:
            return key
        break
    return early_key(folder.name)


def has_key(folder: Path, key: str) -> bool:
    """Test whether the run in a folder has this key. key: its first 8 digits suffice."""
    found = key_of(folder)
    return len(found) >= 8 and found[: len(key)] == key[: len(found)]


def step_loras(folder: Path, name: str) -> dict[int, Path]:
    """Map the number of each `<name>-step<number>.safetensors` of a run folder to its path, in ascending order.

    They lie in `<name>_steps`, or in the folder itself, where version 0.1 put them.
    """
    pattern = re.compile(rf"{re.escape(name)}-step(\d{{6,}})\.safetensors")
    places = [place for place in (folder, folder / f"{name}{STEPS}") if place.is_dir()]
    found = ((pattern.fullmatch(path.name), path) for place in places for path in place.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))
