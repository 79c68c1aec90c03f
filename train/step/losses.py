"""Losses of a step: the terms of a batch's loss, one by one, to call backward on each."""

from collections import deque
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...lora.negation import negated
from ..concept.targets import ConceptTarget
from ..objective.batch import Batch
from ..objective.guidance_loss import guided_target
from ..objective.loss import training_loss
from ..objective.options import ObjectiveOptions
from ..objective.preservation import preservation_facts, preservation_loss
from ..placement.placed_model import PlacedModel


class StepLosses:
    """Terms of a run's loss.

    preserved: the last preservation losses, on the device: reading them would synchronise.
    """

    def __init__(self, placed: PlacedModel, objective: ObjectiveOptions):
        self.placed, self.objective = placed, objective
        self.preserved: deque[Tensor] = deque(maxlen=50)

    def __call__(self, batch: Batch, rng_key: tuple[int, int]) -> Generator[Tensor, None, None]:
        """Yield the terms of a batch's loss, each a scalar on the device.

        Call backward on each before asking for the next: then only one forward's activations are in memory.
        """
        if batch.concept is not None:
            yield from self.concept_losses(batch, batch.concept, rng_key)
            return
        preserved, scale = batch.preserved, self.objective.guidance_loss_scale
        if batch.unconditional is not None:
            batch = replace(
                batch,
                target=guided_target(
                    batch.target, batch.inputs, batch.unconditional, self.placed.velocity_without, scale
                ),
            )
        frozen_velocity = None if preserved is None else self.placed.velocity_without(preserved.inputs)
        yield self.batch_loss(batch, rng_key)
        if preserved is not None and frozen_velocity is not None:
            velocity = self.placed.velocity(preserved.inputs, (*rng_key, "class"))
            loss = self.objective.preservation_weight * preservation_loss(velocity, frozen_velocity, preserved)
            self.preserved.append(loss.detach())
            yield loss

    def concept_losses(
        self, batch: Batch, concept: ConceptTarget, rng_key: tuple[int, int]
    ) -> Generator[Tensor, None, None]:
        """Yield the loss of each pass of a concept, whose mean is its loss; the adapter stays negated for its backward.

        Close the iterator if it is left before its end.
        """
        passes = concept.passes(batch.inputs, batch.target, self.placed.velocity_without)
        for training_pass in passes:
            with negated(self.placed.network) if training_pass.is_negated else nullcontext():
                pass_batch = replace(batch, inputs=training_pass.inputs, target=training_pass.target)
                yield self.batch_loss(pass_batch, rng_key) / len(passes)

    def batch_loss(self, batch: Batch, rng_key: tuple[int, int]) -> Tensor:
        """Return the mean training loss of a batch, a scalar on the device."""
        velocity = self.placed.velocity(batch.inputs, rng_key)
        losses = training_loss(self.objective, velocity, batch.target, batch.sigma, batch.weights, batch.signal)
        return (losses if batch.loss_weights is None else losses * batch.loss_weights).mean()

    def facts(self) -> dict[str, Any]:
        """Return entries for the summary."""
        return preservation_facts(self.preserved)
