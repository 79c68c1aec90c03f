"""What looks at a run between its steps: previews, validation."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .trainer import Trainer


class Watcher(Protocol):
    """Sees the run as it stands: `trainer.progress.step` steps are done."""

    def between_steps(self, trainer: "Trainer") -> None:
        """Called where a run starts or goes on, and after each step, when what is due has been saved; the last save
        follows the last call. It may take the weights off the device: the next step takes them again. It leaves the
        LoRA, the optimizer, the gradients and every random state as they were. What it raises ends the run."""
        ...

    def facts(self) -> dict[str, Any]:
        """What it has to say in the run's summary: finite numbers and text only."""
        ...
