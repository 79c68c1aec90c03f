"""Folder of a run: its file names, retention of old files, and the search for runs.

It is inside ComfyUI's LoRA folder, so that each saved LoRA can be chosen in any LoRA loader:
`<name> (003)/<name>.safetensors`, `<name>_steps/<name>-step000100.safetensors`, states, `run.json`, `summary.json`.
See `run_names` for the folder's name.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from ...common.files import MACHINE, sweep_unfinished, write_atomically
from ...common.untrusted.budgets import RUN_SUMMARY
from ...common.untrusted.json_text import is_plain, read_json
from ...common.untrusted.regular_files import is_regular
from ...common.untrusted.tensor_files import open_tensors
from ..preview.gallery import FOLDER as PREVIEWS
from .run_names import STATE_SUFFIX, STEPS, deleted_numbers, key_of, name_of, number_of, numbered, step_loras
from .run_record import RECORD, RunReader

STATES_KEPT = 2
# The fields of every summary.
_SUMMARY: dict[str, type] = {
    **dict.fromkeys(("status", "key", "output_name", "folder", "started", "ended"), str),
    **dict.fromkeys(("steps", "steps_done", "targets", "parameters"), int),
    **dict.fromkeys(("loss", "notes", "files"), list),
    "compile": bool,
}


def place_of(output_name: str) -> PurePosixPath:
    """Convert an output name to a path below the LoRA folder."""
    return PurePosixPath(output_name.replace("\\", "/"))


# The last number that this process assigned to a run, by path and name. It is not reused after the folder was deleted,
# nor is the number of a run in the trash: ComfyUI caches LoRAs in memory by file name.
_highest: dict[Path, int] = {}


@dataclass(frozen=True)
class RunFolder:
    """Folder of one run.

    path: the folder.
    name: last part of the output name; every LoRA's file name begins with it.
    is_new: True before `create`: the folder is not created yet, and another run may still claim its number.
    """

    path: Path
    name: str
    is_new: bool = False

    @property
    def lora_path(self) -> Path:
        """Path of the final LoRA."""
        return self.path / f"{self.name}.safetensors"

    def step_lora_path(self, step: int) -> Path:
        """Return the path of the intermediate LoRA of a step."""
        return self.path / f"{self.name}{STEPS}" / f"{self.name}-step{step:06d}.safetensors"

    @property
    def best_path(self) -> Path:
        """Path of the LoRA with the lowest validation loss."""
        return self.path / f"{self.name}-best.safetensors"

    def step_loras(self) -> dict[int, Path]:
        """Map the step of each intermediate LoRA to its path, in ascending order."""
        return step_loras(self.path, self.name)

    def loras(self) -> list[Path]:
        """List the LoRAs by their steps, the newest last.

        The final LoRA is older than some of them if a run was stopped with its LoRA kept, and then continued.
        """
        steps: list[tuple[float, Path]] = [(step, path) for step, path in self.step_loras().items()]
        if self.lora_path.is_file():
            steps.append((step_in(self.lora_path), self.lora_path))
        return [path for _, path in sorted(steps, key=itemgetter(0))]

    def remove_old_loras(self, step: int, keep: int) -> None:
        """Delete intermediate LoRAs up to `step` except the newest `keep`.

        LoRAs past `step` belong to an earlier continuation of the run and are retained.
        """
        candidates = [path for lora_step, path in self.step_loras().items() if lora_step <= step]
        for path in candidates[:-keep]:
            with contextlib.suppress(OSError):  # a file that is open elsewhere is deleted at the next save
                path.unlink(missing_ok=True)

    def is_free(self) -> bool:
        """Return whether a run of this machine was killed here before its first save and is not recorded as ended."""
        summary = self.read_summary()
        saved = any(path.suffix in (".safetensors", STATE_SUFFIX) for path in self.path.rglob("*"))
        ended = summary is not None and summary["status"] in ("finished", "unsaved")
        # On a shared disk another machine may still be training here.
        return not saved and not ended and RunReader(self.path).facts().get("machine") == MACHINE

    def states(self) -> list[Path]:
        """List the saved states by ascending step."""
        paths = filter(is_regular, self.path.glob(f"state-*{STATE_SUFFIX}"))
        return sorted(paths, key=lambda path: (len(path.name), path.name))

    def states_except(self, resumed_from: Path | None) -> list[Path]:
        """List the saved states by ascending step, without the state that the run was resumed from."""
        return [path for path in self.states() if resumed_from is None or not _is_same_path(path, resumed_from)]

    def remove_old_states(self, step: int, resumed_from: Path | None = None) -> None:
        """Delete states up to `step` except the newest STATES_KEPT. Call it after the state of `step` was saved.

        States past `step` belong to an earlier continuation of the run and are retained.

        resumed_from: named state that the run resumed from; retained, so that the same workflow can be queued again.
        """
        last = f"state-{step:06d}{STATE_SUFFIX}"
        candidates = [
            path for path in self.states_except(resumed_from) if (len(path.name), path.name) <= (len(last), last)
        ]
        for path in candidates[:-STATES_KEPT]:
            with contextlib.suppress(OSError):  # a file that is open elsewhere is deleted at the next save
                path.unlink(missing_ok=True)

    def create(self) -> "RunFolder":
        """Create a new run's folder and return it: `mkdir` claims its number, or the next free one.

        Raises ValueError if the folder is not writable, or a part of it is a link, through which nothing is written.
        """
        for part in (self.path / PREVIEWS, self.step_lora_path(0).parent):
            if part.is_symlink():
                raise ValueError(
                    f"output_name: {part.name!r} in the folder {self.path.name!r} of this run is a link; replace it by "
                    "a folder, or choose another output_name."
                )
        try:
            folder = self._create_numbered() if self.is_new else self
            # Try the longest path of a run: Windows may allow no more than 260 characters.
            trial = folder.step_lora_path(0).with_suffix(".trial")
            try:
                write_atomically(trial, lambda temporary: _write_text(temporary, "tessera"))
                trial.unlink()
            except OSError:
                if self.is_new:
                    _remove_empty(trial.parent, folder.path)
                raise
            _remove_empty(trial.parent)
        except OSError as error:
            raise ValueError(f"output_name: the run's folder cannot be written: {error.strerror}") from error
        return folder

    def _create_numbered(self) -> "RunFolder":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        number = number_of(self.path.name)
        while True:
            path = self.path.with_name(numbered(self.name, number))
            _highest[path.parent / self.name] = number
            try:
                path.mkdir()
            except FileExistsError:  # another server or thread came first
                number += 1
                continue
            return RunFolder(path, self.name)

    def write_companion_file(self, ending: str, text: str) -> None:
        """Write a companion text file of the LoRA: `<name>.<ending>`."""
        write_atomically(self.path / f"{self.name}.{ending}", lambda temporary: _write_text(temporary, text))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json atomically. Raises OSError if the write fails."""
        text = json.dumps(summary, indent=1, allow_nan=False)
        write_atomically(self.path / "summary.json", lambda temporary: _write_text(temporary, text))

    def read_summary(self) -> dict[str, Any] | None:
        """Read summary.json; None if it is missing or damaged."""
        try:
            summary: dict[str, Any] = read_json(self.path / "summary.json", RUN_SUMMARY)
        except (OSError, ValueError):
            return None
        return summary if _is_whole(summary) else None


