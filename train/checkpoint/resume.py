"""Which saved state a run goes on from, and which others the user is told of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.fingerprint import fingerprint
from ..settings import TrainSettings
from .run_folder import find_finished, run_folders
from .state import STATE_SUFFIX, read_header


def named_state(root: Path, settings: TrainSettings) -> Path | None:
    """The state that `resume` names, or None where it names none. Raises ValueError where that is missing or lies
    outside the LoRA folder."""
    if not settings.names_state:
        return None
    path = (root / settings.resume).resolve()
    if not (path.is_relative_to(root.resolve()) and path.is_file()):
        raise ValueError(f"resume: there is no state {settings.resume!r}; choose one of the list, 'latest' or 'off'.")
    return path


def find_state(root: Path, settings: TrainSettings, lineage: str) -> Path | None:
    """The state to resume from, or None where the run starts at step 0.

    'latest' takes the furthest whole state of this lineage that is not past `steps`. Raises ValueError where a named
    state is missing, or is past `steps`.
    """
    if settings.resume == "off":
        return None
    named = named_state(root, settings)
    if named is not None and (step := read_header(named)["step"]) > settings.steps:
        raise ValueError(f"resume: that state is at step {step}, past steps = {settings.steps}; raise steps.")
    if named is not None:
        return named
    found = _furthest(root, settings, lineage)
    return None if found is None else found[1]


def continued_lineage(root: Path, settings: TrainSettings, lineage: str) -> str:
    """The lineage of what these settings make: a named state of other settings founds a new one, which is known by
    both, so that it is never taken for a run that went through these settings from its start. A state of a run that was
    founded so by these same settings goes on with that one. Raises ValueError where a named state is missing or not
    whole."""
    named = named_state(root, settings)
    if named is None:
        return _continued(root, settings, lineage) if settings.continued and settings.resume == "latest" else lineage
    header = read_header(named)
    if lineage in (header["lineage"], _asked(header)):
        return header["lineage"]
    return fingerprint({"from": header["lineage"], "step": header["step"], "to": lineage})


def _continued(root: Path, settings: TrainSettings, lineage: str) -> str:
    """This lineage, or where it has no run, that of a run which came to these settings from others: a finished one
    before others, then the furthest, then the newest."""
    if find_finished(root, settings.output_name, settings.key(lineage)) or _furthest(root, settings, lineage):
        return lineage
    found = []
    for header, path in _whole_states(root, settings):
        finished = find_finished(root, settings.output_name, settings.key(header["lineage"])) is not None
        if _asked(header) == lineage and (finished or header["step"] <= settings.steps):
            found.append((finished, header["step"], path.stat().st_mtime_ns, header["lineage"]))
    return max(found)[-1] if found else lineage


def _asked(header: dict[str, Any]) -> str | None:
    """The lineage of the settings that a state was reached with, where it is known."""
    asked: str | None = (header.get("parts") or [{}])[-1].get("asked")
    return asked


def other_state(root: Path, settings: TrainSettings) -> str | None:
    """The newest whole state of this output name that is not past `steps`, whatever it was made with, as `resume`
    names it."""
    paths = [path for header, path in _whole_states(root, settings) if header["step"] <= settings.steps]
    # The further one of two that were written within a tick of the file system's clock.
    newest = max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    return None if newest is None else newest.relative_to(root).as_posix()


def step_past(root: Path, settings: TrainSettings, lineage: str) -> int | None:
    """The step of the first whole state of this lineage that is past `steps`."""
    headers = [header for header, _ in _whole_states(root, settings) if header["lineage"] == lineage]
    return min((header["step"] for header in headers if header["step"] > settings.steps), default=None)


def further_state(root: Path, settings: TrainSettings, lineage: str, step: int) -> str | None:
    """The furthest whole state of this lineage after `step`, as `resume` names it."""
    found = _furthest(root, settings, lineage)
    return found[1].relative_to(root).as_posix() if found is not None and found[0] > step else None


def _furthest(root: Path, settings: TrainSettings, lineage: str) -> tuple[int, Path] | None:
    """The furthest whole state of this lineage that is not past `steps`, with its step."""
    found = [
        (header["step"], path)
        for header, path in _whole_states(root, settings)
        if header["lineage"] == lineage and header["step"] <= settings.steps
    ]
    return max(found, default=None)


def _whole_states(root: Path, settings: TrainSettings) -> Iterator[tuple[dict[str, Any], Path]]:
    """The states of this output name with their headers. One that is not whole is no reason not to go on from
    another."""
    for folder in run_folders(root, settings.output_name):
        for path in folder.states():
            try:
                yield read_header(path), path
            except ValueError:
                continue


def list_states(root: Path) -> list[str]:
    """Every state below the LoRA folder, as `resume` names it."""
    if not root.is_dir():
        return []
    return sorted(path.relative_to(root).as_posix() for path in root.rglob(f"state-*{STATE_SUFFIX}"))
