"""Sum of the gradients over devices, one collective per optimizer step."""

import contextlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch
from comfy.model_management import InterruptProcessingException
from torch import Tensor

from ..distributed.world import World
from ..report.errors import error_sentence
from ..report.observer import PAUSE, SAMPLE, SAVE, STOP, Observer
from .learner import Learner

# Layout after the gradients: the loss, the number of ranks that abort, the requests of rank 0's user, and one flag per
# weight for whether it has a gradient.
_LOSS = 0
_ABORTING = 1
_REQUESTS = 2
_FLAGS = 3
_REQUEST_BITS = {SAVE: 1, STOP: 2, SAMPLE: 4, PAUSE: 8}  # bit flags


class GradientSync:
    """Sums the gradients of a step over all ranks, together with the loss and the flags that every rank needs.

    The flat gradients are views on the one buffer that is sent. Every rank takes part in one sum per remaining step, or
    aborts with a sum that announces it: then all ranks end at the same step, and none waits for another.
    """

    def __init__(self, world: World, learner: Learner, observer: Observer):
        self.world = world
        self.learner = learner
        self.observer = observer
        groups = learner.network.flat
        self.remaining_sums = 0
        self._request_flags = 0
        if world.world_size == 1:
            return
        self.weights = [(group, number) for group in groups for number in range(len(group.weights))]
        sizes = [group.gradient.numel() for group in groups]
        self.buffer = torch.zeros(sum(sizes) + _FLAGS + len(self.weights), device=groups[0].gradient.device)
        for group, part in zip(groups, self.buffer.split([*sizes, _FLAGS + len(self.weights)]), strict=False):
            group.move_gradient(part)
        self.trailer = self.buffer[sum(sizes) :]

    def begin(self, steps: int) -> None:
        """Begin a run with this number of remaining steps."""
        self.remaining_sums = 0 if self.world.world_size == 1 else steps

    def sum(self, loss: Tensor, step: int) -> Tensor:
        """Sum the gathered gradients over the ranks. Returns (n,): the sum of the losses, and the input of `check`.

        loss: this rank's share of the mean, a scalar.
        step: number of the step, from 1.
        """
        if self.world.world_size == 1:
            return loss[None]
        present = [float(group.weights[number].grad is not None) for group, number in self.weights]
        self.trailer[_FLAGS:] = torch.tensor(present)
        requests = self.observer.take_requests() if self.world.is_first else ()
        self.trailer[_LOSS] = loss
        self.trailer[_ABORTING] = 0.0
        self.trailer[_REQUESTS] = float(sum(_REQUEST_BITS[request] for request in requests))
        self.remaining_sums -= 1
        try:
            self.world.collectives.all_reduce(self.buffer, step)
        except BaseException:
            self.remaining_sums = 0
            raise
        for group, number in self.weights:
            group.weights[number].grad = group.gradients[number]
        return self.trailer.clone()

    def check(self, values: Sequence[float]) -> None:
        """Process the values that `sum` returned. A weight without a gradient on any rank gets None as its gradient.

        values: the result of `sum` as numbers, without the loss.

        Raises the exception that ends this rank if another rank aborts.
        """
        if self.world.world_size == 1:
            return
        self.world.collectives.end_sum()
        aborting_ranks, request_flags, *present = values
        self._request_flags = int(request_flags)
        if aborting_ranks:
            self.remaining_sums = 0
            raise self.world.faults.exception(self.world.faults.first())
        absent = [entry for entry, ranks in zip(self.weights, present, strict=True) if not ranks]
        for group, number in absent:
            group.weights[number].grad = None
        if absent and self.learner.flat is not None:
            self.learner.flat.prepare()

    def requests(self) -> AbstractSet[str]:
        """Return the user's requests after the last checked step, the same on every rank."""
        if self.world.world_size == 1:
            return self.observer.take_requests()
        return {request for request, number in _REQUEST_BITS.items() if self._request_flags & number}

    def abort(self, error: BaseException, step: int, abort_gathers: Callable[[], None]) -> None:
        """Abort the run because of an error of this rank: all ranks end at the step that it did not finish.

        step: number of that step, from 1.
        abort_gathers: called first, for the ranks that share blocks with this one; if it raises, none of them joins a
            sum.
        """
        if self.world.world_size == 1:
            return
        with contextlib.suppress(Exception, InterruptProcessingException):  # the error itself must reach the user
            self.world.abort(error, error_sentence(error))
            remaining_sums, self.remaining_sums = self.remaining_sums, 0
            try:
                abort_gathers()
            except BaseException:
                self.world.collectives.abort_sum()  # other machines share no block with this rank, and would wait
                raise
            if isinstance(error, InterruptProcessingException):
                self.world.interrupts.keep(error)  # shortens the wait for the other ranks in the sum
            if remaining_sums:
                self._sum_as_aborting(step)

    def _sum_as_aborting(self, step: int) -> None:
        try:
            self.buffer.zero_()
            self.trailer[_ABORTING] = 1.0
        except Exception:  # the device itself has failed
            self.world.collectives.abort_sum()
            raise
        self.world.collectives.all_reduce(self.buffer, step)
