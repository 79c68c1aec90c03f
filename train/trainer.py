"""Training loop: forward, backward, optimizer step, saves and the retries after OOM or a compile error."""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import comfy.model_management
import torch
from torch import Tensor

from ..common.core import end_of_node
from ..common.fingerprint import fingerprint
from ..compile.region import CompileFailed, cannot_compile
from ..lora.warm_start import WarmStart
from ..memory.host.sysmem_fallback import SysmemMonitor
from ..memory.weights.frozen import unload
from . import errors
from .distributed.gradient_sync import GradientSync
from .distributed.ranks import check_alike
from .learner import Learner
from .observer import SAMPLE, SAVE, STOP, Observer, StepReport
from .placement import auto
from .placement.environment import environment_facts, memory_peak, reset_memory_peak
from .placement.placed_model import PlacedModel
from .preflight.context import RunContext
from .saver import FinalLora, Progress, Saver
from .step.batches import MicroBatch, StepBatches
from .step.clock import StepClock
from .step.losses import StepLosses

T = TypeVar("T")


class Watcher(Protocol):
    """Callback between the steps of a run, such as previews and validation."""

    def between_steps(self, trainer: "Trainer") -> None:
        """Inspect the run, before the first step and after each step once a due save is written.

        `trainer.progress.step` steps are done. All ranks call it, and rank 0 writes. The final save follows the last.
        A watcher may unload the model's weights: the next step loads them again.
        It must not change the LoRA, the optimizer, the gradients or any random state.
        An exception ends the run.
        """
        ...

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether it has work to do after `step` of `steps` steps, which may need the memory."""
        ...

    def facts(self, trainer: "Trainer") -> dict[str, Any]:
        """Return entries for the run's summary: finite numbers and text only."""
        ...


