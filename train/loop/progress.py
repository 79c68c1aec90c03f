"""Progress of a run."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.state import TrainingState


@dataclass
class Progress:
    """Progress of a run.

    step: optimizer steps done.
    batches: micro-batches done.
    saved_step: step of the last save, 0 without one.
    intact: False only while the optimizer updates the weights, when they belong to no step.
    loss: loss of each step.
    validation: points of `validation.Validation`.
    pictures: measurements of `watch.picture_losses.PictureLosses`, as its state holds them.
    """

    step: int = 0
    batches: int = 0
    saved_step: int = 0
    intact: bool = True
    loss: list[float] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[str, Any] = field(default_factory=dict)

    def resume(self, state: TrainingState) -> None:
        """Continue from a state; its validation points are restored apart."""
        self.step = self.saved_step = state.step
        self.batches = state.batches
        self.loss = list(state.loss)

    def resume_validation(self, points: Iterable[dict[str, Any]]) -> None:
        """Continue from the validation points of a state."""
        self.validation = list(points)

    def note_pictures(self, measurements: dict[str, Any]) -> None:
        """Hold the losses by picture of a state, or those that were measured last."""
        self.pictures = measurements

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context of an update of the weights. An error inside leaves `intact` False: such weights are not saved."""
        self.intact = False
        yield
        self.intact = True

    def end_step(self, loss: float, batches: int) -> None:
        """Count a step. batches: its micro-batches."""
        self.batches += batches
        self.step += 1
        self.loss.append(loss)

    def note_save(self, step: int) -> None:
        """Count the state of `step` as saved."""
        self.saved_step = step
