"""The training loop."""

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import comfy.model_management
import torch
from torch import Tensor

from ..compile.region import cannot_compile
from ..data.loader import SampleReader, SampleRequest, batch_order, choose_variant
from ..lora.files.lora_model import LoraModel
from ..lora.warm_start import WarmStart
from ..memory.host.sysmem_fallback import SysmemMonitor
from ..memory.weights.frozen import unload
from . import errors
from .batch import Batch, make_batch, strata_of
from .learner import Learner
from .objective.loss import training_loss
from .objective.preservation import preservation_loss, with_class_caption
from .observer import Observer, StepReport
from .placement import auto
from .placement.environment import forget_memory_peak, machine_facts, memory_peak
from .placement.placed_model import PlacedModel
from .preflight.context import RunContext
from .saver import Progress, Saver

log = logging.getLogger(__name__)

MicroBatch = list[SampleRequest]
T = TypeVar("T")


class Watcher(Protocol):
    """Sees a run between its steps, as previews and validation do; `trainer.progress.step` steps are done."""

    def between_steps(self, trainer: "Trainer") -> None:
        """Look at the run where it starts or goes on, and after each step, when what is due has been saved.

        The last save follows the last call. It may take the weights off the device: the next step takes them again.
        It leaves the LoRA, the optimizer, the gradients and every random state as they were. What it raises ends the
        run.
        """
        ...

    def facts(self, trainer: "Trainer") -> dict[str, Any]:
        """Entries for the run's summary: finite numbers and text only."""
        ...