def step_in(lora: Path) -> float:
    """Read the step of a LoRA from its metadata; infinite if it has none, or the file can't be read."""
    try:
        with open_tensors(lora) as file:
            return int((file.metadata() or {})["ss_steps"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return math.inf


def _remove_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it holds files
            folder.rmdir()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def run_folders(root: Path, output_name: str, key: str = "") -> list[RunFolder]:
    """List the run folders of this output name by number; with `key`, only those of that key."""
    place = root / place_of(output_name)
    if not place.parent.is_dir():
        return []
    with os.scandir(place.parent) as entries:
        names = [entry.name for entry in entries if name_of(entry.name) == place.name and entry.is_dir()]
    paths = [place.parent / name for name in sorted(names, key=lambda name: (number_of(name), name))]
    return [RunFolder(path, place.name) for path in paths if not key or key_of(path) == key]


MOST_WALKED = 100_000  # folders that a search for runs visits
Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class FoundRun:
    """Run found by a search of all folders.

    folder: its folder.
    changed: time of the last change of its record, in seconds since 1970.
    stamp: names, times and sizes of the files of its record.
    """

    folder: RunFolder
    changed: float
    stamp: Stamp


def all_runs(root: Path) -> Iterator[FoundRun]:
    """Find the runs of every output name below a folder by their records. Links are not followed."""
    waiting, folder_count = [str(root)], 0
    while waiting and folder_count < MOST_WALKED:
        place, folder_count = waiting.pop(), folder_count + 1
        name = name_of(os.path.basename(place))
        try:
            stamp = _scan(place, name, waiting)
        except OSError:  # deleted meanwhile, or not readable
            continue
        if name is not None and stamp and place != str(root):
            changed = max(nanoseconds for _, nanoseconds, _ in stamp) / 1e9
            yield FoundRun(RunFolder(Path(place), name), changed, stamp)


def _scan(place: str, name: str | None, waiting: list[str]) -> Stamp:
    """Return the files of the record in a folder of a run, and add the folders in it that may hold runs to `waiting`.

    name: of the run, None for another folder. Raises OSError.
    """
    stamp = []
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if name is None or entry.name not in (PREVIEWS, f"{name}{STEPS}"):
                    waiting.append(entry.path)
            elif name is not None and entry.name in RECORD and entry.is_file(follow_symlinks=False):
                file_stat = entry.stat(follow_symlinks=False)
                stamp.append((entry.name, file_stat.st_mtime_ns, file_stat.st_size))
    return tuple(sorted(stamp))


def find_finished(root: Path, output_name: str, key: str) -> RunFolder | None:
    """Find the folder of a finished run with this key whose LoRA and summary exist and can be read."""
    for folder in run_folders(root, output_name, key):
        summary = folder.read_summary()
        if summary and summary["key"] == key and summary["status"] == "finished" and _is_readable(folder.lora_path):
            return folder
    return None


def _is_whole(summary: Any) -> bool:
    """Test that a summary has the fields that every run writes, with the types that nodes read."""
    return (
        isinstance(summary, dict)
        and is_plain(summary)
        and all(isinstance(summary.get(name), kind) for name, kind in _SUMMARY.items())
        and all(map(_is_number, summary["loss"]))
        and isinstance(summary.get("previews", {}), dict)
        and _is_validation(summary.get("validation", {}))
    )


def _is_validation(validation: Any) -> bool:
    points = validation.get("points", []) if isinstance(validation, dict) else None
    return isinstance(points, list) and all(map(_is_validated_point, points))


def _is_validated_point(point: Any) -> bool:
    return isinstance(point, dict) and _is_number(point.get("step")) and _is_number(point.get("loss"))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_readable(lora: Path) -> bool:
    """Test for a safetensors file that contains tensors and is as long as its header says."""
    try:
        with open_tensors(lora) as file:
            return bool(file.keys())
    except (OSError, SafetensorError):
        return False


def open_folder(root: Path, output_name: str, key: str, state: Path | None) -> RunFolder:
    """Return the folder to write to: the folder of `state` if it belongs to the same run, else a new one.

    A folder of this run without LoRA and state, left by a process that was killed before its first save, is reused. A
    new folder is not created yet, see `RunFolder.create`. Deletes unfinished files that killed processes left in the
    folders of this output name.
    """
    place, folders = root / place_of(output_name), run_folders(root, output_name)
    for folder in folders:
        sweep_unfinished(folder.path)
    matches = [folder for folder in folders if key_of(folder.path) == key]
    for folder in matches:
        if state is not None and _is_same_path(state.parent, folder.path):
            return folder
    if (free := next((folder for folder in matches if folder.is_free()), None)) is not None:
        return free
    numbers = [number_of(folder.path.name) for folder in folders]
    number = 1 + max([_highest.get(place, 0), *numbers, *deleted_numbers(root, place_of(output_name))])
    return RunFolder(place.with_name(numbered(place.name, number)), place.name, is_new=True)


def _is_same_path(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()
