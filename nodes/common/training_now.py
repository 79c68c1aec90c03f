"""The run that this server trains now, held in memory: a file would outlive a killed server."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...train.observer import StepReport


@dataclass(frozen=True)
class TrainingNow:
    """Run in training.

    folder: folder that it writes to.
    node_id: node that trains.
    prompt_id: prompt that the node belongs to; empty if unknown.
    phase: current phase.
    report: progress after the last step, None before the first.
    """

    folder: Path
    node_id: str
    prompt_id: str
    phase: str = ""
    report: StepReport | None = None


_now: list[TrainingNow] = []  # one at most: ComfyUI executes one node at a time
_asked: set[str] = set()  # the user's requests to that run


def now(folder: Path) -> TrainingNow | None:
    """Return the run that trains into `folder` now, if any."""
    return next((run for run in list(_now) if run.folder == folder), None)


def begin(folder: Path, node_id: str, prompt_id: str) -> None:
    """Record that a run begins."""
    _asked.clear()
    _now[:] = [TrainingNow(folder, node_id, prompt_id)]


def end() -> None:
    """Record that the run has ended."""
    _now.clear()


def ask(folder: Path, prompt_id: str, action: str) -> bool:
    """Request an action of the run after its next step. Returns False if another run trains, or none.

    action: SAVE, STOP or SAMPLE of `train.observer`.
    """
    run = now(folder)
    if run is None or not prompt_id or run.prompt_id != prompt_id:
        return False
    _asked.add(action)
    return True


def take_asked() -> frozenset[str]:
    """Return the pending requests, and clear them."""
    requests = frozenset(_asked)
    _asked.difference_update(requests)
    return requests


def phase(text: str) -> None:
    """Record the current phase of the run."""
    _now[:] = [replace(run, phase=text) for run in _now]


def step(report: StepReport) -> None:
    """Record the progress of the run."""
    _now[:] = [replace(run, report=report) for run in _now]
