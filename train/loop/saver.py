"""Saving of a run: LoRA and training state at intervals, at the end, and when an error or Cancel ends it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...lora.files.lora_model import LoraModel
from ..blocks.low_bit_policy import LowBitPolicy
from ..checkpoint.state import TrainingState, load_state
from ..objective.timestep_sampling import Strata
from ..preflight.context import RunContext
from ..report.errors import saved_state_message, unsaved_steps_message
from ..report.observer import Observer
from .best_lora import BestLora
from .learner import Learner
from .lora_writer import LoraWriter
from .progress import Progress
from .state_writer import StateWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinalLora:
    """LoRA of a run that has taken all its steps.

    lora: the LoRA, fp32, with kohya keys.
    saved: True if it is in the run's folder.
    copy: its file elsewhere if it could not be saved there, None without one.
    """

    lora: LoraModel
    saved: bool
    copy: Path | None = None


class Saver:
    """Writer of the files of one run, and reader of its states: decides when to save, and reports failures.

    Rank 0 alone writes.

    strata: samples of a step and of an epoch.
    loras: writer of LoRA files.
    states: writer of training states.
    best: the LoRA with the lowest validation loss.
    """

    def __init__(
        self,
        learner: Learner,
        context: RunContext,
        progress: Progress,
        observer: Observer,
        strata: Strata,
        low_bit: LowBitPolicy,
        environment: Callable[[], Mapping[str, str]],
    ) -> None:
        """environment: returns the facts that the last bits of a result depend on. low_bit: matmul precisions."""
        self.context = context
        self.settings = context.settings
        self.progress = progress
        self.observer, self.strata = observer, strata
        self.loras = LoraWriter(learner, context, progress)
        self.states = StateWriter(learner, context, progress, environment, low_bit)
        self.best = BestLora(self.loras, context, progress, observer)

    def resume(self, path: Path, learner: Learner) -> None:
        """Restore a saved state; training continues as if it had not been interrupted.

        Raises ValueError if the file is damaged or is not a state.
        """
        state = load_state(path)
        notes = learner.load(state)
        self.progress.resume(state)
        self.states.resume(path)
        self._resume_validation(path, state)
        if (key := self.context.pictures_key) and state.pictures.get("of") == key:
            self.progress.note_pictures({name: value for name, value in state.pictures.items() if name != "of"})
        self.observer.note(f"Resumed at step {state.step}.")
        for note in notes:
            self.observer.note(note)
        if state.lineage != self.context.lineage:
            self.observer.note(
                "The state comes from a run with other data, model or settings; this run continues with the ones here."
            )
        for name, value in self.states.environment().items():
            if name in state.environment and state.environment[name] != value:
                self.observer.note(
                    f"The state was saved with {name} = {state.environment.get(name)} and continues with {value}, so "
                    "the result may differ by rounding from an uninterrupted run."
                )

    def is_due(self) -> bool:
        """Return whether a save is due after the current step. The last step is saved by `save_final` instead."""
        step, epochs = self.progress.step, self.settings.save_every_epochs
        if step >= self.settings.steps:
            return False
        if epochs:  # due in the step that completes a multiple of `epochs` epochs
            per_step, interval = self.strata.step, self.strata.epoch * epochs
            return step * per_step // interval > (step - 1) * per_step // interval
        return bool(self.settings.save_every) and step % self.settings.save_every == 0

    def save(self) -> None:
        """Write the LoRA and the training state.

        A failure to write is reported and does not end the run: disk space may be freed before the next save.
        """
        try:
            self._write()
        except OSError as error:
            self.observer.note(f"{error.strerror} Training continues and tries again at the next save.")

    def save_final(self, spare_folder: Path | None = None) -> FinalLora:
        """Write the final LoRA and the training state. A failure to write is reported and does not end the run.

        spare_folder: folder for a copy of the LoRA if the run's own folder cannot take it; None without one.
        """
        path, lora = self.context.folder.lora_path, self.loras.snapshot()
        if not self.context.world.is_first:
            return FinalLora(lora, True)
        try:
            self._write_lora(path, lora)
        except OSError as error:
            copy = None if spare_folder is None else self.loras.write_copy(spare_folder, lora)
            copy_text = (
                "" if copy is None else f", and a copy is in {copy.parent.name}/{copy.name} until ComfyUI restarts"
            )
            self.observer.note(
                f"{error.strerror} The LoRA is still passed on in the graph: connect Save LoRA and queue again to "
                f"save it on a disk with room{copy_text}. {self.describe_last_save()}"
            )
            return FinalLora(lora, False, copy)
        self.observer.saved(path)
        try:
            self.states.write()
        except OSError as error:
            self.observer.note(
                f"{error.strerror} The finished LoRA is saved, but you can't continue from its last step."
            )
        return FinalLora(lora, True)

    def save_unsaved_progress(self) -> None:
        """Save the LoRA and the training state at Cancel or an error, if there were steps since the last save.

        Does not save in the middle of an optimizer update. Never raises, so that the first error reaches the user.
        """
        saved = self.progress.saved_step
        if self.progress.intact and self.progress.step > saved:
            try:
                self._write()
            except Exception as error:  # the user needs the error that ended the run, not this one
                log.warning("The state could not be saved", exc_info=error)
                cause = getattr(error, "strerror", None) or "The state could not be saved."
                last = f"The last saved state is that of step {saved}." if saved else "No state was saved before."
                self.observer.note(f"{cause} {last}")

    def describe_last_save(self) -> str:
        """Describe the last save and how to resume from it, for a run that ends now."""
        progress = self.progress
        if not self.context.world.is_first:
            self.states.read_saved_step()
        if progress.intact and progress.saved_step == progress.step:
            return saved_state_message(progress.saved_step, self.states.last_state)
        on_the_way = bool(self.settings.save_every or self.settings.save_every_epochs)
        return unsaved_steps_message(progress.saved_step, self.states.last_state, on_the_way)

    def close(self) -> None:
        """Release the LoRA's weights and the optimizer."""
        self.loras.close()
        self.states.close()

    def _resume_validation(self, path: Path, state: TrainingState) -> None:
        """Restore the validation points and the best LoRA if they were measured under the same validation key."""
        key, options = self.context.validation_key, self.settings.validation
        if not key or not state.validation:
            return
        if state.validation["of"] != key:
            self.observer.note(
                "The state was validated on other pictures or noise, so its validation losses are not carried over."
            )
            return
        self.progress.resume_validation(state.validation["points"])
        self.best.resume(path, state)
        if options is not None and options.keep_best:
            self.best.note_missing(state.step)

    def _write(self) -> None:
        if not self.context.world.is_first:
            self.states.read_saved_step()
            return
        path = self.context.folder.step_lora_path(self.progress.step)
        self._write_lora(path, self.loras.snapshot())
        self.states.write()
        self.observer.saved(path)

    def _write_lora(self, path: Path, lora: LoraModel) -> None:
        self.loras.write(path, lora)
        self.loras.remove_old()  # before the state, which may need the disk space
