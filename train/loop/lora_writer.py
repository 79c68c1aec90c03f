"""Writer of a run's LoRA files."""

import logging
from pathlib import Path

from ...lora.files.formats import lora_file, save_lora
from ...lora.files.lora_model import LoraModel
from ..preflight.context import RunContext
from .learner import Learner
from .progress import Progress

log = logging.getLogger(__name__)


class LoraWriter:
    """Writer of a run's LoRA files: fp32, with kohya keys, metadata, and the companion files that belong to the first.

    Methods that write raise OSError if the disk is full or the folder is read-only.
    """

    def __init__(self, learner: Learner, context: RunContext, progress: Progress) -> None:
        self.context = context
        self.progress = progress
        self.folder = context.folder
        self._learner: Learner | None = learner
        self._companion_files = dict(context.companion_files)  # files not yet written

    def snapshot(self) -> LoraModel:
        """Copy the current LoRA to the host and add its metadata."""
        assert self._learner is not None
        lora = self._learner.snapshot()
        last_loss = self.progress.loss[-1] if self.progress.loss else None
        lora.metadata.update(self.context.describe(self.progress.step, last_loss, lora))
        return lora

    def write(self, path: Path, lora: LoraModel) -> None:
        """Write a LoRA and the companion files that are not yet written."""
        while self._companion_files:
            ending = next(iter(self._companion_files))
            self.folder.write_companion_file(ending, self._companion_files[ending])
            del self._companion_files[ending]
        save_lora(path, lora, "kohya", "fp32")

    def size(self) -> int:
        """Return the bytes of a LoRA file of the current step."""
        return lora_file(self.snapshot()).size()

    def remove_old(self) -> None:
        """Remove the LoRAs of earlier steps that `keep_last` no longer keeps."""
        if keep_last := self.context.settings.keep_last:
            self.folder.remove_old_loras(self.progress.step, keep_last)

    def write_copy(self, folder: Path, lora: LoraModel) -> Path | None:
        """Write the LoRA to another folder, under the name of the run's folder. Returns its path, None on failure."""
        path = folder / f"{self.folder.path.name}.safetensors"
        try:
            save_lora(path, lora, "kohya", "fp32")
        except OSError as error:
            log.warning("No copy of the LoRA could be saved either: %s", error.strerror)
            return None
        return path

    def close(self) -> None:
        """Release the LoRA's weights."""
        self._learner = None
