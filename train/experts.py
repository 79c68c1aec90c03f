"""Two-expert training for Wan 2.2: one model above and one below the boundary sigma, each with its own LoRA.

The experts are trained one after the other, so that only one of them is in memory. Each run equals a run of that expert
alone with sigmas limited to its side of the boundary. It has its own folder, states and key, and resumes on its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from comfy.model_patcher import ModelPatcher

from ..common.fingerprint import weights_fingerprint
from ..data.samples import TrainingData
from .config.expert_pair import HIGH, LOW, SAME_WEIGHTS, meeting_sigma
from .config.settings import TrainSettings, ValidationOptions
from .preflight.checks import check_run
from .preflight.disk_space import DiskSpace, check_disk_space_of_pair, required_space
from .preflight.run_start import find_run_start
from .report.observer import Observer, StepReport
from .runs.run_folder import RunFolder, place_of
from .runs.run_names import name_of


@dataclass(frozen=True)
class Expert:
    """Expert with the settings of its run.

    side: `high_noise` or `low_noise`.
    model: its MODEL.
    settings: the settings for both, limited to this side.
    """

    side: str
    model: ModelPatcher
    settings: TrainSettings

    @property
    def title(self) -> str:
        """Name in messages, such as `High noise expert`."""
        return f"{self.side.replace('_', ' ').capitalize()} expert"


def plan_experts(
    high: ModelPatcher,
    low: ModelPatcher,
    data: TrainingData,
    settings: TrainSettings,
    root: Path | None = None,
    as_run: Callable[[Expert], TrainSettings] = lambda expert: expert.settings,
) -> list[Expert]:
    """Plan both runs and check them before the first one starts.

    settings: settings for both.
    root: folder of all runs; with it the states to resume from and the free disk space are checked too.
    as_run: completes an expert's settings with those read from its MODEL.

    Raises ValueError if the MODELs are not a pair of experts, if the sigma range leaves nothing to one of them, and for
    everything that `check_run` rejects.
    """
    boundary = meeting_sigma(high, low)
    if weights_fingerprint(high) == weights_fingerprint(low):
        raise ValueError(SAME_WEIGHTS)
    experts = [
        Expert(side, model, _expert_settings(side, settings, boundary)) for side, model in ((HIGH, high), (LOW, low))
    ]
    needs: list[tuple[RunFolder, DiskSpace]] = []
    for expert in experts:
        checked = check_run(expert.model, data, expert.settings)
        if root is not None:
            run_settings = as_run(expert)
            run_start = find_run_start(expert.model, checked, run_settings, root)
            if not run_start.finished:
                needs.append((run_start.folder, required_space(checked, run_settings, run_start)))
    if len(needs) == 2:
        (folder, first), (_, second) = needs
        check_disk_space_of_pair(folder, first, second)
    return experts


def _expert_settings(side: str, settings: TrainSettings, boundary: float) -> TrainSettings:
    objective = settings.objective
    boundary = objective.expert_boundary or boundary
    low, high = objective.min_sigma, objective.max_sigma
    low, high = (max(low, boundary), high) if side == HIGH else (low, min(high, boundary))
    if low >= high:
        raise ValueError(
            f"min_sigma {objective.min_sigma:g} to max_sigma {objective.max_sigma:g} leaves nothing for the "
            f"{side.replace('_', ' ')} expert, as the two switch at {boundary:g}; widen the range, or connect one "
            "expert only."
        )
    return replace(
        settings,
        output_name=f"{settings.output_name}_{side}",
        network=settings.network.for_high_noise() if side == HIGH else settings.network.for_low_noise(),
        objective=replace(objective, min_sigma=low, max_sigma=high, expert_boundary=0.0),
        validation=_validation_of(side, settings.validation, boundary),
        resume=(resume := _resume(side, settings)),
        continued=resume != settings.resume,
    )


def _validation_of(side: str, options: ValidationOptions | None, boundary: float) -> ValidationOptions | None:
    """Limit the validation sigmas to the expert's side of the boundary.

    Raises ValueError if none is left.
    """
    if options is None:
        return None
    low, high = options.min_sigma, options.max_sigma
    low, high = (max(low, boundary), high) if side == HIGH else (low, min(high, boundary))
    if low >= high:
        raise ValueError(
            f"min_sigma {options.min_sigma:g} to max_sigma {options.max_sigma:g} of validation leave nothing for the "
            f"{side.replace('_', ' ')} expert, as the two switch at {boundary:g}; widen them."
        )
    if options.listed_sigmas and not any(low <= sigma <= high for sigma in options.listed_sigmas):
        raise ValueError(
            f"sigmas of validation leave nothing for the {side.replace('_', ' ')} expert, which has {low:g} to "
            f"{high:g}; add one in that range."
        )
    return replace(options, min_sigma=low, max_sigma=high)


def _resume(side: str, settings: TrainSettings) -> str:
    """Return the `resume` value of one expert.

    The input names one state only, and the name of its folder shows which expert it belongs to. The other expert
    resumes from its latest state, which may have been reached with other settings, like the named one.

    Raises ValueError if the state belongs to neither expert.
    """
    if not settings.names_state:
        return settings.resume
    name = place_of(settings.output_name).name
    folder = PurePosixPath(settings.resume).parent.name
    owner = next((expert_side for expert_side in (HIGH, LOW) if name_of(folder) == f"{name}_{expert_side}"), None)
    if owner is None:
        raise ValueError(
            f"resume: {settings.resume!r} is a state of neither {name}_{HIGH} nor {name}_{LOW}; choose one of these, "
            "or 'latest'."
        )
    return settings.resume if owner == side else "latest"


class ExpertObserver:
    """Observer of one expert's run: prefixes its title and offsets its steps into the progress of both runs."""

    def __init__(self, observer: Observer, expert: Expert, number: int, count: int):
        self._observer, self._title = observer, expert.title
        self._number = number
        self._count = count
        self._steps = expert.settings.steps
        self.began: Callable[[Path], None] = observer.began
        self.saved: Callable[[Path], None] = observer.saved
        self.previewed: Callable[[Path, int], None] = observer.previewed
        self.take_requests, self.check_interrupted = observer.take_requests, observer.check_interrupted

    def ended(self, status: str, text: str) -> None:
        self._observer.ended(status, text and f"{self._title}: {text}")

    def phase(self, text: str) -> None:
        self._observer.phase(f"{self._title}: {text}")

    def note(self, text: str) -> None:
        self._observer.note(f"{self._title}: {text}")

    def validated(self, step: int, loss: float) -> None:
        self._observer.validated(self._number * self._steps + step, loss)

    def step(self, report: StepReport) -> None:
        offset = self._number * report.steps
        seconds_left = report.seconds_left
        if seconds_left is not None and report.seconds_per_step is not None:
            seconds_left += (self._count - 1 - self._number) * report.steps * report.seconds_per_step
        self._observer.step(
            replace(report, step=offset + report.step, steps=self._count * report.steps, seconds_left=seconds_left)
        )
