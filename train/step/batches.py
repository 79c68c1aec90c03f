"""Batches of a run, step by step; the first of each step is made while the device computes the previous step."""

import logging
from collections.abc import Callable, Iterator
from itertools import chain

import torch

from ...data.loader import SampleReader, SampleRequest, batch_order, choose_variant, skip_batches
from ...models.family import Family
from ..batch import Batch, make_batch, strata_sizes
from ..objective.guidance_loss import with_empty_caption
from ..objective.preservation import with_class_caption
from ..preflight.context import RunContext
from .clock import StepClock

log = logging.getLogger(__name__)

MicroBatch = list[SampleRequest]
RngKey = tuple[int, int]
"""(step, micro-batch)"""


class StepBatches:
    """Source of a run's batches, in the order of its data.

    A step depends only on its number and its position in the data, so a batch made ahead equals the one that its step
    would make. A state stores the number of batches that were trained on: a batch made ahead and dropped is made again.

    share: this rank's share of each step; random numbers depend on a sample's index in the whole step.
    reader: reads the samples of this step and the next.
    """

    def __init__(self, context: RunContext, device: torch.device, clock: StepClock):
        self.patcher, self.settings, self.device, self.clock = context.patcher, context.settings, device, clock
        self.family: Family = context.family
        self.share = context.share
        self.samples = context.data.samples
        self.strata = strata_sizes(self.settings, self.samples)
        self.reader = SampleReader(self.samples)
        self._order: Iterator[tuple[int, ...]] = iter(())
        self._upcoming: list[MicroBatch] = []
        self._ahead: tuple[RngKey, MicroBatch, Batch] | None = None
        self._makes_ahead = True

    def start(self, step: int, batches: int, check_interrupted: Callable[[], None]) -> None:
        """Begin after the `batches` that `step` steps were trained on."""
        self._order = batch_order(self.samples, self.settings.batch_size, self.settings.seed)
        skip_batches(self._order, batches, check_interrupted)
        self._upcoming = self.next_micro_batches(self._order, step)

    def for_step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of the next step, and prefetch its samples and those of the step after."""
        # One step ahead, so that its samples are read from disk while this step computes.
        micro_batches, self._upcoming = self._upcoming, self.next_micro_batches(self._order, step + 1)
        self.reader.prefetch(chain(*micro_batches, *self._upcoming))
        return micro_batches

    def first_of(self, step: int, batches: int, count: int) -> list[tuple[RngKey, MicroBatch]]:
        """Return the first `count` micro-batches of a run that begins after the `batches` of `step` steps.

        On several ranks, the first that this one takes.
        """
        order = batch_order(self.samples, self.settings.batch_size, self.settings.seed)
        skip_batches(order, batches, lambda: None)
        micro_batches: list[tuple[RngKey, MicroBatch]] = []
        while len(micro_batches) < count:
            micro_batches += [
                ((step, micro), requests)
                for micro, requests in self.share.numbered(self.next_micro_batches(order, step))
            ]
            step += 1
        return micro_batches[:count]

    def next_micro_batches(self, batches: Iterator[tuple[int, ...]], step: int) -> list[MicroBatch]:
        """Take the micro-batches of one step and choose a crop, flip and caption variant for each sample.

        Returns this rank's micro-batches, and of each its part.
        """
        indices_by_micro = [next(batches) for _ in range(self.settings.gradient_accumulation)]
        samples, seed = self.samples, self.settings.seed

        def request(index: int, micro: int, position: int) -> SampleRequest:
            choice = choose_variant(samples[index], seed, (step, micro), position)
            objective = self.settings.objective
            return index, with_empty_caption(with_class_caption(choice, samples[index], objective), objective)

        return [
            [request(indices[position], micro, position) for position in self.share.samples]
            for micro, indices in enumerate(indices_by_micro)
            if micro in self.share.micro_batches
        ]

    def make(self, requests: MicroBatch, rng_key: RngKey) -> Batch:
        """Return the batch of these samples on the device; one that was made ahead is returned once."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (rng_key, requests):
            return ahead[2]
        del ahead  # before its memory is needed
        with self.clock.spend("data"), torch.no_grad():
            samples = [(self.samples[request[0]], self.reader.read(request)) for request in requests]
            options, seed, part = self.settings.objective, self.settings.seed, (self.share.part, self.share.parts)
            return make_batch(
                self.patcher, self.family, samples, options, self.device, seed, rng_key, self.strata, part
            )

    def make_ahead(self, step: int) -> None:
        """Make the first batch of the next step, number `step`, and keep it for `make`.

        Never raises: a failure is left to the step itself, which runs after this step's update and can retry with a
        smaller memory plan. From then on no batch is made ahead.
        """
        if not self._makes_ahead or not self._upcoming:
            return
        requests, rng_key = self._upcoming[0], (step, self.share.first_micro)
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