class Trainer:
    """Training run on one MODEL.

    `run` trains from the current step to the last one. It saves before it raises.
    """

    def __init__(self, context: RunContext, observer: Observer, watchers: Sequence[Watcher] = ()):
        self.patcher, self.family, self.data = context.patcher, context.family, context.data
        self.settings, self.observer, self.watchers = context.settings, observer, list(watchers)
        self.world = context.world

        observer.phase("Loading the model")
        self.device = self.patcher.load_device
        unload()  # before the peak is reset: the models of earlier nodes are not part of this run
        end_of_node()
        reset_memory_peak(self.device)
        self.sysmem = SysmemMonitor(self.device)
        self.copies = 0  # block copies to the device in the last step
        self.user_requests: Collection[str] = ()  # by the user, after the last step
        self.world.connect(self.device)  # before the model takes its memory: all-reduce needs some
        placed: PlacedModel | None = None
        try:
            placed = PlacedModel(context, observer)
            learner_args = placed.network, self.settings.optimizer, self.settings.steps, placed.dtype, self.device.type
            learner = Learner(*learner_args, flat_gradients=self.world.world_size > 1)
            self.sync = GradientSync(self.world, learner, observer)
        except BaseException as error:
            if placed is not None:
                placed.unload()
            if not comfy.model_management.is_oom(error):
                raise
            raise errors.out_of_memory_while_loading() from error
        self.placed, self.learner, self.network = placed, learner, placed.network
        self.losses = StepLosses(placed, self.settings.objective)
        self.compile_settings = context.compile_settings
        self.clock = StepClock(self.device)
        self.batches = StepBatches(context, self.device, self.clock)
        self.saver = Saver(learner, context, self.environment(), observer, self.batches.strata, placed.low_bit)
        if placed.runner.not_compiled:
            self.fall_back_to_eager(placed.runner.not_compiled)
        placed.note_memory_use()

    @property
    def progress(self) -> Progress:
        """Progress of the run, owned by the saver."""
        return self.saver.progress

    def resume(self, path: Path) -> None:
        """Restore a saved state; training continues as if it had not been interrupted."""
        self.saver.resume(path)

    def environment(self) -> dict[str, str]:
        """Return the facts that the last bits of a result depend on, for states."""
        devices = {} if self.world.world_size == 1 else {"devices": str(self.world.world_size)}
        return environment_facts(self.device, self.compile_settings) | self.placed.choice_facts() | devices

    def apply_warm_start(self, start: WarmStart) -> list[str]:
        """Initialise the weights from another LoRA. Returns a note for each part that could not be loaded."""
        linears = self.placed.transformer.linears()
        return self.learner.apply_warm_start(start, lambda name: linears[name].read_on_device().full())

    def check_ranks(self, name: str) -> None:
        """Compare the whole trained state with that of the other ranks. Raises CannotContinue if it differs."""
        if self.world.world_size > 1:
            check_alike(self.world, f"{name} {self.progress.step}", {"LoRA": fingerprint(self.learner.state())})

    def save_final(self, spare_folder: Path | None = None) -> FinalLora:
        """Write the final LoRA and the training state, see `Saver.save_final`."""
        return self.saver.save_final(spare_folder)

    def run(self) -> None:
        """Train to the last step, or to the one after which the user stops the run.

        Raises TrainingStopped for known errors (OOM, NaN, too many graphs), else the error itself; saves first.
        """
        settings, progress = self.settings, self.progress
        self.batches.start(progress.step, progress.batches, self.observer.check_interrupted)
        self.check_ranks("start")
        self.sync.begin(settings.steps - progress.step)
        try:
            check_alike(self.world, "low_bit_matmul", {"kind of matmul": ",".join(self.placed.low_bit.precisions)})
            if self.placed.low_bit.undecided:  # before validation, which uses the same matmuls
                self.attempt(self.measure_low_bit)
            self.between_steps()
            while progress.step < settings.steps:
                self.observer.check_interrupted()
                self.clock.begin()
                compiled_before = self.placed.runner.report.counts()
                micro_batches = self.batches.for_step(progress.step)
                learning_rate = self.learner.learning_rate
                mean_loss = self.finite(self.forward_backward(micro_batches))
                self.optimizer_step()
                progress.batches += settings.gradient_accumulation
                progress.step += 1
                progress.loss.append(mean_loss)
                # A step that compiled does not count towards the pace.
                if self.placed.runner.report.counts() == compiled_before:
                    self.clock.end()
                if self.placed.plan_again(settings.steps - progress.step):
                    self.place_anew()
                self.observer.step(self.report(mean_loss, learning_rate))
                for sentence in (self.sysmem.message(), self.placed.message()):
                    if sentence is not None:
                        self.observer.note(sentence)
                self.user_requests = user_requests = self.sync.requests()
                if self.saver.is_due() or (SAVE in user_requests and progress.step < settings.steps):
                    self.check_ranks("save")
                    self.saver.save()
                if SAMPLE in user_requests:
                    self.batches.drop_ahead()  # previews may need its memory
                self.between_steps()
                if STOP in user_requests:
                    break
            self.check_ranks("final")  # inside try, so that an error in it saves too
        except BaseException as error:
            self.sync.abort(error, progress.step + 1, self.placed.sharing.abort)
            self.saver.save_unsaved_progress()
            last_save = self.saver.describe_last_save()
            if (
                stopped := errors.explain_error(error, progress.step, last_save, self.placed.runner.planned_graphs)
            ) is None:
                raise
            raise stopped from error

    def measure_low_bit(self) -> None:
        """Choose the low-precision matmuls by the first micro-batches, and change nothing else."""
        with self.placed.measured_low_bit() as count:
            for key, requests in self.batches.first_of(self.progress.step, self.progress.batches, count):
                self.observer.check_interrupted()
                self.micro_batch(requests, key, count, torch.zeros((), device=self.device))
            self.placed.sharing.finish()
        self.learner.zero_grad()
        self.losses.preserved.clear()
        reset_memory_peak(self.device)

    def between_steps(self) -> None:
        """Call the watchers; if one was due, wait without a time limit until rank 0 has written its files."""
        for watcher in self.watchers:
            watcher.between_steps(self)
        step, steps = self.progress.step, self.settings.steps
        self.world.wait_for_first(
            step, bool(self.user_requests) or any(watcher.is_due(step, steps) for watcher in self.watchers)
        )

    def forward_backward(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Accumulate gradients over the micro-batches on the LoRA's fp32 weights.

        Returns the mean loss, a scalar on the device. The kernels may still be queued: nothing here synchronises.
        """
        return self.attempt(lambda: self._forward_backward(micro_batches))

    def attempt(self, compute: Callable[[], T]) -> T:
        """Run `compute`; on OOM retry with the next smaller memory plan, on a compile error retry eagerly.

        Raises the error if neither applies or no smaller plan is left.
        """
        try:
            result = compute()
            self.note_uncompiled()
            return result
        except Exception as error:
            smaller = comfy.model_management.is_oom(error) and self.placed.step_down(self.progress.step, error)
            asked_for = isinstance(error, CompileFailed)  # by fullgraph on Compile Model
            compiles = self.placed.runner.planned_graphs and not smaller and not asked_for
            cause = cannot_compile(error) if compiles else None
            if cause is None and not smaller:
                raise
            errors.log_error("A step failed and is tried again", error)
        # Retry outside the handler: inside it the exception's frames still hold the failed step's activations.
        # Repeating is exact, as random numbers depend on the step only.
        if cause is None:
            self.place_anew()
            return self.attempt(compute)
        self.placed.runner.discard_offloaded()
        self.fall_back_to_eager(cause)
        comfy.model_management.soft_empty_cache()
        return compute()

    def place_anew(self) -> None:
        """Place the model by another memory plan, between two steps or before a retry."""
        self.learner.zero_grad()
        self.batches.drop_ahead()
        self.placed.rebuild(self.progress.step)
        self.saver.environment = self.environment()
        self.clock.clear()  # the pace was that of the previous plan

    def note_uncompiled(self) -> None:
        """Report the kinds of blocks that failed to compile and run eager; if all did, fall back to eager training."""
        runner = self.placed.runner
        if not runner.failed:
            return
        failed, runner.failed = runner.failed, {}
        if not runner.planned_graphs:
            self.fall_back_to_eager(next(iter(failed.values())))
            return
        for label, cause in failed.items():
            self.observer.note(f"{label} blocks can't be compiled, so they run uncompiled: {cause}")

    def fall_back_to_eager(self, cause: str) -> None:
        """Switch to eager execution for the rest of the run and report `cause` once."""
        self.observer.note(f"Compiling failed, so training runs uncompiled: {cause}")
        self.placed.runner.fall_back_to_eager()
        self.compile_settings = self.placed.compile_settings = None
        self.saver.environment = self.environment()

    def _forward_backward(self, micro_batches: list[MicroBatch]) -> Tensor:
        self.placed.ensure()
        copies = self.placed.copies()
        self.learner.zero_grad()
        total = torch.zeros((), device=self.device)
        count = len(micro_batches) * self.world.world_size
        for micro, requests in self.batches.share.numbered(micro_batches):
            # Cancelling leaves this step without an update: the run resumes from the step before and repeats it.
            self.observer.check_interrupted()
            self.micro_batch(requests, (self.progress.step, micro), count, total)
        self.make_ahead()  # before make_room_to_step, so that it can't cause an OOM in the optimizer
        auto.make_room_to_step(self.learner.optimizer, self.settings.optimizer.spec)
        self.placed.sharing.finish()
        self.copies = self.placed.copies() - copies
        return total

    def micro_batch(self, requests: MicroBatch, rng_key: tuple[int, int], count: int, total: Tensor) -> None:
        """Run one of a step's micro-batches forward and backward; adds its part of the mean loss to `total`.

        count: micro-batches of the step on all ranks.
        """
        batch = self.batches.make(requests, rng_key)
        self.placed.check_forward(batch.inputs)
        with self.placed.training():
            for loss in self.losses(batch, rng_key):
                with self.placed.runner.watch_backward():
                    self.learner.backward(loss / count)
                total += loss.detach() / count

    def make_ahead(self) -> None:
        """Make the next step's first batch while the device computes this step.

        Skipped after the last step, and if a watcher is due, which may need the memory.
        """
        step, steps = self.progress.step + 1, self.settings.steps
        if step < steps and not any(watcher.is_due(step, steps) for watcher in self.watchers):
            self.batches.make_ahead(step)

    def finite(self, total: Tensor) -> float:
        """Clip the gradients and return the loss as a number.

        Raises CannotContinue if the loss or the gradient norm is not finite, before the weights are updated.
        """
        # The only device synchronisation of a step. The device idles from here until the optimizer's kernels are
        # queued, so both numbers are read in one transfer.
        sums = self.sync.sum(total, self.progress.step + 1)
        numbers = torch.cat((self.learner.clip()[None], sums))
        with self.clock.spend("wait"):
            norm, loss, *from_ranks = numbers.tolist()
        self.sync.check(from_ranks)
        for quantity, is_finite in (("loss", math.isfinite(loss)), ("gradient", self.learner.may_step(norm))):
            if not is_finite:
                weight = errors.broken_weight(self.placed.patcher.model.diffusion_model)
                raise errors.not_finite(quantity, self.progress.step, weight)
        return loss

    def optimizer_step(self) -> None:
        """Update the weights; an error inside leaves `progress.intact` False, and such weights are not saved."""
        self.progress.intact = False
        self.learner.step()
        self.progress.intact = True

    def close(self) -> None:
        """Free all memory of the run."""
        self.learner.zero_grad()
        self.batches.close()
        self.placed.close()
        del self.placed, self.network, self.learner, self.losses, self.sync, self.saver.learner
        comfy.model_management.soft_empty_cache()

    def report(self, loss: float, learning_rate: float) -> StepReport:
        """Make the progress report of the step just done."""
        pace = self.clock.pace()
        seconds_left = None if pace is None else pace * (self.settings.steps - self.progress.step)
        return StepReport(self.progress.step, self.settings.steps, loss, learning_rate, pace, seconds_left)

    def facts(self) -> dict[str, Any]:
        """Return entries for the summary: graphs, seconds per step, memory."""
        return {
            **self.placed.facts(),
            "block_copies_per_step": self.copies,
            **self.learner.facts(),
            **self.clock.facts(),
            **self.losses.facts(),
            **self.world.facts(),
            **memory_peak(self.device),
        }
