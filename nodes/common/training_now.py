"""The run that this server trains now: its own training tells, not a file that a killed server leaves behind."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...train.observer import StepReport


@dataclass(frozen=True)
class TrainingNow:
    """A run in training.

    folder: folder that it writes to.
    node_id: node that trains.
    prompt_id: prompt that the node belongs to, empty where it is not known.
    phase: what is being done now.
    report: progress after the last step, None before the first.
    """

    folder: Path
    node_id: str
    prompt_id: str
    phase: str = ""
    report: StepReport | None = None


_now: list[TrainingNow] = []  # one at most: ComfyUI executes one node at a time
_asked: set[str] = set()  # of it, by its user


def now(folder: Path) -> TrainingNow | None:
    """Return the run that is trained into `folder` now, if there is one."""
    return next((run for run in list(_now) if run.folder == folder), None)


def begin(folder: Path, node_id: str, prompt_id: str) -> None:
    """Note a run that begins."""
    _asked.clear()
    _now[:] = [TrainingNow(folder, node_id, prompt_id)]


def end() -> None:
    """Note that the run has ended."""
    _now.clear()


def ask(folder: Path, prompt_id: str, what: str) -> bool:
    """Ask something of the run after its next step. False where another run trains, or none.

    what: SAVE, STOP or SAMPLE of `train.observer`.
    """
    run = now(folder)
    if run is None or not prompt_id or run.prompt_id != prompt_id:
        return False
    _asked.add(what)
    return True


def take_asked() -> frozenset[str]:
    """Return, once, what the run was asked for."""
    taken = frozenset(_asked)
    _asked.difference_update(taken)
    return taken


def phase(text: str) -> None:
    """Note what the run does now."""
    _now[:] = [replace(run, phase=text) for run in _now]


def step(report: StepReport) -> None:
    """Note the progress of the run."""
    _now[:] = [replace(run, report=report) for run in _now]
