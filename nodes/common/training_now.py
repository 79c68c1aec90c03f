"""The run that this server trains now, held in memory: a file would outlive a killed server."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...train.report.observer import StepReport


@dataclass(frozen=True)
class TrainingNow:
    """Run in training.

    folder: folder that it writes to.
    node_id: node that trains.
    prompt_id: prompt that the node belongs to; empty if unknown.
    phase: current phase.
    report: progress after the last step, None before the first.
    can_pause: whether it can be paused, to go on in another prompt.
    """

    folder: Path
    node_id: str
    prompt_id: str
    phase: str = ""
    report: StepReport | None = None
    can_pause: bool = False


_running: list[TrainingNow] = []  # one at most: ComfyUI executes one node at a time
_requests: set[str] = set()  # the user's requests to that run


def running_in(folder: Path) -> TrainingNow | None:
    """Return the run that trains into `folder` now, if any."""
    return next((run for run in list(_running) if run.folder == folder), None)


def begin(folder: Path, node_id: str, prompt_id: str, can_pause: bool = False) -> None:
    """Record that a run begins. can_pause: see `TrainingNow`."""
    _requests.clear()
    _running[:] = [TrainingNow(folder, node_id, prompt_id, can_pause=can_pause)]


def end() -> None:
    """Record that the run has ended."""
    _running.clear()


def ask(folder: Path, prompt_id: str, action: str) -> bool:
    """Request an action of the run after its next step. Returns False if another run trains, or none.

    action: SAVE, STOP, SAMPLE or PAUSE of `train.report.observer`.
    """
    run = running_in(folder)
    if run is None or not prompt_id or run.prompt_id != prompt_id:
        return False
    _requests.add(action)
    return True


def take_requests() -> frozenset[str]:
    """Return the pending requests, and clear them."""
    requests = frozenset(_requests)
    _requests.difference_update(requests)
    return requests


def phase(text: str) -> None:
    """Record the current phase of the run."""
    _running[:] = [replace(run, phase=text) for run in _running]


def step(report: StepReport) -> None:
    """Record the progress of the run."""
    _running[:] = [replace(run, report=report) for run in _running]
