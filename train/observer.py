"""What a run tells whoever watches it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class StepReport:
    """step: done so far, of steps; loss: of this step; learning_rate: used for it; seconds_per_step: of late;
    seconds_left: estimate, None while unknown."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    seconds_per_step: float | None
    seconds_left: float | None

    def text(self) -> str:
        """One line for a progress display."""
        parts = [f"step {self.step}/{self.steps}", f"loss {self.loss:.4f}"]
        if self.seconds_per_step is not None:
            parts.append(f"{self.seconds_per_step:.2f} s/step")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left")
        return ", ".join(parts)


class Observer(Protocol):
    """Every method is called from the training thread; none may raise."""

    def phase(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self, report: StepReport) -> None: ...

    def saved(self, path: Path) -> None: ...

    def previewed(self, sheet: Path, step: int) -> None:
        """sheet: the pictures so far, over the steps; the last column is of this step."""
        ...

    def validated(self, step: int, loss: float) -> None:
        """The mean validation loss after that many steps."""

    def check_interrupted(self) -> None:
        """May raise, to end the run: what was trained is saved first."""


class Silent:
    """An observer that watches nothing."""

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

    def check_interrupted(self) -> None:
        return
