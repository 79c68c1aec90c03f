"""From a MODEL, data and settings to a LoRA on disk: checks first, then the run, then its summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import comfyui_version
import torch
from comfy.model_management import InterruptProcessingException
from comfy.model_patcher import ModelPatcher

from ..compile.settings import CompileSettings
from ..memory.frozen import dequantised_notes
from ..models.attention import attention_function
from ..models.family import Family
from ..models.model_patches import trainable_model
from ..models.registry import family_of
from .base_lora import put_under
from .batch import strata_of
from .clip_vision import seen_by
from .data import TrainingData, check_something_is_learnt, shown_per_epoch
from .data_facts import data_facts
from .events import Observer, StepReport
from .fingerprint import weights_fingerprint
from .held_out import hold_out, validation_notes
from .loop import Trainer
from .lora_model import LoraModel
from .lora_start import StartLora, read_start
from .metadata import RunFacts, metadata_for
from .network_plan import choose_targets, network_notes, one_expert_notes
from .objective import check_range, objective_notes
from .optimizer_check import check_optimizer
from .parts import continued_from, made_with, parts_of
from .preservation import check_preservation
from .preview_files import FOLDER as PREVIEWS
from .preview_files import SHEET
from .run import RunFolder, TrainSettings, continued_lineage, find_finished, find_state, open_folder, other_state
from .saving import Describe
from .schedule import lr_factor
from .settings_notes import guidance_notes, memory_notes, saving_notes
from .state_fit import check_state
from .stopped import TrainingStopped
from .tensor_file import read_tensors
from .version import VERSION
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
    name = weights_fingerprint(model)
    lineage = continued_lineage(root, settings, settings.lineage(data.fingerprint, name))
    key = settings.key(lineage)
    if finished := find_finished(root, settings.output_name, key):
        observer.note("This run was finished before with the same data, model and settings; its files are returned.")
        result = read_finished(finished)
        if watchers and not result.summary.get("previews"):
            observer.note("It was trained without previews; change output_name or seed to train it again with them.")
        return result

    state = find_state(root, settings, lineage)
    if state is not None:
        check_state(state, settings.network, settings.optimizer, patcher.model, targets)
    folder = open_folder(root, settings, key, state)
    chosen = (compile_settings or CompileSettings()) if settings.compile == "auto" else None
    recorder = _Recorder(observer, (*data.notes, *checked.notes))
    if state is None and settings.resume == "latest" and (other := other_state(root, settings)):
        recorder.note(
            f"The states of {settings.output_name} were saved with other data or settings, so this run starts at step "
            f"0; choose {other} in resume to go on from one."
        )
    folder.check_writable()
    started = _now()
    with torch.enable_grad():
        facts = _facts(settings, family, patcher, data, started)
        parts = parts_of(state, lineage, made_with(facts, data.fingerprint, name))
        earlier = continued_from(parts)
        describe = _describer(replace(facts, continued_from=earlier))
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
                "ended": _now(),
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
                _write_summary(folder, summary, recorder)
    return TrainResult(lora, summary["loss"], folder.lora_path, summary)


@dataclass(frozen=True)
class CheckedRun:
    """What a run needs, found to fit together."""

    family: Family
    patcher: ModelPatcher
    data: TrainingData
    targets: list[str]
    notes: tuple[str, ...]
    start: StartLora | None = None
    validation: TrainingData | None = None


def check_run(model: ModelPatcher, data: TrainingData, settings: TrainSettings) -> CheckedRun:
    """Raises ValueError, in one sentence, for whatever would end the run later; loads no weights."""
    family = family_of(model)
    patcher, patch_notes = trainable_model(model)
    targets = choose_targets(family, patcher.model, settings.network)
    base_notes = put_under(patcher, settings.network, family)
    start, start_notes = read_start(settings.network, family, patcher.model, targets)
    lr_factor(settings.optimizer, settings.steps)
    optimizer_notes = check_optimizer(settings.optimizer, patcher.load_device, settings.network)
    attention_function(settings.memory.attention, patcher.load_device, patcher.model.get_dtype_inference())
    measured: TrainingData | None = None
    if settings.validation is not None:
        data, measured = hold_out(data, settings.validation)
        try:
            _check_data(family, patcher, measured)
        except ValueError as error:
            raise ValueError(f"validation: {error}") from error
        measured = _with_text_lengths(family, patcher, measured)
    _check_data(family, patcher, data)
    for size in sorted({sample.tokens // sample.grid[0] for sample in data.samples}):
        check_range(settings.objective, size, family.shift(patcher.model, size))
    strata = strata_of(settings, data.samples)
    notes = (
        *patch_notes,
        *check_preservation(settings.objective, data.samples),
        *optimizer_notes,
        *base_notes,
        *start_notes,
        *one_expert_notes(settings.network),
        *network_notes(settings.network, family, patcher.model, targets),
        *objective_notes(settings.objective, strata),
        *guidance_notes(family, patcher.model, settings.objective, data.samples),
        *saving_notes(settings, strata),
        *memory_notes(settings.memory),
        *dequantised_notes(patcher.model.diffusion_model, patcher.model.get_dtype_inference()),
    )
    notes += tuple(family.notes(patcher.model, [sample.facts() for sample in data.samples]))
    padded = _with_text_lengths(family, patcher, data)
    if settings.validation is not None and measured is not None:
        notes += tuple(validation_notes(padded, measured, settings.validation))
    return CheckedRun(family, patcher, padded, targets, notes, start, measured)


def _write_summary(folder: RunFolder, summary: dict[str, Any], observer: Observer) -> None:
    """Where the disk takes no more, what ended the run is told, not that its summary could not be saved too."""
    finished = summary["status"] == "finished"
    if not finished and not folder.path.exists():
        return
    try:
        folder.write_summary(summary)
    except OSError as error:
        if finished:
            raise TrainingStopped(error.strerror) from error
        observer.note(str(error.strerror))


def read_finished(folder: RunFolder) -> TrainResult:
    """The result of a finished run, from its folder."""
    summary = folder.read_summary()
    assert summary is not None
    lora = LoraModel(*read_tensors(folder.lora_path))
    return TrainResult(lora, summary["loss"], folder.lora_path, summary)


def _facts(
    settings: TrainSettings, family: Family, patcher: ModelPatcher, data: TrainingData, started: str
) -> RunFacts:
    """What is known of the run before its first step."""
    origin = getattr(patcher, "cached_patcher_init", None)
    source = origin[1][0] if origin and origin[1] and isinstance(origin[1][0], str) else ""
    _, height, width = data.samples[0].grid
    pixels = family.latents(patcher.model).pixels_per_token
    return RunFacts(
        output_name=settings.output_name,
        family=family.name,
        variant=family.variant(patcher.model),
        origin=family.origin(patcher.model),
        base_model=Path(source).name,
        steps=0,
        batch_size=settings.batch_size,
        gradient_accumulation=settings.gradient_accumulation,
        seed=settings.seed,
        network=settings.network.of_high_noise(),
        optimizer=settings.optimizer,
        objective=settings.objective,
        memory=settings.memory,
        resolution=f"{width * pixels}x{height * pixels}",
        samples=shown_per_epoch(data.samples),
        started=started,
        finished=started,
        final_loss=None,
        tessera_version=VERSION,
        comfyui_version=comfyui_version.__version__,
        torch_version=torch.__version__,
        data=data_facts(data),
        validation=settings.validation.facts() if settings.validation else None,
        saving={name: getattr(settings, name) for name in ("save_every", "save_every_epochs", "keep_last")},
        compile=settings.compile,
    )


def _describer(facts: RunFacts) -> Describe:
    """What a LoRA file of this run says of itself."""

    def describe(step: int, loss: float | None, lora: LoraModel) -> dict[str, str]:
        return metadata_for(replace(facts, steps=step, final_loss=loss, finished=_now()), lora)

    return describe


def _with_text_lengths(family: Family, patcher: ModelPatcher, data: TrainingData) -> TrainingData:
    """The data with the text lengths that captions take in this model's sequence."""
    samples = (replace(s, text_length=family.text_length(patcher.model, s.text_length)) for s in data.samples)
    return replace(data, samples=tuple(samples))


