"""Validation: the loss on held-out samples, at fixed noise levels with fixed noise."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from ...data.samples import GraphKey, Sample, SampleTensors, TrainingData
from ..config.settings import ValidationOptions
from ..loop.watcher import RunView
from ..objective.batch import fixed_batch
from ..objective.loss import velocity_loss

log = logging.getLogger(__name__)

Row = tuple[int, int]
"""(sample index, sigma index)."""


class Validation:
    """Watcher that measures the validation loss when due and appends the point to the run's progress.

    A point is `{"step", "loss", "sigmas", "losses"}`. `losses` holds for each sigma the mean over the samples of the
    output's mean squared error. `loss` is the mean of these.
    The weights are those that a file would hold, and dropout is off. The forward is that of training, in the same
    compiled graphs and batch size, so that validation compiles nothing of its own; its gradient is not used.
    """

    def __init__(self, options: ValidationOptions, data: TrainingData):
        self.options = options
        self.samples = data.samples
        self.sigmas = options.noise_levels

    def between_steps(self, run: RunView) -> None:
        """Measure the loss if due, unless this step was already measured before a resume."""
        progress = run.progress
        if not self.is_due(progress.step, run.settings.steps):
            return
        if any(point["step"] == progress.step for point in progress.validation):
            return
        run.observer.phase(f"Validating at step {progress.step}")
        losses = self.losses(run)
        if progress.step < run.settings.steps:
            run.observer.phase(run.placed.execution.runner.progress_text())
        loss = math.fsum(losses) / len(losses)
        if not math.isfinite(loss):
            run.observer.note(f"The validation loss at step {progress.step} is NaN or infinite and is skipped.")
            return
        point = {"step": progress.step, "loss": loss, "sigmas": list(self.sigmas), "losses": losses}
        progress.validation.append(point)
        run.observer.validated(progress.step, loss)
        if self.options.keep_best and progress.step:  # before the first step there is nothing to save
            run.best.write_if_better(loss)
        start = progress.validation[0]
        if progress.step == run.settings.steps and start["step"] == 0:
            if all(later["loss"] >= start["loss"] for later in progress.validation[1:]):
                run.observer.note(
                    "The validation loss never went below its value at the start; train on more pictures, or lower "
                    "learning_rate."
                )

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether the loss is to be measured after `step` of `steps` steps."""
        if step == 0:
            return self.options.at_start
        return step % self.options.every_n_steps == 0 or step == steps

    def losses(self, run: RunView) -> list[float]:
        """Return the mean loss at each sigma. The batches are divided among the ranks."""
        sums: dict[int, list[float]] = defaultdict(list)
        own_losses = run.attempt(lambda: self.own_losses(run))
        for rank_losses in run.world.all_gather(f"validation {run.progress.step}", own_losses):
            for place, loss in rank_losses:
                sums[place].append(loss)
        return [math.fsum(sums[place]) / len(sums[place]) for place in range(len(self.sigmas))]

    def own_losses(self, run: RunView) -> list[tuple[int, float]]:
        """Measure this rank's batches. Returns (sigma index, loss) for each of their rows."""
        results: list[tuple[int, float]] = []
        world = run.world
        read: dict[int, SampleTensors] = {}
        run.placed.weights.ensure()
        with run.learner.as_saved():
            batches = self._batches(run.placed.settings.batch_size)
            for rows in islice(batches, world.rank, None, world.world_size):
                run.observer.check_interrupted()
                read = {n: read[n] if n in read else self.samples[n].load() for n, _ in rows}
                losses = self._batch_losses(run, rows, read)
                results += [(place, loss) for (_, place), loss in zip(rows, losses, strict=True)]
            run.placed.memory.sharing.finish()
        return results

    def _batches(self, size: int) -> Iterator[list[Row]]:
        """Yield batches of (sample, sigma) indices, each of one graph key, that cover every pair."""
        keys: dict[GraphKey, list[Row]] = defaultdict(list)
        for number, sample in enumerate(self.samples):
            keys[sample.graph_key] += [(number, place) for place in range(len(self.sigmas))]
        for rows in keys.values():
            yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def _batch_losses(self, run: RunView, rows: list[Row], read: Mapping[int, SampleTensors]) -> list[float]:
        """Return one loss per row."""
        batch_rows = [(self.samples[n], read[n], self.sigmas[place]) for n, place in rows]
        return row_losses(run, batch_rows, self.options.seed)

    def summary(self, run: RunView) -> dict[str, Any]:
        """Return samples, sigmas, points and the best LoRA for the run's summary."""
        entries = {
            "samples": [sample.name for sample in self.samples],
            "sigmas": list(self.sigmas),
            "points": list(run.progress.validation),
            "best": run.best.record.plain() if run.best.record else None,
        }
        return {"validation": entries}


def row_losses(
    run: RunView, rows: Sequence[tuple[Sample, SampleTensors, float]], seed: int, trained: bool = True
) -> list[float]:
    """Compute the loss of each (sample, tensors, sigma), all of one graph key, with the noise of its name and the seed.

    The forward is that of training, in the same compiled graphs, so it compiles nothing; its gradient is not used.
    A compiled graph has a fixed batch size, so a short batch is padded with its last row.

    trained: with the LoRA, else the base model.
    """
    padded = [*rows, *[rows[-1]] * (run.placed.settings.batch_size - len(rows))]
    guidance = run.settings.objective.guidance
    with torch.no_grad():
        batch = fixed_batch(run.placed.patcher, run.placed.family, padded, guidance, run.placed.weights.device, seed)
    if trained:
        velocity = run.placed.velocity(batch.inputs, None).detach()
        run.placed.execution.runner.checkpointing.discard_offloaded()  # no backward follows
    else:
        velocity = run.placed.velocity_without(batch.inputs)
    return velocity_loss(velocity, batch.target, weights=batch.weights).double().tolist()[: len(rows)]
