"""Loss by picture: training pictures in rotation, with the fixed noise of validation, beside the base model's loss."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from ...common.files import write_atomically
from ...common.text import quantity
from ...data.samples import SampleTensors, TrainingData
from ..config.settings import ValidationOptions
from ..loop.watcher import RunView
from ..report.observer import STOP
from ..runs.run_names import PICTURE_SHEET
from .picture_sheet import draw_sheet
from .rotation import SHARE, Rotation, budget, list_pictures
from .validation import row_losses
from .verdicts import PictureLoss, judge, relative_loss

SUMMARY = "loss_by_picture"


@dataclass(frozen=True)
class _Losses:
    """Losses of one picture, one at each noise level.

    base: losses of the base model.
    points: losses with the LoRA, by step.
    """

    base: tuple[float, ...]
    points: dict[int, tuple[float, ...]]


class PictureLosses:
    """Watcher that measures the loss of single training pictures, with the LoRA and without it.

    The work is at most SHARE of the run's, counted in forwards, so that it is the same when a run is repeated. With
    that, at the last step (or when the user stops the run) it measures as many pictures as it can at as many of the
    validation's noise levels as it can, and among them some held-out ones; the rest is then spent between
    the steps, on one picture after the other. The base model is measured once for each picture.

    A loss by itself says little: a plain picture has a low one. Relative to the base model, at the same noise, the
    picture's difficulty cancels.

    measured: losses by picture.
    forwards: forwards of samples so far.
    """

    def __init__(self, options: ValidationOptions, trained: TrainingData, held_out: TrainingData, batch: int) -> None:
        self.options = options
        learnt = list_pictures([sample for sample in trained.samples if not sample.regularisation])
        self.rotation = Rotation(learnt, list_pictures(held_out.samples), batch, options.seed)
        self.levels: tuple[float, ...] = ()
        self.measured: dict[int, _Losses] = {}
        self.forwards = 0

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether pictures are measured after `step` of `steps` steps."""
        return step > 0 and (step == steps or step % self.options.every_n_steps == 0)

    def between_steps(self, run: RunView) -> None:
        """Measure the next pictures if due, unless that was done at this step before a resume."""
        self._restore(run.progress.pictures)
        step, steps = run.progress.step, run.settings.steps
        ends = step == steps or STOP in run.requests
        if not (ends or self.is_due(step, steps)):
            return
        rotation, total = self.rotation, budget(run.settings, steps)
        self.levels = self.levels or rotation.choose_levels(self.options.noise_levels, total)
        if not any(step in losses.points for losses in self.measured.values()):
            trained = [losses for index, losses in self.measured.items() if index < rotation.trained]
            turns = sum(len(losses.points) for losses in trained)
            if ends:
                candidates, allowed = rotation.mixed(turns), budget(run.settings, step)
            else:
                spare = max(0, total - rotation.whole_cost(self.levels))
                candidates, allowed = rotation.turns(turns), spare * step // steps
            self._measure(run, rotation.choose(candidates, self.levels, allowed - self.forwards, self._is_new))
        if ends:
            self._report(run)

    def summary(self, run: RunView) -> dict[str, Any]:
        """Return the ranking for the run's summary; nothing before pictures were measured."""
        return {SUMMARY: self.report()} if any(index < self.rotation.trained for index in self.measured) else {}

    def report(self) -> dict[str, Any]:
        """Return the ranking as plain values, see `judge`, with the noise levels and the number of pictures."""
        trained: list[PictureLoss] = []
        held_out: list[PictureLoss] = []
        for index, losses in sorted(self.measured.items()):
            *earlier, step = sorted(losses.points)
            relative = tuple((point, relative_loss(losses.points[point], losses.base)) for point in earlier)
            name = self.rotation.pictures[index].name
            picture = PictureLoss(name, losses.points[step], losses.base, step, relative)
            side = trained if index < self.rotation.trained else held_out
            side.append(picture)
        return {**judge(trained, held_out), "sigmas": list(self.levels), "of": self.rotation.trained}

    def _is_new(self, index: int) -> bool:
        return index not in self.measured

    def _measure(self, run: RunView, pictures: Sequence[int]) -> None:
        """Measure the pictures, the base model's loss too if it is not known, and count the work."""
        if not pictures:
            return
        step = run.progress.step
        run.observer.phase(f"Measuring the loss of {quantity(len(pictures), 'picture')} at step {step}")
        self.forwards += self.rotation.cost(pictures, self.levels, self._is_new)
        base = self._losses(run, "base", list(filter(self._is_new, pictures)))
        trained = self._losses(run, "LoRA", pictures)
        for index in pictures:
            losses = self.measured.get(index) or _Losses(base[index], {})
            if all(map(math.isfinite, (*losses.base, *trained[index]))):
                self.measured[index] = _Losses(losses.base, {**losses.points, step: trained[index]})
        run.progress.note_pictures(self._plain())
        if step < run.settings.steps:
            run.observer.phase(run.placed.execution.runner.progress_text())

    def _losses(self, run: RunView, model: str, pictures: Sequence[int]) -> dict[int, tuple[float, ...]]:
        """Return the losses of pictures at each level. The batches are divided among the ranks.

        model: LoRA, or base for the model without it.
        """
        rank_losses = run.attempt(lambda: self._rank_losses(run, model, pictures))
        gathered = run.world.all_gather(f"pictures {model} {run.progress.step}", rank_losses)
        losses = {(index, sigma): loss for index, sigma, loss in chain(*gathered)}
        return {index: tuple(losses[index, sigma] for sigma in self.levels) for index in pictures}

    def _rank_losses(self, run: RunView, model: str, pictures: Sequence[int]) -> list[tuple[int, float, float]]:
        """Measure this rank's batches. Returns (picture, sigma, loss) for each of their rows."""
        results: list[tuple[int, float, float]] = []
        run.placed.weights.ensure()
        device = run.placed.weights.device
        # Nothing here draws from the global generators; what a model's code may draw is undone.
        with run.learner.as_saved(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            read: Mapping[int, SampleTensors] = {}
            batches = self.rotation.batches(pictures, self.levels)
            for rows in islice(batches, run.world.rank, None, run.world.world_size):
                run.observer.check_interrupted()
                samples = {index: self.rotation.pictures[index].sample for index, _ in rows}
                read = {index: read[index] if index in read else sample.load() for index, sample in samples.items()}
                inputs = [(samples[index], read[index], sigma) for index, sigma in rows]
                losses = row_losses(run, inputs, self.options.seed, trained=model == "LoRA")
                results += [(index, sigma, loss) for (index, sigma), loss in zip(rows, losses, strict=True)]
            run.placed.memory.sharing.finish()
        return results

    def _plain(self) -> dict[str, Any]:
        """Return all measurements as plain values for the state."""
        entries = [
            [index, list(losses.base), [[step, list(point)] for step, point in losses.points.items()]]
            for index, losses in sorted(self.measured.items())
        ]
        return {"levels": list(self.levels), "spent": self.forwards, "entries": entries}

    def _restore(self, stored: Mapping[str, Any]) -> None:
        """Continue from the measurements of the state that the run was resumed from."""
        if self.levels or not stored:
            return
        self.levels, self.forwards = tuple(stored["levels"]), stored["spent"]
        for index, base, points in stored["entries"][: len(self.rotation.pictures)]:
            self.measured[index] = _Losses(tuple(base), {step: tuple(point) for step, point in points})

    def _report(self, run: RunView) -> None:
        """Write the sheet, and note it if not all pictures were measured."""
        if not run.world.is_first:
            return
        pictures = self.rotation.pictures[: self.rotation.trained]
        if not self.summary(run):
            run.observer.note(
                f"loss_by_picture measured nothing, because {SHARE:.0%} of {quantity(run.progress.step, 'step')} "
                "buy no picture; train longer, or switch it off."
            )
            return
        report = self.report()
        if (count := len(report["pictures"])) < len(pictures):
            run.observer.note(
                f"loss_by_picture measured {count} of {quantity(len(pictures), 'picture')}, which is what {SHARE:.0%} "
                "of the run buys; raise steps to measure more."
            )
        sheet = draw_sheet(report, {picture.name: picture.sample.path for picture in pictures})
        with suppress(OSError):  # a full disk: the summary has the numbers
            write_atomically(run.best.folder.path / PICTURE_SHEET, lambda file: sheet.save(file, "PNG"))
