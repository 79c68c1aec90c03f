"""Best LoRA of a run: the one with the lowest validation loss so far, in a file of its own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from ...common.files import write_atomically
from ..checkpoint.metadata import BEST, Best, read_best
from ..checkpoint.state import TrainingState
from ..preflight.context import RunContext
from ..report.observer import Observer
from .lora_writer import LoraWriter
from .progress import Progress


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


class BestLora:
    """File of the LoRA with the lowest validation loss so far, and its record. Rank 0 alone writes it.

    record: what the file holds; None without one.
    """

    def __init__(self, writer: LoraWriter, context: RunContext, progress: Progress, observer: Observer) -> None:
        self.writer = writer
        self.progress = progress
        self.observer = observer
        self.folder, self.validation_key = context.folder, context.validation_key
        self.is_writing = context.world.is_first
        self.record: Best | None = None

    def write_if_better(self, loss: float) -> None:
        """Write the LoRA if `loss` is lower than the loss of the one on disk. A failure to write is reported."""
        if not self.is_writing or (self.record is not None and loss >= self.record.loss):
            return
        record = Best(self.folder.best_path.name, self.progress.step, loss, self.validation_key)
        try:
            lora = self.writer.snapshot()
            lora.metadata[BEST] = json.dumps(record.plain())
            self.writer.write(self.folder.best_path, lora)
        except OSError as error:
            self.observer.note(f"{error.strerror} Training continues without saving the best LoRA.")
            return
        self.record = record
        self.observer.saved(self.folder.best_path)

    def resume(self, path: Path, state: TrainingState) -> None:
        """Find the best LoRA in the folder of a state; copy it if this run writes to another folder."""
        if not self.is_writing:
            return
        # The name alone is ambiguous: an output name may end in "-best" itself.
        candidates = ((file, read_best(file)) for file in sorted(path.parent.glob("*-best.safetensors")))
        matches = [
            (file, record)
            for file, record in candidates
            if record is not None and record.validation_key == self.validation_key
        ]
        if not matches:
            return
        file, record = min(matches, key=lambda pair: pair[1].loss)
        if file.parent != self.folder.path:
            if record.step > state.step:  # written by the other run after this state
                return
            try:
                write_atomically(self.folder.best_path, lambda temporary: _copy(file, temporary))
            except OSError as error:
                self.observer.note(f"{error.strerror} The best LoRA so far stays in '{file.parent.name}' only.")
                return
            record = replace(record, file=self.folder.best_path.name)
        self.record = record

    def note_missing(self, state_step: int) -> None:
        """Report that the LoRA with the lowest loss so far is not saved any more, if so.

        This happens if another run continued from the same state and replaced it by a later one.
        """
        points = [point for point in self.progress.validation if point["step"]]
        lowest = min(points, key=lambda point: point["loss"], default=None)
        if lowest is None or (self.record is not None and self.record.loss <= lowest["loss"]):
            return
        best_text = f"the best counts from step {state_step} on"
        if self.record is not None:
            best_text = f"the best saved one is that of step {self.record.step}"
        self.observer.note(
            f"The LoRA with the lowest validation loss so far, {lowest['loss']:.4g} at step {lowest['step']}, is not "
            f"saved any more; {best_text}."
        )
