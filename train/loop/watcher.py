"""Watchers of a run, and what they see of it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..config.settings import TrainSettings
from ..distributed.world import World
from ..placement.placed_model import PlacedModel
from ..report.observer import Observer
from .best_lora import BestLora
from .learner import Learner
from .lora_writer import LoraWriter
from .progress import Progress

T = TypeVar("T")


class Retry(Protocol):
    """`StepRetries.attempt`: calls a computation again, with less memory or without torch.compile, if it fails."""

    def __call__(self, compute: Callable[[], T]) -> T: ...


@dataclass(frozen=True)
class RunView:
    """View of a run between two steps, for its watchers.

    settings: settings of the run.
    observer: receives phases and notes for the user.
    world: ranks of the run.
    progress: `progress.step` steps are done.
    placed: the model; a watcher may unload its weights.
    learner: the LoRA, which a watcher must not change.
    loras: copies of the LoRA as they are saved.
    best: the LoRA with the lowest validation loss.
    attempt: runs a forward with the retries of a step.
    requests: requests of the user after the last step.
    """

    settings: TrainSettings
    observer: Observer
    world: World
    progress: Progress
    placed: PlacedModel
    learner: Learner
    loras: LoraWriter
    best: BestLora
    attempt: Retry
    requests: Collection[str]


class Watcher(Protocol):
    """Callback between the steps of a run, such as previews and validation."""

    def between_steps(self, run: RunView) -> None:
        """Inspect the run, before the first step and after each step once a due save is written.

        All ranks call it, and rank 0 writes. The final save follows the last.
        A watcher may unload the model's weights: the next step loads them again.
        It must not change the LoRA, the optimizer, the gradients or any random state.
        An exception ends the run.
        """
        ...

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether it has work to do after `step` of `steps` steps, which may need the memory."""
        ...

    def summary(self, run: RunView) -> dict[str, Any]:
        """Return entries for the run's summary: finite numbers and text only."""
        ...
