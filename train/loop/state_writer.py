"""Writer of a run's training states."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..blocks.low_bit_policy import LowBitPolicy
from ..checkpoint.state import TrainingState, save_state, state_path, state_size
from ..distributed.store import Topic
from ..preflight.context import RunContext
from ..runs.run_folder import place_of
from .learner import Learner
from .progress import Progress


class StateWriter:
    """Writer of a run's training states. Rank 0 writes them, and the other ranks learn of each by the store.

    last_state: the last state of this run, as the `resume` input names it; empty without one.
    resumed_from: the state that `resume` names, which is not removed.
    """

    def __init__(
        self,
        learner: Learner,
        context: RunContext,
        progress: Progress,
        environment: Callable[[], Mapping[str, str]],
        low_bit: LowBitPolicy,
    ) -> None:
        """environment: returns the facts that the last bits of a result depend on. low_bit: matmul precisions."""
        self.context, self.progress = context, progress
        self.environment, self.low_bit = environment, low_bit
        self._learner: Learner | None = learner
        self.last_state = ""
        self.resumed_from: Path | None = None

    def resume(self, path: Path) -> None:
        """Name the state that the run resumes from."""
        settings = self.context.settings
        if settings.names_state:
            self.last_state, self.resumed_from = settings.resume, path
        else:
            self.last_state = self._resume_name(path)

    def write(self) -> None:
        """Write the state of the current step. Raises OSError if the disk is full or the folder is read-only."""
        step, world = self.progress.step, self.context.world
        save_state(state_path(self.context.folder.path, step), self._state())
        self._note_save(step)
        if world.world_size > 1:
            with suppress(RuntimeError):  # the store may have ended with another process
                world.store.set(Topic.SAVED_STEP, step)
        self.context.folder.remove_old_states(step, self.resumed_from)

    def size(self) -> int:
        """Return the bytes of a state of the current step."""
        return state_size(self._state())

    def read_saved_step(self) -> None:
        """Learn which state rank 0 has written last; nothing changes if the store has ended."""
        with suppress(RuntimeError):
            if (step := self.context.world.store.get(Topic.SAVED_STEP)) is not None:
                self._note_save(step)

    def close(self) -> None:
        """Release the LoRA's weights and the optimizer."""
        self._learner = None

    def _note_save(self, step: int) -> None:
        self.progress.note_save(step)
        self.last_state = self._resume_name(state_path(self.context.folder.path, step))

    def _resume_name(self, state: Path) -> str:
        output_folder = place_of(self.context.settings.output_name).parent
        return (output_folder / state.parent.name / state.name).as_posix()

    def _state(self) -> TrainingState:
        assert self._learner is not None
        progress, key = self.progress, self.context.validation_key
        return TrainingState(
            step=progress.step,
            batches=progress.batches,
            loss=progress.loss,
            lineage=self.context.lineage,
            environment=dict(self.environment()),
            validation={"of": key, "points": progress.validation} if key else {},
            pictures={"of": self.context.pictures_key, **progress.pictures} if progress.pictures else {},
            parts=list(self.context.parts),
            low_bit_matmul=self.low_bit.decision(),
            **self._learner.state(),
        )