def _check_data(family: Family, patcher: ModelPatcher, data: TrainingData) -> None:
    """One sample is read, so that data of another family's CLIP or VAE ends here and not in the first step."""
    if not data.samples:
        raise ValueError("data holds no sample; connect Prepare Dataset with at least one picture.")
    check_something_is_learnt(sample.regularisation for sample in data.samples)
    for sample in data.samples:
        family.check(patcher.model, sample.facts())
    tensors = data.samples[0].load()
    channels = patcher.model.latent_format.latent_channels
    if tensors.latent.shape[0] != channels:
        raise ValueError(
            f"data has latents of {tensors.latent.shape[0]} channels and the model takes {channels}; prepare the data "
            "with the model's own VAE."
        )
    pooled, width = tensors.conditioning.get("pooled_output"), family.pooled_width(patcher.model)
    if pooled is not None and pooled.shape[-1] < width:
        raise ValueError(
            f"data has pooled text of width {pooled.shape[-1]} and the model takes {width}; prepare the data with the "
            "model's own text encoders."
        )
    seen, width = tensors.conditioning.get("clip_vision_output"), family.vision_width(patcher.model)
    if seen is not None and width and seen_by(seen).shape[-1] != width:
        raise ValueError(
            f"data has CLIP vision output of width {seen_by(seen).shape[-1]} and the model takes {width}; prepare the "
            "data with clip_vision_h.safetensors as the CLIP vision model."
        )
    wanted = family.text_width(patcher.model)
    if tensors.text.shape[-1] != wanted:
        raise ValueError(
            f"data has text of width {tensors.text.shape[-1]} and the model takes {wanted}; prepare the data with the "
            "model's own text encoders."
        )


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
