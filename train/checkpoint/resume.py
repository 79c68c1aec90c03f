"""Selection of the state to resume from, and of the other states to mention to the user."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ...common.fingerprint import fingerprint
from ...common.text import quoted
from ..config.settings import TrainSettings
from ..runs.run_folder import find_finished, run_folders
from ..runs.run_names import STATE_SUFFIX
from .schema import StateHeader
from .state import DamagedState, read_header


def named_state(root: Path, settings: TrainSettings) -> Path | None:
    """Return the state that `resume` names, None if it is 'off' or 'latest'.

    Raises ValueError if the state is missing or outside the LoRA folder.
    """
    if not settings.names_state:
        return None
    path = find_state(root, settings.resume)
    if path is None:
        raise ValueError(
            f"resume: there is no state {quoted(settings.resume)}; choose one of the list, 'latest' or 'off'."
        )
    return path


def find_state(root: Path, name: str) -> Path | None:
    """Return the state of this name, in the form of `list_states`; None if there is none below the LoRA folder."""
    place = PurePosixPath(name)
    if re.fullmatch(rf"state-\d{{6,}}{re.escape(STATE_SUFFIX)}", place.name) is None:
        return None
    try:
        path = (root / place).resolve()
        return path if path.is_relative_to(root.resolve()) and path.is_file() else None
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None


def find_states(root: Path, settings: TrainSettings, lineage: str) -> list[Path]:
    """List the states to resume from, the best first; empty if the run starts at step 0.

    A named state is the only entry. 'latest' gives the intact states of this lineage up to `steps`, the furthest first.

    Raises ValueError if a named state is missing, damaged or past `steps`.
    """
    if settings.resume == "off":
        return []
    state = named_state(root, settings)
    if state is None:
        return [path for _, path in sorted(_states_of_lineage(root, settings, lineage), reverse=True)]
    if (step := read_header(state).step) > settings.steps:
        raise ValueError(f"resume: that state is already at step {step}, but steps is {settings.steps}; raise steps.")
    return [state]


def damaged_states(root: Path, settings: TrainSettings, lineage: str) -> list[str]:
    """Describe the damaged states of this output name with this lineage, or with a lineage that cannot be read."""
    messages = []
    for path in _states(root, settings):
        try:
            read_header(path)
        except DamagedState as error:
            if error.lineage in (None, lineage):
                messages.append(passed_over(root, path, error))
    return messages


def passed_over(root: Path, path: Path, error: ValueError) -> str:
    """Return a sentence saying that 'latest' skips a state, and why."""
    reason = str(error).removeprefix("resume: ").rpartition("; ")[0].replace(path.name, "it", 1)
    return f"{path.relative_to(root).as_posix()} is skipped: {reason}."


def continued_lineage(root: Path, settings: TrainSettings, lineage: str) -> str:
    """Return the lineage of a run that may resume from a state with other settings.

    A named state of another lineage starts a new lineage, fingerprinted from both, so that the run is never mistaken
    for one that had these settings from step 0. A state that was already reached this way with the same settings keeps
    its lineage.

    lineage: lineage of the settings alone.

    Raises ValueError if a named state is missing or damaged.
    """
    state = named_state(root, settings)
    if state is None:
        return _continued(root, settings, lineage) if settings.continued and settings.resume == "latest" else lineage
    header = read_header(state)
    if lineage in (header.lineage, _settings_lineage(header)):
        return header.lineage
    return fingerprint({"from": header.lineage, "step": header.step, "to": lineage})


def _continued(root: Path, settings: TrainSettings, lineage: str) -> str:
    """Return this lineage or, if it has no run, the lineage of a run that was continued with these settings.

    Of several, prefer a finished run, then the furthest, then the newest.
    """
    if find_finished(root, settings.output_name, settings.key(lineage)) or _states_of_lineage(root, settings, lineage):
        return lineage
    candidates = []
    for header, path in _whole_states(root, settings):
        finished = find_finished(root, settings.output_name, settings.key(header.lineage)) is not None
        if _settings_lineage(header) == lineage and (finished or header.step <= settings.steps):
            candidates.append((finished, header.step, path.stat().st_mtime_ns, header.lineage))
    return max(candidates)[-1] if candidates else lineage


def _settings_lineage(header: StateHeader) -> str:
    """Return the lineage of the settings of a state's last segment."""
    lineage: str = header.parts[-1]["asked"]
    return lineage


def state_of_other_settings(root: Path, settings: TrainSettings) -> str | None:
    """Return the newest intact state of this output name up to `steps`, with any settings, as `resume` names it."""
    paths = [path for header, path in _whole_states(root, settings) if header.step <= settings.steps]
    # If two states were written within one tick of the file system's clock, the name selects the further one.
    newest = max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return None if newest is None else newest.relative_to(root).as_posix()


def first_step_past(root: Path, settings: TrainSettings, lineage: str) -> int | None:
    """Return the step of the first intact state of this lineage past `steps`, None without one."""
    headers = [header for header, _ in _whole_states(root, settings) if header.lineage == lineage]
    return min((header.step for header in headers if header.step > settings.steps), default=None)


def later_state(root: Path, settings: TrainSettings, lineage: str, step: int) -> str | None:
    """Return the furthest intact state of this lineage after `step`, as `resume` names it; None without one."""
    furthest = max(_states_of_lineage(root, settings, lineage), default=None)
    return furthest[1].relative_to(root).as_posix() if furthest is not None and furthest[0] > step else None


def _states_of_lineage(root: Path, settings: TrainSettings, lineage: str) -> list[tuple[int, Path]]:
    """List (step, path) of the intact states of this lineage up to `steps`."""
    return [
        (header.step, path)
        for header, path in _whole_states(root, settings)
        if header.lineage == lineage and header.step <= settings.steps
    ]


def _whole_states(root: Path, settings: TrainSettings) -> Iterator[tuple[StateHeader, Path]]:
    """Yield (header, path) of the intact states of this output name; damaged ones are skipped."""
    for path in _states(root, settings):
        try:
            yield read_header(path), path
        except DamagedState:
            continue


def _states(root: Path, settings: TrainSettings) -> list[Path]:
    return [path for folder in run_folders(root, settings.output_name) for path in folder.states()]


def list_states(root: Path) -> list[str]:
    """List every state below the LoRA folder, as `resume` names it."""
    if not root.is_dir():
        return []
    return sorted(path.relative_to(root).as_posix() for path in root.rglob(f"state-*{STATE_SUFFIX}"))
