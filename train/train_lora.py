"""Entry point of training: check MODEL, data and settings, train, and write the LoRA and a summary."""

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher

from ..common.core import features, loaded_from
from ..common.files import MACHINE, read_tensors
from ..compile.settings import CompileSettings
from ..data.samples import TrainingData
from ..lora.files.lora_model import LoraModel
from .certificate.watcher import checking_watchers
from .checkpoint.metadata import utc_now
from .config.settings import TrainSettings
from .distributed.node import check_shard
from .distributed.ranks import check_alike, rank_facts
from .distributed.world import SINGLE_PROCESS, World
from .loop.progress import Progress
from .loop.trainer import Trainer
from .loop.watcher import Watcher
from .preflight.checks import CheckedRun, check_run
from .preflight.claim import claimed_by_one
from .preflight.context import RunContext, make_context
from .preflight.disk_space import check_disk_space, required_space
from .preflight.run_start import RunStart, find_run_start, run_start_notes
from .preview.gallery import FOLDER as PREVIEWS
from .preview.gallery import SHEET
from .report.errors import first_error_kept, stopped_message
from .report.observer import PAUSE, STOP, Observer, QuietObserver, StepReport
from .runs.run_folder import RunFolder
from .runs.run_names import PICTURE_SHEET
from .runs.run_record import RunRecord
from .watch.picture_losses import PictureLosses
from .watch.previewer import Previewer
from .watch.validation import Validation
from .watch.verdicts import is_report

STOPPED = "stopped"  # status of a run that the user ended before its last step, to keep what was trained
PAUSED = "paused"  # status of a run that ended before its last step, to be continued


@dataclass(frozen=True)
class TrainResult:
    """Result of a run that was finished, or stopped to be kept.

    lora: the LoRA, fp32, with kohya keys.
    loss: loss of each step.
    path: the saved file.
    summary: contents of summary.json; finite numbers and text only.
    copy: path of the LoRA if the disk of `path` was full; None without such a copy.
    """

    lora: LoraModel
    loss: list[float]
    path: Path
    summary: dict[str, Any]
    copy: Path | None = None

    @property
    def saved(self) -> bool:
        """True if the LoRA is at `path`."""
        return self.summary["status"] in ("finished", STOPPED, PAUSED)

    @property
    def stopped(self) -> bool:
        """True if the user stopped the run before its last step; it continues when queued again."""
        return bool(self.summary["status"] == STOPPED)

    @property
    def paused(self) -> bool:
        """True if the run was paused before its last step; it continues when queued again."""
        return bool(self.summary["status"] == PAUSED)

    @property
    def sheet(self) -> Path | None:
        """Path of the contact sheet of the previews; None without previews."""
        sheet = self.path.parent / PREVIEWS / SHEET
        return sheet if self.summary.get("previews") and sheet.is_file() else None

    @property
    def pictures(self) -> dict[str, Any] | None:
        """Ranking of the losses by picture, see `watch.verdicts.judge`; None without."""
        report = self.summary.get("loss_by_picture")
        return report if is_report(report) else None

    @property
    def picture_sheet(self) -> Path | None:
        """Path of the sheet of losses by picture; None without."""
        sheet = self.path.parent / PICTURE_SHEET
        return sheet if self.pictures is not None and sheet.is_file() else None

    @property
    def validation(self) -> list[dict[str, Any]]:
        """Points of `validation.Validation`; empty without validation."""
        return list(self.summary.get("validation", {}).get("points", ()))


@dataclass(frozen=True)
class RunRequest:
    """A run as it is asked for.

    model: the MODEL to train on; it stays unchanged.
    data: the samples, held-out ones included.
    settings: all settings.
    root: folder of all runs.
    observer: notes, progress and files are reported to it, and it carries the user's requests.
    compile_settings: compile settings if `settings.compile` is 'auto'; None takes inductor's defaults.
    watchers: called between the steps, such as previews.
    companion_files: texts to write next to the LoRA, by the ending that follows its name.
    spare_folder: folder for the finished LoRA if the run's own folder cannot take it.
    queued: entries of run.json about the prompt.
    elsewhere: trains a checked, unfinished run in other processes; if it returns None, the run trains here.
    """

    model: ModelPatcher
    data: TrainingData
    settings: TrainSettings
    root: Path
    observer: Observer
    compile_settings: CompileSettings | None = None
    watchers: Sequence[Watcher] = ()
    companion_files: Mapping[str, str] = field(default_factory=dict)
    spare_folder: Path | None = None
    queued: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Callable[[RunStart], TrainResult | None] | None = None


