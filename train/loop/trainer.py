"""Training loop of a run: its steps, and between them saves, requests of the user and watchers."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import comfy.model_management

from ...common.core import end_of_node
from ...common.fingerprint import fingerprint
from ...lora.warm_start import WarmStart
from ...memory.host.sysmem_fallback import SysmemMonitor
from ...memory.weights.frozen import unload
from ..config.environment import memory_peak, reset_memory_peak
from ..distributed.ranks import check_alike
from ..placement.placed_model import PlacedModel
from ..preflight.context import RunContext
from ..report import errors
from ..report.observer import PAUSE, SAMPLE, SAVE, STOP, Observer
from .gradient_sync import GradientSync
from .learner import Learner
from .progress import Progress
from .saver import FinalLora, Saver
from .train_step import TrainStep
from .watcher import RunView, Watcher


class Trainer:
    """Training run on one MODEL.

    `run` trains from the current step to the last one. It saves before it raises.

    placed: the frozen model on the device.
    learner: the LoRA with its optimizer.
    train_step: the steps, with their retries.
    saver: the files of the run.
    """

    def __init__(self, context: RunContext, observer: Observer, watchers: Sequence[Watcher] = ()):
        self.context, self.settings = context, context.settings
        self.observer, self.watchers = observer, list(watchers)
        self.device = context.patcher.load_device
        self.progress = Progress()

        observer.phase("Loading the model")
        unload()  # before the peak is reset: the models of earlier nodes are not part of this run
        end_of_node()
        reset_memory_peak(self.device)
        self.sysmem = SysmemMonitor(self.device)
        self.context.world.connect(self.device)  # before the model takes its memory: all-reduce needs some
        placed: PlacedModel | None = None
        try:
            placed = PlacedModel(context, observer)
            learner = Learner(
                placed.network,
                self.settings.optimizer,
                self.settings.steps,
                placed.weights.dtype,
                self.device.type,
                flat_gradients=self.context.world.world_size > 1,
            )
            sync = GradientSync(self.context.world, learner, observer)
        except BaseException as error:
            if placed is not None:
                placed.weights.unload()
            if not comfy.model_management.is_oom(error):
                raise
            raise errors.out_of_memory_while_loading() from error
        train_step = TrainStep(context, observer, placed, learner, sync, self.progress, self.watchers)
        retries = train_step.retries
        self.saver = Saver(
            learner,
            context,
            self.progress,
            observer,
            train_step.batches.strata,
            placed.low_bit,
            environment=lambda: retries.environment,
        )
        self.placed = placed
        self.learner = learner
        self.network = placed.network
        self.train_step = train_step
        if placed.execution.runner.not_compiled:
            retries.fall_back_to_eager(placed.execution.runner.not_compiled)
        placed.note_memory_use()

    def resume(self, path: Path) -> None:
        """Restore a saved state; training continues as if it had not been interrupted."""
        self.saver.resume(path, self.learner)

    def apply_warm_start(self, start: WarmStart) -> list[str]:
        """Initialise the weights from another LoRA. Returns a note for each part that could not be loaded."""
        linears = self.placed.weights.transformer.linears()
        return self.learner.apply_warm_start(start, lambda name: linears[name].read_on_device().full())

    def run(self) -> str:
        """Train to the last step, or to the one after which the user stops or pauses the run.

        Returns STOP or PAUSE if it ended before the last step, else an empty text.

        Raises TrainingStopped for known errors (OOM, NaN, too many graphs), else the error itself; saves first.
        """
        steps, progress = self.settings.steps, self.progress
        self.train_step.batches.order.start(progress.step, progress.batches, self.observer.check_interrupted)
        self.check_ranks("start")
        self.train_step.sync.begin(steps - progress.step)
        try:
            self.choose_low_bit()
            self.call_watchers(())
            ending = ""
            while progress.step < steps:
                self.observer.check_interrupted()
                self.observer.step(self.train_step.run())
                self.note_memory_problems()
                requests = self.train_step.sync.requests()
                if self.saver.is_due() or (SAVE in requests and progress.step < steps):
                    self.check_ranks("save")
                    self.saver.save()
                if SAMPLE in requests:
                    self.train_step.batches.drop_ahead()  # previews may need its memory
                self.call_watchers(requests)
                if ending := next((request for request in (STOP, PAUSE) if request in requests), ""):
                    break
            self.check_ranks("final")  # inside try, so that an error in it saves too
            return ending if progress.step < steps else ""
        except BaseException as error:
            self.train_step.sync.abort(error, progress.step + 1, self.placed.memory.sharing.abort)
            self.saver.save_unsaved_progress()
            last_save = self.saver.describe_last_save()
            planned_graphs = self.placed.execution.runner.planned_graphs
            if (explained := errors.explain_error(error, progress.step, last_save, planned_graphs)) is None:
                raise
            raise explained from error

    def choose_low_bit(self) -> None:
        """Choose the low-precision matmuls, if it is not decided yet; before validation, which uses the same ones."""
        low_bit = self.placed.low_bit
        check_alike(self.context.world, "low_bit_matmul", {"kind of matmul": ",".join(low_bit.precisions)})
        if low_bit.undecided:
            self.train_step.measure_low_bit()

    def call_watchers(self, requests: Collection[str]) -> None:
        """Call the watchers; if one was due, wait without a time limit until rank 0 has written its files.

        requests: of the user, after the last step.
        """
        view = self.view(requests)
        for watcher in self.watchers:
            watcher.between_steps(view)
        step = self.progress.step
        self.context.world.wait_for_first(step, bool(requests) or self.train_step.is_watcher_due(step))

    def view(self, requests: Collection[str] = ()) -> RunView:
        """Return what watchers see of the run now."""
        return RunView(
            settings=self.settings,
            observer=self.observer,
            world=self.context.world,
            progress=self.progress,
            placed=self.placed,
            learner=self.learner,
            loras=self.saver.loras,
            best=self.saver.best,
            attempt=self.train_step.retries.attempt,
            requests=requests,
        )

    def check_ranks(self, name: str) -> None:
        """Compare the whole trained state with that of the other ranks. Raises CannotContinue if it differs."""
        if self.context.world.world_size > 1:
            check_alike(self.context.world, f"{name} {self.progress.step}", {"LoRA": fingerprint(self.learner.state())})

    def note_memory_problems(self) -> None:
        """Report problems with memory that only a step shows."""
        for sentence in (self.sysmem.message(), self.placed.message()):
            if sentence is not None:
                self.observer.note(sentence)

    def save_final(self, spare_folder: Path | None = None) -> FinalLora:
        """Write the final LoRA and the training state, see `Saver.save_final`."""
        return self.saver.save_final(spare_folder)

    def close(self) -> None:
        """Free all memory of the run."""
        self.train_step.close()
        self.saver.close()
        del self.placed, self.network, self.learner
        comfy.model_management.soft_empty_cache()

    def summary(self) -> dict[str, Any]:
        """Return entries for the run's summary: graphs, seconds per step, memory."""
        return {**self.train_step.summary(), **self.context.world.facts(), **memory_peak(self.device)}
