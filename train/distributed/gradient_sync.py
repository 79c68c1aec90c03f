"""Sum of the gradients over devices, one collective for each optimizer step."""

import contextlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch
from comfy.model_management import InterruptProcessingException
from torch import Tensor

from ..errors import error_sentence
from ..learner import Learner
from ..observer import SAMPLE, SAVE, STOP, Observer
from .world import World

# Behind the gradients: the loss, the number of ranks that leave, what rank 0's user asks for, and for each weight
# whether it has a gradient.
_LOSS, _LEAVING, _ASKED, _FLAGS = 0, 1, 2, 3
_ASKS = {SAVE: 1, STOP: 2, SAMPLE: 4}  # added up


class GradientSync:
    """Adds up the gradients of a step over all ranks, with the loss and what else each has to know.

    The flat gradients lie in one buffer, which is what is sent. Every rank takes part in as many sums as the run has
    steps left, or leaves by one in which it says so: then all end at the same step, and none waits for another.
    """

    def __init__(self, world: World, learner: Learner, observer: Observer):
        self.world, self.learner, self.observer, groups = world, learner, observer, learner.network.flat
        self.sums_left, self._asked = 0, 0
        if world.is_lone:
            return
        self.weights = [(group, number) for group in groups for number in range(len(group.weights))]
        sizes = [group.gradient.numel() for group in groups]
        self.buffer = torch.zeros(sum(sizes) + _FLAGS + len(self.weights), device=groups[0].gradient.device)
        for group, part in zip(groups, self.buffer.split([*sizes, _FLAGS + len(self.weights)]), strict=False):
            group.move_gradient(part)
        self.told = self.buffer[sum(sizes) :]

    def begin(self, steps: int) -> None:
        """Begin a run with this number of steps left."""
        self.sums_left = 0 if self.world.is_lone else steps

    def sum(self, loss: Tensor, step: int) -> Tensor:
        """Add up the gradients, which were gathered. Returns (n,): the sum of the losses, and what `check` reads.

        loss: this rank's part of the mean, a scalar.
        step: number of the step, from 1.
        """
        if self.world.is_lone:
            return loss[None]
        present = [float(group.weights[number].grad is not None) for group, number in self.weights]
        self.told[_FLAGS:] = torch.tensor(present)
        asked = sum(_ASKS[what] for what in self.observer.asked()) if self.world.is_first else 0
        self.told[_LOSS], self.told[_LEAVING], self.told[_ASKED] = loss, 0.0, float(asked)
        self.sums_left -= 1
        try:
            self.world.sum(self.buffer, step)
        except BaseException:
            self.sums_left = 0
            raise
        for group, number in self.weights:
            group.weights[number].grad = group.gradients[number]
        return self.told.clone()

    def check(self, told: Sequence[float]) -> None:
        """Take what `sum` has returned, without the loss, as numbers; a weight that no rank reached has no gradient.

        Raises what ends this rank where another one leaves.
        """
        if self.world.is_lone:
            return
        self.world.count_sum()
        leaving, asked, *present = told
        self._asked = int(asked)
        if leaving:
            self.sums_left = 0
            raise self.world.stopped(self.world.fault())
        absent = [of for of, ranks in zip(self.weights, present, strict=True) if not ranks]
        for group, number in absent:
            group.weights[number].grad = None
        if absent and self.learner.flat is not None:
            self.learner.flat.prepare()

    def asked(self) -> AbstractSet[str]:
        """Return what the user asks for after the step that was checked last, the same on every rank."""
        if self.world.is_lone:
            return self.observer.asked()
        return {what for what, number in _ASKS.items() if self._asked & number}

    def leave(self, error: BaseException, step: int, leave_gathers: Callable[[], None]) -> None:
        """Leave the run with the others, for an error of this rank: all end at the step that it did not finish.

        step: number of that step, from 1.
        leave_gathers: leaves those that share blocks with this rank, before; where it raises, none of them comes to a
            sum.
        """
        if self.world.is_lone:
            return
        with contextlib.suppress(Exception, InterruptProcessingException):  # the error itself must reach the user
            self.world.tell(error, error_sentence(error))
            left, self.sums_left = self.sums_left, 0
            try:
                leave_gathers()
            except BaseException:
                self.world.leave_sum()  # other machines share no block with this one, and would wait
                raise
            if isinstance(error, InterruptProcessingException):
                self.world.interrupted = error  # its user waits no longer for the others than there
            if left:
                self._sum_as_leaving(step)

    def _sum_as_leaving(self, step: int) -> None:
        try:
            self.buffer.zero_()
            self.told[_LEAVING] = 1.0
        except Exception:  # the device itself has failed
            self.world.leave_sum()
            raise
        self.world.sum(self.buffer, step)
