"""Saving of a run: LoRA and training state at intervals, at the end, and when an error or Cancel ends it."""

import json
import logging
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..common.files import write_atomically
from ..lora.files.formats import save_lora
from ..lora.files.lora_model import LoraModel
from .checkpoint.metadata import BEST, Best, read_best
from .checkpoint.run_folder import place_of
from .checkpoint.state import TrainingState, load_state, save_state, state_path
from .distributed.store import Topic
from .errors import saved_state_message, unsaved_steps_message
from .learner import Learner
from .objective.timestep_sampling import Strata
from .observer import Observer
from .placement.low_bit_policy import LowBitPolicy
from .preflight.context import RunContext

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


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


@dataclass
class Progress:
    """Progress of a run.

    step: optimizer steps done.
    batches: micro-batches done.
    saved_step: step of the last save, 0 without one.
    intact: False only while the optimizer updates the weights, when they belong to no step.
    loss: loss of each step.
    validation: points of `validation.Validation`.
    """

    step: int = 0
    batches: int = 0
    saved_step: int = 0
    intact: bool = True
    loss: list[float] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)


class Saver:
    """Writer of the files of one run, and reader of its states.

    environment: hardware and software that the last bits of a result may depend on.
    strata: samples of a step and of an epoch.
    writes: True on rank 0 only, which posts to the others which state it has written.
    low_bit: matmul precision of the run's layers; states store the decision.
    """

    def __init__(
        self,
        learner: Learner,
        context: RunContext,
        environment: dict[str, str],
        observer: Observer,
        strata: Strata,
        low_bit: LowBitPolicy,
    ):
        self.learner, self.context, self.settings, self.folder = learner, context, context.settings, context.folder
        self.environment, self.observer, self.strata, self.low_bit = environment, observer, strata, low_bit
        self.validation_key, self.world = context.validation_key, context.world
        self.writes = self.world.is_first
        self.progress = Progress()
        self.last_state = ""  # as the `resume` input names it
        self.resumed_from: Path | None = None  # state that `resume` names
        self.best: Best | None = None
        self._companion_files = dict(context.companion_files)  # files not yet written

    def state_name(self, step: int) -> str:
        """Name the state of this step as the `resume` input does."""
        return self._resume_name(state_path(self.folder.path, step))

    def _resume_name(self, state: Path) -> str:
        return (place_of(self.settings.output_name).parent / state.parent.name / state.name).as_posix()

    def resume(self, path: Path) -> None:
        """Restore a saved state; training continues as if it had not been interrupted.

        Raises ValueError if the file is damaged or is not a state.
        """
        state = load_state(path)
        notes = self.learner.load(state)
        progress = self.progress
        progress.step, progress.batches, progress.saved_step = state.step, state.batches, state.step
        progress.loss = list(state.loss)
        if self.settings.names_state:
            self.last_state, self.resumed_from = self.settings.resume, path
        else:
            self.last_state = self._resume_name(path)
        self._resume_validation(path, state)
        self.observer.note(f"Resumed at step {state.step}.")
        for note in notes:
            self.observer.note(note)
        if state.lineage != self.context.lineage:
            self.observer.note(
                "The state comes from a run with other data, model or settings; this run continues with the ones here."
            )
        for name, value in self.environment.items():
            if name in state.environment and state.environment[name] != value:
                self.observer.note(
                    f"The state was saved with {name} = {state.environment.get(name)} and continues with {value}, so "
                    "the result may differ by rounding from an uninterrupted run."
                )

    def snapshot(self) -> LoraModel:
        """Copy the current LoRA to the host and add its metadata."""
        lora = self.learner.snapshot()
        last = self.progress.loss[-1] if self.progress.loss else None
        lora.metadata.update(self.context.describe(self.progress.step, last, lora))
        return lora

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
        path, lora = self.folder.lora_path, self.snapshot()
        if not self.writes:
            return FinalLora(lora, True)
        try:
            self._write_lora(path, lora)
        except OSError as error:
            copy = None if spare_folder is None else self._save_copy(spare_folder, lora)
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
            self._write_state()
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
        if not self.writes:
            self._hear_of_save()
        if progress.intact and progress.saved_step == progress.step:
            return saved_state_message(progress.saved_step, self.last_state)
        on_the_way = bool(self.settings.save_every or self.settings.save_every_epochs)
        return unsaved_steps_message(progress.saved_step, self.last_state, on_the_way)

    def keep_best(self, loss: float) -> None:
        """Write the best LoRA if `loss` is lower than the loss of the one on disk. A failure to write is reported."""
        if not self.writes:
            return
        if self.best is not None and loss >= self.best.loss:
            return
        best = Best(self.folder.best_path.name, self.progress.step, loss, self.validation_key)
        try:
            lora = self.snapshot()
            lora.metadata[BEST] = json.dumps(best.plain())
            self._write_companion_files()
            save_lora(self.folder.best_path, lora, "kohya", "fp32")
        except OSError as error:
            self.observer.note(f"{error.strerror} Training continues without saving the best LoRA.")
            return
        self.best = best
        self.observer.saved(self.folder.best_path)

    def _resume_validation(self, path: Path, state: TrainingState) -> None:
        """Restore the validation points and the best LoRA if they were measured under the same validation key.

        Reports a best LoRA on disk that does not have the lowest loss of these points. This happens if another run
        continued from the same state and replaced it by a later one.
        """
        if not self.validation_key or not state.validation:
            return
        if state.validation["of"] != self.validation_key:
            self.observer.note(
                "The state was validated on other pictures or noise, so its validation losses are not carried over."
            )
            return
        self.progress.validation = list(state.validation["points"])
        if self.writes:
            self._resume_best(path, state)
        best, options = self.best, self.settings.validation
        least = min((p for p in self.progress.validation if p["step"]), key=lambda p: p["loss"], default=None)
        if options is None or not options.keep_best or least is None or (best and best.loss <= least["loss"]):
            return
        best_text = (
            f"the best saved one is that of step {best.step}" if best else f"the best counts from step {state.step} on"
        )
        self.observer.note(
            f"The LoRA with the lowest validation loss so far, {least['loss']:.4g} at step {least['step']}, is not "
            f"saved any more; {best_text}."
        )

    def _resume_best(self, path: Path, state: TrainingState) -> None:
        """Find the best LoRA in the state's folder; copy it if this run writes to another folder."""
        # The name alone is ambiguous: an output name may end in "-best" itself.
        candidates = ((best, read_best(best)) for best in sorted(path.parent.glob("*-best.safetensors")))
        matches = [
            (best, record)
            for best, record in candidates
            if record is not None and record.validation_key == self.validation_key
        ]
        if not matches:
            return
        best, record = min(matches, key=lambda pair: pair[1].loss)
        if best.parent != self.folder.path:
            if record.step > state.step:  # written by the other run after this state
                return
            try:
                write_atomically(self.folder.best_path, lambda temporary: _copy(best, temporary))
            except OSError as error:
                self.observer.note(f"{error.strerror} The best LoRA so far stays in '{best.parent.name}' only.")
                return
            record = replace(record, file=self.folder.best_path.name)
        self.best = record

    def _write(self) -> None:
        if not self.writes:
            self._hear_of_save()
            return
        path = self.folder.step_lora_path(self.progress.step)
        self._write_lora(path, self.snapshot())
        self._write_state()
        self.observer.saved(path)

    def _write_lora(self, path: Path, lora: LoraModel) -> None:
        self._write_companion_files()
        save_lora(path, lora, "kohya", "fp32")
        if self.settings.keep_last:  # before the state, which may need the disk space
            self.folder.remove_old_loras(self.progress.step, self.settings.keep_last)

    def _write_state(self) -> None:
        step = self.progress.step
        save_state(state_path(self.folder.path, step), self._state())
        self.progress.saved_step, self.last_state = step, self.state_name(step)
        if self.world.world_size > 1:
            with suppress(RuntimeError):  # the store may have ended with another process
                self.world.store.set(Topic.SAVED_STEP, step)
        self.folder.remove_old_states(step, self.resumed_from)

    def _hear_of_save(self) -> None:
        """Read which state rank 0 has posted as saved; nothing changes if the store has ended."""
        with suppress(RuntimeError):
            if (step := self.world.store.get(Topic.SAVED_STEP)) is not None:
                self.progress.saved_step, self.last_state = step, self.state_name(step)

    def _save_copy(self, folder: Path, lora: LoraModel) -> Path | None:
        """Write the LoRA to another folder, under the name of the run's folder. Returns its path, None on failure."""
        path = folder / f"{self.folder.path.name}.safetensors"
        try:
            save_lora(path, lora, "kohya", "fp32")
        except OSError as error:
            log.warning("No copy of the LoRA could be saved either: %s", error.strerror)
            return None
        return path

    def _write_companion_files(self) -> None:
        while self._companion_files:
            ending = next(iter(self._companion_files))
            self.folder.write_companion_file(ending, self._companion_files[ending])
            del self._companion_files[ending]

    def _state(self) -> TrainingState:
        progress = self.progress
        return TrainingState(
            step=progress.step,
            batches=progress.batches,
            loss=progress.loss,
            lineage=self.context.lineage,
            environment=self.environment,
            validation={"of": self.validation_key, "points": progress.validation} if self.validation_key else {},
            parts=list(self.context.parts),
            low_bit_matmul=self.low_bit.decision(),
            **self.learner.state(),
        )
