"""Batches of a run, step by step; the first of each step is made while the device computes the previous step."""

import logging
from itertools import chain

import torch

from ...data.loader import SampleReader
from ..objective.batch import Batch, make_batch, strata_sizes
from ..preflight.context import RunContext
from .clock import StepClock
from .order import MicroBatch, RngKey, StepOrder

log = logging.getLogger(__name__)


class StepBatches:
    """Source of a run's batches, in the order of its data.

    A batch made ahead equals the one that its step would make. A state stores the number of batches that were trained
    on: a batch made ahead and dropped is made again.

    order: the samples of each step.
    strata: samples of a step and of an epoch.
    reader: reads the samples of this step and the next.
    """

    def __init__(self, context: RunContext, device: torch.device, clock: StepClock):
        self.context = context
        self.device = device
        self.clock = clock
        self.order = StepOrder(context)
        self.strata = strata_sizes(context.settings.samples_per_step, context.data.samples)
        self.reader = SampleReader(context.data.samples)
        self._ahead: tuple[RngKey, MicroBatch, Batch] | None = None
        self._makes_ahead = True

    def for_step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of the next step, and prefetch its samples and those of the step after."""
        micro_batches = self.order.next_step(step)
        # One step ahead, so that its samples are read from disk while this step computes.
        self.reader.prefetch(chain(*micro_batches, *self.order.upcoming))
        return micro_batches

    def make(self, requests: MicroBatch, rng_key: RngKey) -> Batch:
        """Return the batch of these samples on the device; one that was made ahead is returned once."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (rng_key, requests):
            return ahead[2]
        del ahead  # before its memory is needed
        with self.clock.spend("data"), torch.no_grad():
            context, share = self.context, self.order.share
            samples = [(context.data.samples[request[0]], self.reader.read(request)) for request in requests]
            return make_batch(
                context.patcher,
                context.family,
                samples,
                context.settings.objective,
                self.device,
                context.settings.seed,
                rng_key,
                self.strata,
                (share.part, share.parts),
            )

    def make_ahead(self, step: int) -> None:
        """Make the first batch of the next step, number `step`, and keep it for `make`.

        Never raises: a failure is left to the step itself, which runs after this step's update and can retry with a
        smaller memory plan. From then on no batch is made ahead.
        """
        if not self._makes_ahead or not self.order.upcoming:
            return
        requests, rng_key = self.order.upcoming[0], (step, self.order.share.first_micro)
        try:
            self._ahead = rng_key, requests, self.make(requests, rng_key)
        except Exception as error:
            self._makes_ahead = False
            log.debug("No batch is made ahead from step %d on: %s", step + 1, str(error))

    def drop_ahead(self) -> None:
        """Free the batch that was made ahead; its step makes it again."""
        self._ahead = None

    def close(self) -> None:
        """Stop reading, and free the samples and batches."""
        self.drop_ahead()
        self.reader.close()
