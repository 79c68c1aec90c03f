"""Order of a run's samples: the micro-batches of each step."""

from collections.abc import Callable, Iterator

from ...data.loader import SampleRequest, batch_order, choose_variant, skip_batches
from ..objective.guidance_loss import with_empty_caption
from ..objective.preservation import with_class_caption
from ..preflight.context import RunContext

MicroBatch = list[SampleRequest]
RngKey = tuple[int, int]
"""(step, micro-batch)"""


class StepOrder:
    """Micro-batches of a run, step by step, of each those samples that this rank takes.

    A step depends only on its number and its position in the data.

    share: this rank's share of each step; random numbers depend on a sample's index in the whole step.
    upcoming: micro-batches of the step after the last one that `next_step` returned.
    """

    def __init__(self, context: RunContext) -> None:
        self.settings = context.settings
        self.share = context.share
        self.samples = context.data.samples
        self.upcoming: list[MicroBatch] = []
        self._batches: Iterator[tuple[int, ...]] = iter(())

    def start(self, step: int, batches: int, check_interrupted: Callable[[], None]) -> None:
        """Begin after the `batches` that `step` steps were trained on."""
        self._batches = self._batches_after(batches, check_interrupted)
        self.upcoming = self.next_micro_batches(self._batches, step)

    def next_step(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of the next step, number `step`, and choose those of the step after."""
        micro_batches, self.upcoming = self.upcoming, self.next_micro_batches(self._batches, step + 1)
        return micro_batches

    def first_of(self, step: int, batches: int, count: int) -> list[tuple[RngKey, MicroBatch]]:
        """Return the first `count` micro-batches of a run that begins after the `batches` of `step` steps.

        On several ranks, the first that this one takes.
        """
        order = self._batches_after(batches, lambda: None)
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
        return [
            [self._request(indices[position], (step, micro), position) for position in self.share.samples]
            for micro, indices in enumerate(indices_by_micro)
            if micro in self.share.micro_batches
        ]

    def _request(self, index: int, rng_key: RngKey, position: int) -> SampleRequest:
        """Return a sample's index and variant. position: its index in the whole micro-batch."""
        sample, objective = self.samples[index], self.settings.objective
        variant = choose_variant(sample, self.settings.seed, rng_key, position)
        return index, with_empty_caption(with_class_caption(variant, sample, objective), objective)

    def _batches_after(self, batches: int, check_interrupted: Callable[[], None]) -> Iterator[tuple[int, ...]]:
        order = batch_order(self.samples, self.settings.batch_size, self.settings.seed)
        skip_batches(order, batches, check_interrupted)
        return order
