"""Start of a run: its key and lineage, an earlier finished run of the same key, and the state to resume from."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from comfy.model_patcher import ModelPatcher

from ...common.fingerprint import weights_fingerprint
from ...common.text import quantity
from ..checkpoint.compatibility import check_state
from ..checkpoint.resume import (
    continued_lineage,
    damaged_states,
    find_states,
    first_step_past,
    later_state,
    passed_over,
    state_of_other_settings,
)
from ..checkpoint.state import read_header
from ..config.settings import TrainSettings
from ..runs.run_folder import RunFolder, find_finished, open_folder
from .checks import CheckedRun

_MOST_NAMED = 5


@dataclass(frozen=True)
class RunStart:
    """Start of a run.

    weights: fingerprint of the MODEL.
    asked_lineage: lineage of the run's settings.
    lineage: lineage of the run; differs from `asked_lineage` if it resumes from a state of other settings.
    key: key of the run, see `TrainSettings.key`.
    folder: folder to write to; the existing one if `finished`.
    finished: True if a run of this key was completed before.
    state: state to resume from, None to start at step 0.
    step: optimizer steps done in `state`, 0 without one.
    later_state: last state of an earlier continuation of `state` with these settings, as `resume` names it.
    passed_over: sentences on the states that `latest` would have taken, were they not damaged.
    """

    weights: str
    asked_lineage: str
    lineage: str
    key: str
    folder: RunFolder
    finished: bool = False
    state: Path | None = None
    step: int = 0
    later_state: str | None = None
    passed_over: tuple[str, ...] = ()


def find_run_start(model: ModelPatcher, checked: CheckedRun, settings: TrainSettings, root: Path) -> RunStart:
    """Find the start of a run.

    root: folder of all runs.

    The first call for a MODEL reads all its weights to fingerprint them.

    Raises ValueError if a state that `resume` names is missing, damaged or incompatible.
    """
    weights = weights_fingerprint(model)
    asked_lineage = settings.lineage(checked.data.fingerprint, weights)
    lineage = continued_lineage(root, settings, asked_lineage)
    key = settings.key(lineage)
    if finished := find_finished(root, settings.output_name, settings.key(lineage)):
        return RunStart(weights, asked_lineage, lineage, key, finished, finished=True)
    skipped = damaged_states(root, settings, lineage) if settings.resume == "latest" else []
    for state in find_states(root, settings, lineage):
        try:
            check_state(state, settings, checked.patcher, checked.targets)
        except ValueError as error:
            # A state of this lineage was saved with these settings, so its contents have changed since.
            if settings.names_state:
                raise
            skipped.append(passed_over(root, state, error))
            continue
        step, folder = read_header(state).step, open_folder(root, settings.output_name, key, state)
        later = later_state(root, settings, lineage, step) if settings.names_state else None
        return RunStart(weights, asked_lineage, lineage, key, folder, False, state, step, later, tuple(skipped))
    folder = open_folder(root, settings.output_name, key, None)
    return RunStart(weights, asked_lineage, lineage, key, folder, passed_over=tuple(skipped))


def run_start_notes(run_start: RunStart, settings: TrainSettings, root: Path) -> Iterator[str]:
    """Explain the choice of the start: a run resumed without a request, or unused states, and how to change it."""
    if settings.resume == "latest" and run_start.lineage != run_start.asked_lineage:
        folder = run_start.folder.path if run_start.state is None else run_start.state.parent
        yield (
            f"No run had these settings from step 0 on, so this one continues {folder.name}, which changed to them "
            "later; set resume to 'off' to train from step 0."
        )
    yield from run_start.passed_over[:_MOST_NAMED]
    if (rest := len(run_start.passed_over) - _MOST_NAMED) > 0:
        yield f"{quantity(rest, 'more damaged state is', 'more damaged states are')} skipped."
    if run_start.later_state is not None:
        yield (
            "You already continued this state once; this run starts from it again. To continue where that one "
            f"stopped, choose {run_start.later_state} under resume."
        )
    if run_start.finished or run_start.state is not None or settings.resume != "latest":
        return
    if (past := first_step_past(root, settings, run_start.lineage)) is not None:
        yield (
            f"The saved states of this run are beyond steps = {settings.steps}, so it starts from step 0. To continue "
            f"from one, raise steps to {past} or more."
        )
    elif other := state_of_other_settings(root, settings):
        yield (
            f"Your data or settings changed since the last run of {settings.output_name!r}, so this one starts from "
            f"step 0 in a new folder. To continue the old one, choose {other} under resume."
        )
