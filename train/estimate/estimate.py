"""Estimate of a run: everything up to the first step and two steps on the real model and data, and no file written."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import comfy.model_management
import torch

from ...common.core import end_of_node
from ...data.samples import Preparation, Sample, TrainingData, showings_by_key
from ...lora.warm_start import WarmStart
from ...memory.weights.frozen import unload
from ..blocks.graph_count import count_graphs
from ..config.environment import driver_memory, memory_peak
from ..distributed.world import SINGLE_PROCESS
from ..loop.trainer import Trainer
from ..objective.batch import strata_sizes
from ..optim.state_dict import pack_state
from ..placement import auto
from ..placement.auto import StepCost
from ..preflight.checks import check_run
from ..preflight.context import RunContext, make_context
from ..preflight.disk_space import free_space, remaining_saves, required_space
from ..preflight.run_start import find_run_start, run_start_notes
from ..report.errors import explain_error, first_error_kept, saved_state_message
from ..report.observer import Observer, SilentObserver
from ..runs.run_folder import STATES_KEPT
from ..train_lora import RunRequest
from .changes import Alternative, calculated_changes, largest_sample, sample_size

LEAST_STEPS = 2  # the first one compiles
MOST_STEPS = 8  # tried until one compiles nothing and no other memory plan follows it


@dataclass(frozen=True)
class Trial:
    """Measurements of the first steps of a run.

    seconds: of a step that compiled nothing; None if every step did.
    graphs: graphs that these steps compiled.
    compile_seconds: seconds that they took to compile.
    planned_graphs: graphs that the whole run compiles.
    memory: peak in MiB, see `memory_peak` and `driver_memory`.
    placement: swapped blocks, copies of blocks in a step, checkpointing.
    optimizer_bytes: the optimizer's state.
    lora_bytes: one LoRA file.
    state_bytes: one state file.
    """

    seconds: float | None
    graphs: int
    compile_seconds: float
    planned_graphs: int
    memory: Mapping[str, Any]
    placement: Mapping[str, Any]
    optimizer_bytes: int
    lora_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Estimate of a run.

    steps: optimizer steps that are left to train.
    trial: None if the first steps ran out of memory.
    step_seconds: mean over the sizes of the data, calculated from the trial's step of the largest; None if unknown.
    shapes: sizes and caption lengths of the data, each of which is compiled.
    parameters: trained parameters.
    lora_bytes: one LoRA file; without a trial the least that it takes.
    state_bytes: one state file; without a trial the least that it takes.
    loras: LoRA files at the end of the run.
    states: state files at the end of the run.
    free_disk: free bytes of the disk that they are written to; None if unknown.
    preparation: encoding of the data.
    changes: what other settings would take, calculated.
    notes: sentences for the user.
    """

    steps: int
    trial: Trial | None
    step_seconds: float | None
    shapes: int
    parameters: int
    lora_bytes: int
    state_bytes: int
    loras: int
    states: int
    free_disk: int | None
    preparation: Preparation
    changes: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def disk_bytes(self) -> int:
        """Bytes of all saves at the end of the run."""
        return self.loras * self.lora_bytes + self.states * self.state_bytes

    def plain(self) -> dict[str, Any]:
        """Return the estimate as JSON."""
        return asdict(self) | {"disk_bytes": self.disk_bytes}


