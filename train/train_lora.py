"""From a MODEL, data and settings to a LoRA on disk: checks first, then the run, then its summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher

from ..common.files import read_tensors
from ..compile.settings import CompileSettings
from ..data.samples import TrainingData
from ..lora.files.lora_model import LoraModel
from .checkpoint.history import continued_from, made_with, parts_of
from .checkpoint.metadata import describer, facts_of, now
from .checkpoint.run_folder import RunFolder
from .errors import TrainingStopped
from .observer import Observer, StepReport
from .preflight.checks import check_run
from .preflight.disk_space import check_room, room_for
from .preflight.run_start import begin, notes_of
from .preview.gallery import FOLDER as PREVIEWS
from .preview.gallery import SHEET
from .settings import TrainSettings
from .trainer import Trainer
from .validation_split import held_out_note
from .watcher import Watcher


@dataclass(frozen=True)
class TrainResult:
    """lora: fp32, kohya keys; loss: one value per step; path: the saved file; summary: finite numbers and text only;
    validation: the points of `validation.Validation`."""

    lora: LoraModel
    loss: list[float]
    path: Path
    summary: dict[str, Any]

    @property
    def sheet(self) -> Path | None:
        """The sheet of its previews, if it has one."""
        sheet = self.path.parent / PREVIEWS / SHEET
        return sheet if self.summary.get("previews") and sheet.is_file() else None

    @property
    def validation(self) -> list[dict[str, Any]]:
        return list(self.summary.get("validation", {}).get("points", ()))


class _Recorder:
    """Passes everything on, and keeps the notes and files for the summary."""

    def __init__(self, observer: Observer, notes: tuple[str, ...]):
        self._observer = observer
        self.notes: list[str] = []
        self.files: list[str] = []
        self.phase = observer.phase
        self.previewed = observer.previewed
        self.check_interrupted = observer.check_interrupted
        self.validated = observer.validated
        for text in notes:
            self.note(text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._observer.note(text)

    def step(self, report: StepReport) -> None:
        self._observer.step(report)

    def saved(self, path: Path) -> None:
        if path.name not in self.files:
            self.files.append(path.name)
        self._observer.saved(path)


def train_lora(
    model: ModelPatcher,
    data: TrainingData,
    settings: TrainSettings,
    root: Path,
    observer: Observer,
    compile_settings: CompileSettings | None = None,
    watchers: Sequence[Watcher] = (),
    workflow: Mapping[str, str] | None = None,
) -> TrainResult:
    """Trains a LoRA on `model`, which is left as it came. root: the folder that runs are kept in.

    compile_settings: how blocks are compiled where `settings.compile` is 'auto'; None takes inductor's default.
    watchers: what looks at the run between its steps. workflow: text files to lie beside the LoRA, by what follows its
    name. A finished run of the same key is returned from disk. Raises
    ValueError for bad input before anything is loaded, and TrainingStopped where a run cannot go on; whatever ends it,
    what was trained is saved first. Call it outside inference mode.
    """
    assert not torch.is_inference_mode_enabled()
    checked = check_run(model, data, settings)
    family, patcher, data, targets = checked.family, checked.patcher, checked.data, checked.targets
    observer.phase("Reading the model's fingerprint")
    begun = begin(model, checked, settings, root)
    key, lineage, state, folder = begun.key, begun.lineage, begun.state, begun.folder
    told = list(notes_of(begun, settings, root))
    if begun.finished:
        for note in told:
            observer.note(note)
        observer.note("This run was finished before with the same data, model and settings; its files are returned.")
        result = read_finished(folder)
        if watchers and not result.summary.get("previews"):
            observer.note("It was trained without previews; change output_name or seed to train it again with them.")
        return result

    chosen = (compile_settings or CompileSettings()) if settings.compile == "auto" else None
    recorder = _Recorder(observer, (*data.notes, *checked.notes, *told))
    folder.check_writable()
    check_room(folder, room_for(checked, settings, begun))
    started = now()
    with torch.enable_grad():
        facts = facts_of(settings, family, patcher, data, started)
        parts = parts_of(state, lineage, made_with(facts, data.fingerprint, begun.weights), begun.asked)
        earlier = continued_from(parts)
        if checked.validation is not None and settings.validation is not None and settings.validation.data is None:
            recorder.note(held_out_note(checked.validation, checked.whole, parts))
        describe = describer(replace(facts, continued_from=earlier))
        trainer = Trainer(
            *(patcher, family, data, targets, settings, chosen, folder, lineage, describe, recorder),
            validation=checked.validation,
        )
        trainer.watchers += watchers
        trainer.saver.beside, trainer.saver.parts = dict(workflow or {}), parts
        outcome = "failed"
        try:
            if state is not None:
                trainer.resume(state)
            elif checked.start is not None:
                for note in trainer.begin_from(checked.start):
                    recorder.note(note)
            checked = replace(checked, start=None)  # it may be as large as what is trained
            recorder.phase(trainer.doing())
            trainer.run()
            lora = trainer.save_final()
            outcome = "finished"
        except InterruptProcessingException:
            outcome = "cancelled"
            raise
        finally:
            summary: dict[str, Any] = {
                "status": outcome,
                "key": key,
                "output_name": settings.output_name,
                "folder": folder.path.name,
                "steps": settings.steps,
                "steps_done": trainer.progress.step,
                "started": started,
                "ended": now(),
                "loss": list(trainer.progress.loss),
                "notes": recorder.notes,
                "files": [name for name in recorder.files if (folder.path / name).exists()],
                "targets": len(targets),
                "parameters": sum(p.numel() for p in trainer.network.parameters()),
                "compile": chosen is not None,
                **({"continued_from": earlier} if earlier else {}),
            }
            try:
                summary |= trainer.facts()
                for watcher in trainer.watchers:
                    summary |= watcher.facts()
            finally:
                trainer.close()
                _write_summary(folder, summary, recorder, trainer.saver.left())
    return TrainResult(lora, summary["loss"], folder.lora_path, summary)


def _write_summary(folder: RunFolder, summary: dict[str, Any], observer: Observer, left: str) -> None:
    """Where the disk takes no more, what ended the run is told, not that its summary could not be saved too. left: what
    is kept of the run."""
    finished = summary["status"] == "finished"
    if not finished and not folder.path.exists():
        return
    try:
        folder.write_summary(summary)
    except OSError as error:
        if finished:
            raise TrainingStopped(f"{error.strerror} {left}") from error
        observer.note(str(error.strerror))


def read_finished(folder: RunFolder) -> TrainResult:
    """The result of a finished run, from its folder."""
    summary = folder.read_summary()
    assert summary is not None
    lora = LoraModel(*read_tensors(folder.lora_path))
    return TrainResult(lora, summary["loss"], folder.lora_path, summary)