class _Recorder:
    """Observer that forwards every call and records the run: notes and files for the summary, all events in its record.

    cancelled: message if the run is cancelled now.
    """

    def __init__(self, observer: Observer, record: RunRecord, folder: Path, notes: tuple[str, ...]):
        self._observer = observer
        self._record = record
        self._folder = folder
        self._step = 0
        self.notes: list[str] = []
        self.files: list[str] = []
        self.cancelled = stopped_message(0, 0, "", "")
        self.began = observer.began
        self.ended = observer.ended
        self.phase = observer.phase
        self.take_requests, self.check_interrupted = observer.take_requests, observer.check_interrupted
        for text in notes:
            self.note(text)

    def begin(self, progress: Progress) -> None:
        """Begin the record's curve at the first step to train."""
        self._step = progress.step
        self._record.begin(progress.step, progress.loss, progress.validation)

    def cancel(self, message: str) -> None:
        """Set the message of a run that is cancelled."""
        self.cancelled = message

    def end(self, status: str, text: str = "") -> None:
        """Record and report the end of the run. `status` is as in the summary."""
        self._record.end(status, self._step, text)
        self._observer.ended(status, text)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Record and report the error that ends the run, and raise it."""
        try:
            yield
        except InterruptProcessingException:
            self.end("cancelled", self.cancelled)
            raise
        except BaseException as error:
            self.end("failed", str(error) or type(error).__name__)
            raise

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._record.add("note", text=text)
            self._observer.note(text)

    def step(self, report: StepReport) -> None:
        self._step = report.step
        self._record.add("step", step=report.step, loss=report.loss, rate=report.learning_rate)
        self._observer.step(report)

    def saved(self, path: Path) -> None:
        name = path.relative_to(self._folder).as_posix()
        if name not in self.files:
            self.files.append(name)
        self._record.add("saved", step=self._step, file=name)
        self._observer.saved(path)

    def previewed(self, sheet: Path, step: int) -> None:
        self._record.add("preview", step=step)
        self._observer.previewed(sheet, step)

    def validated(self, step: int, loss: float) -> None:
        self._record.add("validation", step=step, loss=loss)
        self._observer.validated(step, loss)


def train_lora(request: RunRequest, world: World = SINGLE_PROCESS) -> TrainResult:
    """Train a LoRA. A finished run of the same key is returned from disk.

    world: the ranks that train together, each of which calls this; only rank 0 writes and reports.

    Raises ValueError for bad input, before anything is loaded. Raises TrainingStopped if the run cannot continue.
    Whatever ends the run, progress since the last save is saved first.
    """
    # Tensors made in inference mode cannot be saved for backward.
    assert not torch.is_inference_mode_enabled()
    world.begin_run(request.observer.check_interrupted)
    if not world.is_first:
        request = replace(request, observer=QuietObserver(request.observer))
    with world.aborting():
        return _train(request, world)


def _train(request: RunRequest, world: World) -> TrainResult:
    model = request.model
    settings = request.settings
    observer = request.observer
    checked = check_run(model, request.data, settings)
    world.shard(settings.batch_size, settings.gradient_accumulation)
    check_shard(world, model.load_device, settings.memory)
    observer.phase("Reading the model's fingerprint")
    run_start = find_run_start(model, checked, settings, request.root)
    state_name = "finished" if run_start.finished else run_start.state.name if run_start.state else ""
    check_alike(
        world,
        "facts",
        rank_facts(run_start.weights, checked.data.fingerprint, run_start.key, state_name, settings.memory.shard),
    )
    folder, start_notes = run_start.folder, tuple(run_start_notes(run_start, settings, request.root))
    if run_start.finished:
        for note in start_notes:
            observer.note(note)
        observer.note("This run already finished with the same data, model and settings, so its files are returned.")
        result = read_finished(folder)
        if request.watchers and not result.summary.get("previews"):
            observer.note("It was trained without previews; to train it again with them, change output_name or seed.")
        return result

    if world.is_first:
        check_disk_space(folder, required_space(checked, settings, run_start))
    if request.elsewhere is not None and (external_result := request.elsewhere(run_start)) is not None:
        return external_result
    context = make_context(checked, run_start, settings, request.compile_settings, request.companion_files, world)
    name = world.broadcast("folder", folder.create().path.name if world.is_first else "")
    folder = RunFolder(folder.path.with_name(name), folder.name)
    context, run_start = replace(context, folder=folder), replace(run_start, folder=folder)
    with claimed_by_one(folder, observer) if world.is_first else nullcontext():
        return _run(request, context, checked, run_start, start_notes)


def _run(
    request: RunRequest,
    context: RunContext,
    checked: CheckedRun,
    run_start: RunStart,
    start_notes: Sequence[str],
) -> TrainResult:
    """Train a checked run into its folder."""
    settings = context.settings
    world = context.world
    folder = run_start.folder
    state = run_start.state
    record = RunRecord(
        folder.path, {**run_facts(run_start, context, request.watchers), **request.queued}, world.is_first
    )
    notes = (*checked.data.notes, *checked.notes, *start_notes, *context.notes)
    recorder = _Recorder(request.observer, record, folder.path, notes)
    if world.is_first:
        with suppress(OSError):  # the saver writes it with the first LoRA at the latest
            for ending, text in context.companion_files.items():
                folder.write_companion_file(ending, text)
    watchers = list(request.watchers)
    if context.validation is not None and settings.validation is not None:
        if settings.validation.loss_by_picture:
            batch = context.device_settings.batch_size
            watchers = [PictureLosses(settings.validation, context.data, context.validation, batch), *watchers]
        watchers = [Validation(settings.validation, context.validation), *watchers]
    watchers = [*checking_watchers(context, run_start.weights, state), *watchers]
    with recorder.errors(), torch.enable_grad():
        recorder.began(folder.path)
        trainer = Trainer(context, recorder, watchers)
        outcome, ended = "failed", ""
        try:
            if state is not None:
                trainer.resume(state)
            elif checked.start is not None:
                for note in trainer.apply_warm_start(checked.start):
                    recorder.note(note)
            recorder.begin(trainer.progress)
            checked = replace(checked, start=None)  # free the warm start's tensors: they can be as large as the LoRA
            recorder.phase(trainer.placed.execution.runner.progress_text())
            ending = trainer.run()
            final = trainer.save_final(request.spare_folder)
            world.broadcast("saved", final.saved)  # the next node of the graph may read the file
            outcome = "unsaved"
            if final.saved:
                outcome = {"": "finished", STOP: STOPPED, PAUSE: PAUSED}[ending]
                if ending == STOP:
                    recorder.note(ended := stop_message(trainer, settings))
                elif ending == PAUSE:
                    ended = f"Paused at step {trainer.progress.step} and saved."
        except InterruptProcessingException:
            outcome = "cancelled"
            recorder.cancel(stop_message(trainer, settings))
            raise
        finally:
            summary: dict[str, Any] = {
                "status": outcome,
                "key": run_start.key,
                "output_name": settings.output_name,
                "folder": folder.path.name,
                "steps": settings.steps,
                "steps_done": trainer.progress.step,
                "started": context.started,
                "ended": utc_now(),
                "loss": list(trainer.progress.loss),
                "notes": recorder.notes,
                "files": [name for name in recorder.files if (folder.path / name).exists()],
                "targets": len(context.targets),
                "parameters": sum(p.numel() for p in trainer.network.parameters()),
                "compile": context.compile_settings is not None,
                "comfyui": features(),
                **({"continued_from": context.continued_from} if context.continued_from else {}),
            }
            # Facts come before close, which drops the model; the summary and close run even if facts raise.
            try:
                with first_error_kept():
                    summary |= trainer.summary()
                    for watcher in trainer.watchers if world.is_first else ():
                        summary |= watcher.summary(trainer.view())
            finally:
                try:
                    if world.is_first:
                        _write_summary(folder, summary, recorder)
                finally:
                    with first_error_kept():  # on a device that failed, close fails too
                        trainer.close()
    recorder.end(outcome, ended)
    return TrainResult(final.lora, summary["loss"], folder.lora_path, summary, final.copy)


def stop_message(trainer: Trainer, settings: TrainSettings) -> str:
    """Describe the step at which the user stopped the run, and how to continue."""
    progress = trainer.progress
    return stopped_message(progress.step, progress.saved_step, trainer.saver.states.last_state, settings.resume)


def run_facts(run_start: RunStart, context: RunContext, watchers: Sequence[Watcher]) -> dict[str, Any]:
    """Return the entries of run.json for a run at its start."""
    settings, patcher = context.settings, context.patcher
    return {
        "key": run_start.key,
        "output_name": settings.output_name,
        "model": Path(loaded_from(patcher)).name or context.family.variant(patcher.model),
        "steps": settings.steps,
        "started": context.started,
        "can_go_on": settings.can_go_on,
        "can_sample": any(isinstance(watcher, Previewer) for watcher in watchers),
        "machine": MACHINE,
        "host": platform.node(),
        "process": os.getpid(),
    }


def _write_summary(folder: RunFolder, summary: dict[str, Any], observer: Observer) -> None:
    """Write summary.json. A failure is a note: it hides neither the LoRA nor the error that ended the run."""
    if summary["status"] != "finished" and not folder.path.exists():
        return
    try:
        folder.write_summary(summary)
    except OSError as error:
        observer.note(str(error.strerror))


def read_finished(folder: RunFolder) -> TrainResult:
    """Read the result of a finished run from its folder."""
    summary = folder.read_summary()
    assert summary is not None
    lora = LoraModel.from_file(*read_tensors(folder.lora_path))
    return TrainResult(lora, summary["loss"], folder.lora_path, summary)