class _Notes(SilentObserver):
    """Observer that forwards phases, notes and Cancel, and collects the notes."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.notes: list[str] = []

    def phase(self, text: str) -> None:
        self._observer.phase(text)

    def check_interrupted(self) -> None:
        self._observer.check_interrupted()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self._observer.note(text)


def estimate(request: RunRequest) -> Estimate:
    """Estimate a run by its first steps on its largest pictures. Writes nothing but torch's compile cache.

    Raises ValueError and TrainingStopped as `train_lora` does, except for a lack of memory.
    """
    assert not torch.is_inference_mode_enabled()
    settings = request.settings
    observer = _Notes(request.observer)
    checked = check_run(request.model, request.data, settings)
    observer.phase("Reading the model's fingerprint")
    run_start = find_run_start(request.model, checked, settings, request.root)
    context = make_context(checked, run_start, settings, request.compile_settings, {}, SINGLE_PROCESS)
    for note in (
        *checked.data.notes,
        *checked.notes,
        *run_start_notes(run_start, settings, request.root),
        *context.notes,
    ):
        observer.note(note)
    if run_start.finished:
        observer.note("This run already finished, so Train LoRA returns its LoRA at once.")
    largest = largest_sample(context)
    if any(sample_size(sample) > sample_size(largest) for sample in context.all_data.samples):
        observer.note(
            "Regularisation or validation pictures are larger than the measured ones, so they need more memory."
        )
    with torch.enable_grad():
        unload()  # as a run does: the models of earlier nodes take no memory from it
        end_of_node()
        observer.phase("Measuring one step")
        cost = _cost(context)
        trial, cost = _trial(context, observer, cost, checked.start)
        changes = calculated_changes(context, cost, trial is not None)
    need = required_space(checked, settings, run_start)
    strata = strata_sizes(settings.samples_per_step, context.data.samples)
    saves = 0 if run_start.finished else remaining_saves(settings, strata, run_start.step)
    seconds = None if trial is None else trial.seconds
    best = settings.validation is not None and settings.validation.keep_best
    return Estimate(
        steps=0 if run_start.finished else settings.steps - run_start.step,
        trial=trial,
        step_seconds=seconds and seconds * mean_size(context.data, largest),
        shapes=count_graphs(context.all_data, context.family, context.device_settings),
        parameters=need.lora // 4,
        lora_bytes=need.lora if trial is None else trial.lora_bytes,
        state_bytes=need.state if trial is None else trial.state_bytes,
        loras=_loras_at_end(saves, settings.keep_last) + (best and saves > 0),
        states=min(saves, STATES_KEPT),
        free_disk=free_space(run_start.folder.path),
        preparation=context.data.preparation,
        changes=changes,
        notes=tuple(observer.notes),
    )


def mean_size(data: TrainingData, sample: Sample) -> float:
    """Return the mean tokens of the samples that a run shows, as a multiple of those of one sample."""
    showings = showings_by_key(data.samples)
    sizes = {member.graph_key: sample_size(member) for member in data.samples}
    return sum(count * sizes[key] for key, count in showings.items()) / sum(showings.values()) / sample_size(sample)


def _loras_at_end(saves: int, keep_last: int) -> int:
    """Count the LoRAs that are on the disk after so many saves, the last of which is the final one."""
    intermediate = max(0, saves - 1)
    return min(saves, 1) + (min(intermediate, keep_last) if keep_last else intermediate)


def _cost(context: RunContext) -> StepCost:
    return auto.measure(
        context.patcher,
        context.family,
        context.all_data,
        context.targets,
        context.device_settings,
        context.compile_settings,
    )


def _largest_only(context: RunContext) -> RunContext:
    """Return the context of the same run on its largest samples, which need the most memory and one graph."""
    key = largest_sample(context).graph_key
    samples = tuple(sample for sample in context.data.samples if sample.graph_key == key)
    settings = replace(context.settings, steps=max(context.settings.steps, LEAST_STEPS))
    return replace(context, data=replace(context.data, samples=samples), validation=None, settings=settings)


def _trial(
    context: RunContext, observer: Observer, cost: StepCost, start: WarmStart | None
) -> tuple[Trial | None, StepCost]:
    """Take the first steps of a run and measure them. Returns None and the given cost if they run out of memory."""
    trainer: Trainer | None = None
    try:
        trainer = Trainer(_largest_only(context), observer)
        if start is not None:
            trainer.apply_warm_start(start)
        observer.phase(trainer.placed.execution.runner.progress_text())
        _take_steps(trainer, observer)
        automatic = trainer.placed.memory.automatic
        return _measurements(trainer, context), cost if automatic is None else automatic.measured
    except Exception as error:
        if not _is_out_of_memory(error):
            explained = None
            if trainer is not None:
                planned_graphs = trainer.placed.execution.runner.planned_graphs
                explained = explain_error(error, trainer.progress.step, saved_state_message(0, ""), planned_graphs)
            if explained is None:
                raise
            raise explained from error
    finally:
        if trainer is not None:
            with first_error_kept():
                trainer.close()
            del trainer
    comfy.model_management.soft_empty_cache()
    return None, cost


def _take_steps(trainer: Trainer, observer: Observer) -> None:
    """Take steps until one is timed, at least two."""
    step = trainer.train_step
    step.batches.order.start(0, 0, observer.check_interrupted)
    limit = min(trainer.settings.steps, MOST_STEPS)
    step.sync.begin(limit)
    trainer.choose_low_bit()
    while trainer.progress.step < LEAST_STEPS or (step.clock.pace() is None and trainer.progress.step < limit):
        observer.check_interrupted()
        step.run()
        trainer.note_memory_problems()


def _measurements(trainer: Trainer, context: RunContext) -> Trial:
    device, runner = trainer.device, trainer.placed.execution.runner
    memory = {**memory_peak(device), **driver_memory(device)}  # before the copies of the LoRA and its state
    counts = runner.report.counts()
    shapes = count_graphs(context.all_data, context.family, context.device_settings)
    facts = trainer.summary()
    names = ("blocks_swapped", "block_copies_per_step", "checkpointing", "activations_offloaded_mib")
    tensors, _ = pack_state(trainer.learner.state()["optimizer"])
    return Trial(
        seconds=trainer.train_step.clock.pace(),
        graphs=counts.graphs,
        compile_seconds=counts.seconds,
        planned_graphs=runner.planned_graphs // trainer.placed.execution.graphs * shapes,
        memory=memory,
        placement={name: facts[name] for name in names}
        | {"blocks": len(list(trainer.placed.weights.transformer.blocks()))},
        optimizer_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        lora_bytes=trainer.saver.loras.size(),
        state_bytes=trainer.saver.states.size(),
    )


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or the one that caused it, is a lack of memory."""
    while error is not None:
        with suppress(Exception):
            if comfy.model_management.is_oom(error):
                return True
        error = error.__cause__
    return False