class Trainer:
    """One run over one MODEL. `run` trains from where it stands to the last step, whatever ends it is saved first."""

    def __init__(self, context: RunContext, observer: Observer, watchers: Sequence[Watcher] = ()):
        self.patcher, self.family, self.data = context.patcher, context.family, context.data
        self.settings, self.observer, self.watchers = context.settings, observer, list(watchers)
        self.seconds: deque[float] = deque(maxlen=50)
        self.preserved: deque[Tensor] = deque(maxlen=50)  # preservation's part of the loss
        self.strata = strata_of(self.settings, self.data.samples)

        observer.phase("Loading the model")
        self.device = self.patcher.load_device
        unload()  # before, as the models of earlier nodes are no part of this run's peak
        forget_memory_peak(self.device)
        self.sysmem = SysmemMonitor(self.device)
        self.copies = 0  # of swapped blocks, in the last step
        placed: PlacedModel | None = None
        try:
            placed = PlacedModel(context, observer)
            options, steps = self.settings.optimizer, self.settings.steps
            learner = Learner(placed.network, options, steps, placed.dtype, self.device.type)
        except BaseException as error:
            if placed is not None:
                placed.forget()
            if not comfy.model_management.is_oom(error):
                raise
            raise errors.out_of_memory_while_loading() from error
        self.placed, self.learner, self.network = placed, learner, placed.network
        environment = machine_facts(self.device, context.compile_settings)
        self.saver = Saver(learner, context, environment, observer, self.strata)
        self.reader = SampleReader(self.data.samples)
        if placed.runner.not_compiled:
            self.train_eager(placed.runner.not_compiled)
        placed.tell_how_memory_is_used()

    @property
    def progress(self) -> Progress:
        return self.saver.progress

    def resume(self, path: Path) -> None:
        """Goes on from a saved state, as if the run had never stopped."""
        self.saver.resume(path)

    def begin_from(self, start: WarmStart) -> list[str]:
        """Takes the weights of another LoRA for the start; what of it is lost, a sentence each."""
        linears = self.placed.transformer.linears()
        return self.learner.begin_from(start, lambda name: linears[name].read_on_device().full())

    def save_final(self) -> LoraModel:
        """Writes the LoRA under its own name, and the whole state. Raises TrainingStopped where it cannot."""
        return self.saver.save_final()

    # The recipe.

    def run(self) -> None:
        settings, progress = self.settings, self.progress
        order = batch_order(self.data.samples, settings.batch_size, settings.seed)
        batches = islice(order, progress.batches, None)
        upcoming = self.draw(batches, progress.step)
        try:
            self.between_steps()
            while progress.step < settings.steps:
                self.observer.check_interrupted()
                started = time.perf_counter()
                compiled_before = self.placed.runner.report.counts()
                drawn, upcoming = upcoming, self.draw(batches, progress.step + 1)
                self.reader.prefetch(chain(*drawn, *upcoming))
                learning_rate = self.learner.learning_rate
                mean_loss = self.finite(self.forward_backward(drawn))
                self.optimizer_step()
                progress.batches += len(drawn)
                progress.step += 1
                progress.loss.append(mean_loss)
                if self.placed.runner.report.counts() == compiled_before:
                    self.seconds.append(time.perf_counter() - started)
                self.observer.step(self.report(mean_loss, learning_rate))
                for sentence in (self.sysmem.message(), self.placed.told()):
                    if sentence is not None:
                        self.observer.note(sentence)
                if self.saver.is_due():
                    self.saver.save()
                self.between_steps()
        except BaseException as error:
            self.saver.save_what_is_there()
            left = self.saver.left()
            if (told := errors.explained(error, progress.step, left, self.placed.runner.planned_graphs)) is None:
                raise
            raise told from error

    def between_steps(self) -> None:
        for watcher in self.watchers:
            watcher.between_steps(self)

    def draw(self, batches: Iterator[tuple[int, ...]], step: int) -> list[MicroBatch]:
        """The micro-batches of one step, each sample in the form that it is shown in."""
        drawn = [next(batches) for _ in range(self.settings.gradient_accumulation)]
        samples, seed = self.data.samples, self.settings.seed

        def shown(index: int, micro: int, place: int) -> SampleRequest:
            choice = choose_variant(samples[index], seed, (step, micro), place)
            return index, with_class_caption(choice, samples[index], self.settings.objective)

        return [
            [shown(index, micro, place) for place, index in enumerate(indices)] for micro, indices in enumerate(drawn)
        ]

    def forward_backward(self, drawn: list[MicroBatch]) -> Tensor:
        """The mean loss over the micro-batches, on the device, which may not have got to it yet; its gradients are left
        on the LoRA's masters."""
        return self.attempt(lambda: self._forward_backward(drawn))

    def attempt(self, compute: Callable[[], T]) -> T:
        """What `compute` gives. Where memory does not suffice for the plan, or compiling does not work, it is called
        again with less, or eager."""
        try:
            return compute()
        except Exception as error:
            smaller = comfy.model_management.is_oom(error) and self.placed.step_down(self.progress.step)
            cause = cannot_compile(error) if self.placed.runner.planned_graphs and not smaller else None
            if cause is None and not smaller:
                raise
            # As text: whoever keeps the record would keep the error, and the first try's activations by it.
            log.warning("A step failed and is tried again\n%s", "".join(traceback.format_exception(error)))
        # Outside the handler, which holds the first try's activations. The draws depend on the step only.
        if cause is None:
            self.learner.zero_grad()
            self.placed.build_again(self.progress.step)
            return self.attempt(compute)
        self.placed.runner.let_go()
        self.train_eager(cause)
        comfy.model_management.soft_empty_cache()
        return compute()

    def train_eager(self, cause: str) -> None:
        """From here on without torch.compile, which is said once."""
        self.observer.note(f"torch.compile does not work on this machine, so training runs eager: {cause}")
        self.placed.runner.fall_back_to_eager()
        self.saver.environment = machine_facts(self.device, None)

    def _forward_backward(self, drawn: list[MicroBatch]) -> Tensor:
        self.placed.ensure()
        copies = self.placed.copies()
        self.learner.zero_grad()
        total = torch.zeros((), device=self.device)
        for micro, shown in enumerate(drawn):
            samples = [(self.data.samples[one[0]], self.reader.read(one)) for one in shown]
            draw = (self.progress.step, micro)
            with torch.no_grad():
                options, seed = self.settings.objective, self.settings.seed
                batch = make_batch(self.patcher, self.family, samples, options, self.device, seed, draw, self.strata)
            for loss in self.losses(batch, draw):
                with self.placed.runner.watch_backward():
                    self.learner.backward(loss / len(drawn))
                total += loss.detach() / len(drawn)
        auto.make_room_to_step(self.learner.optimizer, self.settings.optimizer.spec, self.network.parameters())
        self.copies = self.placed.copies() - copies
        return total

    def losses(self, batch: Batch, draw: tuple[int, int]) -> Iterator[Tensor]:
        """The terms of a batch's loss. Each is to go backward before the next is asked for, so that the activations of
        one pass are held at a time."""
        kept = batch.kept
        without = None if kept is None else self.placed.velocity_without(kept.inputs)
        yield self.loss(batch, draw)
        if kept is not None and without is not None:
            velocity = self.placed.velocity(kept.inputs, (*draw, "class"))
            loss = self.settings.objective.preservation_weight * preservation_loss(velocity, without, kept)
            self.preserved.append(loss.detach())
            yield loss

    def loss(self, batch: Batch, draw: tuple[int, int]) -> Tensor:
        velocity = self.placed.velocity(batch.inputs, draw)
        losses = training_loss(self.settings.objective, velocity, batch.target, batch.sigma, batch.weights)
        return (losses if batch.loss_weights is None else losses * batch.loss_weights).mean()

    def finite(self, total: Tensor) -> float:
        """The loss as a number, with the gradients clipped. Raises CannotGoOn where it or they are not finite,
        before anything is moved by them. Nothing else in a step waits for the device, which is idle then until the
        optimizer is queued: so both numbers are read at once."""
        loss, norm = torch.stack((total, self.learner.clip())).tolist()
        for what, is_finite in (("loss", math.isfinite(loss)), ("gradient", self.learner.may_step(norm))):
            if not is_finite:
                raise errors.not_finite(what, self.progress.step)
        return loss

    def optimizer_step(self) -> None:
        self.progress.whole = False
        self.learner.step()
        self.progress.whole = True

    def close(self) -> None:
        """Gives all memory back."""
        self.learner.zero_grad()
        self.reader.close()
        self.placed.close()
        del self.placed, self.network, self.learner, self.saver.learner
        comfy.model_management.soft_empty_cache()

    # What is told.

    def doing(self) -> str:
        """What the next step does, for a progress display."""
        runner = self.placed.runner
        compiles = runner.planned_graphs and not runner.report.counts().graphs
        return "Training; the first step compiles and takes longer" if compiles else "Training"

    def report(self, loss: float, learning_rate: float) -> StepReport:
        pace = median(self.seconds) if self.seconds else None
        left = None if pace is None else pace * (self.settings.steps - self.progress.step)
        return StepReport(self.progress.step, self.settings.steps, loss, learning_rate, pace, left)

    def facts(self) -> dict[str, Any]:
        """Numbers for the summary: graphs, seconds, memory."""
        return {
            **self.placed.facts(),
            "block_copies_per_step": self.copies,
            **self.learner.facts(),
            "seconds_per_step": round(median(self.seconds), 4) if self.seconds else None,
            **self.preservation_facts(),
            **memory_peak(self.device),
        }

    def preservation_facts(self) -> dict[str, float]:
        """Preservation's part of the loss, in the mean of the last batches; the last of a run may not be finite."""
        finite = [value for value in map(float, self.preserved) if math.isfinite(value)]
        return {"preservation_loss": sum(finite) / len(finite)} if finite else {}
