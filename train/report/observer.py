"""Observer interface: progress, notes and files that a run reports."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StepReport:
    """Progress after one optimizer step.

    step: optimizer steps done.
    steps: optimizer steps of the run.
    loss: loss of this step.
    learning_rate: learning rate of this step.
    seconds_per_step: median of the last steps, None before it is known.
    seconds_left: estimated time to the end, None before it is known.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds_per_step: float | None
    seconds_left: float | None


SAVE = "save"
STOP = "stop"
SAMPLE = "sample"
PAUSE = "pause"


class Observer(Protocol):
    """Receiver of a run's progress. All methods are called from the training thread.

    Only `check_interrupted` may raise.
    """

    def began(self, folder: Path) -> None:
        """Report a run that writes to `folder`, before its model is loaded."""
        ...

    def ended(self, status: str, text: str) -> None:
        """Report the end of a run.

        status: as in the run's summary.
        text: sentence for the user, empty if there is none.
        """
        ...

    def phase(self, text: str) -> None:
        """Report the start of a phase, such as loading the model."""
        ...

    def note(self, text: str) -> None:
        """Report one sentence for the user."""
        ...

    def step(self, report: StepReport) -> None:
        """Report an optimizer step."""
        ...

    def saved(self, path: Path) -> None:
        """Report a LoRA file that was written."""
        ...

    def previewed(self, sheet: Path, step: int) -> None:
        """Report new previews.

        sheet: contact sheet of all previews so far; its last column belongs to `step`.
        """
        ...

    def validated(self, step: int, loss: float) -> None:
        """Report the mean validation loss after `step` steps."""

    def take_requests(self) -> AbstractSet[str]:
        """Return the requests of the user after this step, each once.

        SAVE saves now, SAMPLE makes all previews now, STOP ends the run here and keeps the LoRA, PAUSE ends it to be
        continued.
        """
        ...

    def check_interrupted(self) -> None:
        """Raise to cancel the run. The trainer saves before it ends."""


class SilentObserver:
    """Observer that ignores everything."""

    def began(self, folder: Path) -> None:
        return

    def ended(self, status: str, text: str) -> None:
        return

    def phase(self, text: str) -> None:
        return

    def note(self, text: str) -> None:
        return

    def step(self, report: StepReport) -> None:
        return

    def saved(self, path: Path) -> None:
        return

    def previewed(self, sheet: Path, step: int) -> None:
        return

    def validated(self, step: int, loss: float) -> None:
        return

    def take_requests(self) -> AbstractSet[str]:
        return frozenset()

    def check_interrupted(self) -> None:
        return


class QuietObserver(SilentObserver):
    """Observer of a rank whose run another rank reports: forwards nothing but Cancel."""

    def __init__(self, observer: Observer):
        self._observer = observer

    def check_interrupted(self) -> None:
        self._observer.check_interrupted()
