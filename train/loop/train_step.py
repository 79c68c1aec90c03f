"""One optimizer step: forward, backward and update."""

import math
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from ..config.environment import reset_memory_peak
from ..placement import auto
from ..placement.placed_model import PlacedModel
from ..preflight.context import RunContext
from ..report import errors
from ..report.observer import Observer, StepReport
from ..step.batches import StepBatches
from ..step.clock import StepClock
from ..step.losses import StepLosses
from ..step.order import MicroBatch
from .gradient_sync import GradientSync
from .learner import Learner
from .progress import Progress
from .retries import StepRetries
from .watcher import Watcher


class TrainStep:
    """Optimizer steps of a run, one by one.

        micro-batches → forward, backward of each → sum over the ranks → clip, check → optimizer

    retries: repeat a forward or backward that fails.
    copies: block copies to the device in the last step.
    """

    def __init__(
        self,
        context: RunContext,
        observer: Observer,
        placed: PlacedModel,
        learner: Learner,
        sync: GradientSync,
        progress: Progress,
        watchers: Sequence[Watcher],
    ) -> None:
        self.settings = context.settings
        self.observer = observer
        self.watchers = watchers
        self.progress = progress
        self.placed = placed
        self.learner = learner
        self.sync = sync
        self.losses = StepLosses(placed, self.settings.objective)
        self.clock = StepClock(placed.weights.device)
        self.batches = StepBatches(context, placed.weights.device, self.clock)
        self.copies = 0
        self.retries = StepRetries(observer, placed, learner, self.batches, self.clock, progress)

    def run(self) -> StepReport:
        """Take the next step.

        Raises CannotContinue if the loss or the gradient is not finite, before the weights are updated.
        """
        self.clock.begin()
        compiled_before = self.placed.execution.runner.report.counts()
        micro_batches = self.batches.for_step(self.progress.step)
        learning_rate = self.learner.learning_rate
        loss = self.finite(self.forward_backward(micro_batches))
        self.optimizer_step()
        self.progress.end_step(loss, self.settings.gradient_accumulation)
        # A step that compiled does not count towards the pace.
        if self.placed.execution.runner.report.counts() == compiled_before:
            self.clock.end()
        if self.placed.plan_again(self.settings.steps - self.progress.step):
            self.retries.place_again()
        return self._report(loss, learning_rate)

    def forward_backward(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Accumulate gradients over the micro-batches on the LoRA's fp32 weights.

        Returns the mean loss, a scalar on the device. The kernels may still be queued: nothing here synchronises.
        """
        return self.retries.attempt(lambda: self._forward_backward(micro_batches))

    def measure_low_bit(self) -> None:
        """Choose the low-precision matmuls by the first micro-batches, and change nothing else."""
        self.retries.attempt(self._measure_low_bit)

    def micro_batch(self, requests: MicroBatch, rng_key: tuple[int, int], count: int, total: Tensor) -> None:
        """Run one of a step's micro-batches forward and backward; adds its part of the mean loss to `total`.

        count: micro-batches of the step on all ranks.
        total: fp32 scalar on the device.
        """
        batch = self.batches.make(requests, rng_key)
        self.placed.check_forward(batch.inputs)
        # Closed at an error too: a loss may be given out with the adapter negated.
        with self.placed.training(), closing(self.losses(batch, rng_key)) as losses:
            for loss in losses:
                with self.placed.execution.runner.watch_backward():
                    self.learner.backward(loss / count)
                total += loss.detach() / count

    def finite(self, total: Tensor) -> float:
        """Clip the gradients and return the loss `total`, a scalar on the device, as a number.

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
        """Update the weights from the clipped gradients."""
        with self.progress.updating():
            self.learner.step()

    def is_watcher_due(self, step: int) -> bool:
        """Return whether a watcher has work to do after `step` steps, which may need the memory."""
        return any(watcher.is_due(step, self.settings.steps) for watcher in self.watchers)

    def close(self) -> None:
        """Free all memory of the run."""
        self.learner.zero_grad()
        self.batches.close()
        self.placed.close()
        self.retries.close()
        del self.placed, self.learner, self.losses, self.sync

    def summary(self) -> dict[str, Any]:
        """Return entries for the run's summary: graphs, seconds per step."""
        return {
            **self.placed.facts(),
            "block_copies_per_step": self.copies,
            **self.learner.facts(),
            **self.clock.facts(),
            **self.losses.facts(),
        }

    def _forward_backward(self, micro_batches: list[MicroBatch]) -> Tensor:
        self.placed.weights.ensure()
        copies = self.placed.weights.copies()
        self.learner.zero_grad()
        total = torch.zeros((), device=self.placed.weights.device)
        count = len(micro_batches) * self.sync.world.world_size
        for micro, requests in self.batches.order.share.numbered(micro_batches):
            # Cancelling leaves this step without an update: the run resumes from the step before and repeats it.
            self.observer.check_interrupted()
            self.micro_batch(requests, (self.progress.step, micro), count, total)
        self._make_ahead()  # before make_room_to_step, so that it can't cause an OOM in the optimizer
        auto.make_room_to_step(self.learner.optimizer, self.settings.optimizer.spec)
        self.placed.memory.sharing.finish()
        self.copies = self.placed.weights.copies() - copies
        return total

    def _make_ahead(self) -> None:
        """Make the next step's first batch while the device computes this step.

        Skipped after the last step, and if a watcher is due, which may need the memory.
        """
        step = self.progress.step + 1
        if step < self.settings.steps and not self.is_watcher_due(step):
            self.batches.make_ahead(step)

    def _measure_low_bit(self) -> None:
        with self.placed.measured_low_bit() as count:
            for key, requests in self.batches.order.first_of(self.progress.step, self.progress.batches, count):
                self.observer.check_interrupted()
                self.micro_batch(requests, key, count, torch.zeros((), device=self.placed.weights.device))
            self.placed.memory.sharing.finish()
        self.learner.zero_grad()
        self.losses.preserved.clear()
        reset_memory_peak(self.placed.weights.device)

    def _report(self, loss: float, learning_rate: float) -> StepReport:
        pace = self.clock.pace()
        seconds_left = None if pace is None else pace * (self.settings.steps - self.progress.step)
        return StepReport(self.progress.step, self.settings.steps, loss, learning_rate, pace, seconds_left)
