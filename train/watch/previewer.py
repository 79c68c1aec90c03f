"""Previews: sample prompts with the LoRA during training, as ComfyUI's own nodes would."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.core import is_patched, loaded_from
from ...compile.attach import compiled_model_of
from ...lora.files.formats import convert
from ...memory.host.flat_weights import restore_inference_mode
from ...memory.swap.host_copies import host_copies_retained
from ...memory.weights.frozen import unload
from ...models.catalogue.registry import family_of, known_family
from ...models.family import Family
from ..config.expert_pair import HIGH
from ..loop.watcher import RunView
from ..preview.gallery import FOLDER, SHEET, Shot, read_index, save_shot, write_index, write_sheet
from ..preview.sampling import (
    Sampling,
    Stages,
    check_fits,
    check_text,
    decode,
    preserve_random_state,
    sample_latent,
    titled,
    with_lora,
)
from ..report import errors
from ..report.observer import SAMPLE, STOP

log = logging.getLogger(__name__)

MOST_FAILURES = 2  # consecutive failures after which no more previews are made


@dataclass(frozen=True, eq=False)
class Preview:
    """Preview of one prompt.

    sampling: prompt and sampling settings.
    every_n_steps: optimizer steps between two previews, 0 previews at the end only.
    at_start: preview before the first step too.
    use_ema: sample with the weights that would be saved (EMA), else with the trained weights.
    model: MODEL to sample on, None for the one that is trained.
    """

    sampling: Sampling
    every_n_steps: int = 250
    at_start: bool = True
    use_ema: bool = True
    model: ModelPatcher | None = None

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ValueError(f"every_n_steps is {self.every_n_steps}; set it to 0 (at the end only) or more.")

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether a preview is due after `step` of `steps` steps."""
        if step == 0:
            return self.at_start
        return step == steps or bool(self.every_n_steps) and step % self.every_n_steps == 0


@dataclass(frozen=True, eq=False)
class Partner:
    """Other expert of Wan 2.2, for previews with both.

    model: its MODEL.
    side: `high_noise` or `low_noise`.
    lora: its trained LoRA, None before it is trained.
    boundary: sigma between the experts, None takes the model's own.
    """

    model: ModelPatcher
    side: str
    lora: Mapping[str, Tensor] | None = None
    boundary: float | None = None


@dataclass(frozen=True, eq=False)
class Row:
    """Row of the contact sheet.

    number: index from 0.
    title: title on the sheet.
    preview: its prompt.
    seed: its seed.
    """

    number: int
    title: str
    preview: Preview
    seed: int

    def shot(self, step: int, frames: int = 1) -> Shot:
        """Return the shot of this row at a step."""
        facts = {"seed": self.seed, **self.preview.sampling.facts()}
        if (model := self.preview.model) is not None:
            facts["model"] = Path(loaded_from(model)).name or type(model.model).__name__
        return Shot(step, self.number, self.title, facts, frames)


def rows_of(previews: Sequence[Preview]) -> list[Row]:
    """Make one row for each prompt and seed."""
    by_sampling = {id(preview.sampling): preview for preview in previews}
    rows = enumerate(titled([preview.sampling for preview in previews]))
    return [Row(number, title, by_sampling[id(sampling)], seed) for number, (title, sampling, seed) in rows]


def check_previews(previews: Sequence[Preview], family: Family, model: ModelPatcher) -> None:
    """Raise ValueError if a preview's text, VAE, latent or size does not match the model that samples it."""
    for number, preview in enumerate(previews, 1):
        sampled = preview.model or model
        sampled_family = family if sampled is model else known_family(sampled.model)
        try:
            check_text(
                preview.sampling,
                0 if sampled_family is None else sampled_family.conditioning.text_width(sampled.model),
                number,
            )
            check_fits(preview.sampling, sampled)
        except ValueError as error:
            raise ValueError(f"preview: {error}") from None


class Previewer:
    """Watcher that makes the previews of one run.

    model: the user's MODEL with its patches, block swap and compile settings.
    partner: the other expert of Wan 2.2, None for a single model.
    texts: text chunks of the sheet, by key: the graph that made it.

    A preview with a MODEL of its own is sampled on that, see `other_model`.

    The trained weights are off the device while it samples. Afterwards all models are unloaded, and the next training
    step loads the trained weights again.

    Raises ValueError if a preview does not match the model.
    """

    def __init__(
        self,
        previews: Sequence[Preview],
        model: ModelPatcher,
        partner: Partner | None = None,
        texts: Mapping[str, str] | None = None,
    ):
        family = family_of(model)
        check_previews(previews, family, model)
        self.rows = rows_of(previews)
        self.model = model
        self.partner = partner
        self.texts = texts or {}
        self.boundary = None if partner is None else partner.boundary or family.sampling.expert_boundary(model.model)
        self.own_models = [model] if partner is None else [model, partner.model]
        # Each once, by identity: previews of a chain may share one.
        self.other_models = list({id(p.model): p.model for p in previews if p.model is not None}.values())
        self.models = [*self.own_models, *self.other_models]
        self.shots: list[Shot] | None = None
        self.folder: Path | None = None
        self.failures = 0
        self.graphs_before = self._graphs()

    def between_steps(self, run: RunView) -> None:
        """Make the previews that are due or requested. A failure is a note, or an error if the model stays patched.

        Raises CannotContinue if ComfyUI could not remove the LoRA from the model.
        """
        step, steps = run.progress.step, run.settings.steps
        is_requested = not {SAMPLE, STOP}.isdisjoint(run.requests)  # a stopped run ends like one at its last step
        due = [row for row in self.rows if is_requested or row.preview.is_due(step, steps)]
        if not (is_requested or self.is_due(step, steps)):
            return
        if self.shots is None:
            self._begin(run)
        world = run.world
        own_shots = list[Shot]()
        failed = ""
        try:
            own_shots = self._make(run, step, due)
        except Exception as error:
            log.warning("A preview failed", exc_info=error)
            if any(map(is_patched, self.own_models)):  # patched weights remain: must not be trained on
                raise errors.not_unloaded(step) from error
            failed = _failure_text(error)
        reasons = world.all_gather(f"preview failures {step}", failed)
        rank_shots = world.all_gather(f"previews {step}", [asdict(shot) for shot in own_shots])
        failed = next((reason for reason in reasons if reason), "")
        if not failed:
            shots = [Shot(**entries) for entries_of_rank in rank_shots for entries in entries_of_rank]
            failed = world.broadcast(f"sheet {step}", self._write(run, step, shots))
        self.failures = self.failures + 1 if failed else 0
        if failed:
            run.observer.note(self._failed(step, failed))
        if step < steps:
            run.observer.phase(run.placed.execution.runner.progress_text())

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether a preview is to be made after `step` of `steps` steps."""
        return self.failures < MOST_FAILURES and any(row.preview.is_due(step, steps) for row in self.rows)

    def _begin(self, run: RunView) -> None:
        """Report sampling notes once, and read the shots of the session that this one resumes."""
        if self.partner is not None:
            with_it = "with its LoRA" if self.partner.lora else "as it came in"
            run.observer.note(
                f"Previews are sampled with both experts, which meet at sigma {self.boundary:g}; the "
                f"{self.partner.side.replace('_', ' ')} one is {with_it}."
            )
        self.folder = run.loras.folder.path / FOLDER
        row_shots = {row.number: row.shot(0) for row in self.rows}
        earlier_shots = [s for s in read_index(self.folder) if s.step <= run.progress.step]
        self.shots = [s for s in earlier_shots if s.row in row_shots and row_shots[s.row].same_row(s)]

    def _failed(self, step: int, reason: str) -> str:
        consequence = (
            "no more are made" if self.failures >= MOST_FAILURES else "training goes on and the next one is tried"
        )
        return f"The preview at step {step} failed ({reason}); {consequence}."

    def _make(self, run: RunView, step: int, due: list[Row]) -> list[Shot]:
        """Make the previews of a step and their files; on several ranks, this rank's part of them."""
        assert self.folder is not None
        due, shots = _part(due, run.world.rank, run.world.world_size), []
        if not due:
            return []
        loras = {ema: convert(run.learner.snapshot(ema)) for ema in {row.preview.use_ema for row in due}}
        run.observer.phase(f"Preview at step {step}")
        untrained = step == 0 and run.settings.network.start_from is None
        stages = {_sampled_by(row): self._stages_of(row.preview, loras, untrained) for row in due}
        unload()  # the trained weights and the sampled model may not fit on the device together
        with ExitStack() as stack:
            for model in self.models:
                restore_inference_mode(model.model)
                stack.enter_context(host_copies_retained(model))
            # Exited in reverse order: models are unloaded outside inference mode, then the host copies are restored.
            stack.callback(unload)
            stack.enter_context(preserve_random_state(run.placed.weights.device))
            stack.enter_context(torch.inference_mode())
            check = run.observer.check_interrupted
            latents = [sample_latent(stages[_sampled_by(r)], r.preview.sampling, r.seed, check) for r in due]
            for row, latent in zip(due, latents, strict=True):
                check()
                frames = decode(row.preview.sampling.vae, latent)
                shot = row.shot(step, len(frames))
                save_shot(self.folder, shot, frames, row.preview.sampling.fps)
                shots.append(shot)
        return shots

    def _write(self, run: RunView, step: int, shots: list[Shot]) -> str:
        """Write index and sheet with the shots of a step. Returns the reason of a failure, else an empty string."""
        assert self.folder is not None and self.shots is not None
        places = {(shot.step, shot.row) for shot in shots}
        self.shots = [s for s in self.shots if (s.step, s.row) not in places] + shots
        self.shots.sort(key=lambda shot: (shot.step, shot.row))
        if not run.world.is_first:
            return ""
        try:
            write_index(self.folder, self.shots)
            sheet = write_sheet(self.folder, self.shots, [row.title for row in self.rows], self.texts)
        except Exception as error:
            log.warning("The sheet of the previews could not be written", exc_info=error)
            return _failure_text(error)
        run.observer.previewed(sheet, step)
        return ""

    def _stages_of(self, preview: Preview, loras: Mapping[bool, dict[str, Tensor]], untrained: bool) -> Stages:
        """Put the LoRA on the models that sample a preview.

        loras: the LoRA by `use_ema`.
        untrained: True before the first step of a new LoRA. It does not change the trained model, but may
            change another: DoRA's magnitudes are those of the trained model's weights.
        """
        lora = loras[preview.use_ema]
        if preview.model is None:
            return self._stages(lora)
        return Stages(preview.model if untrained else with_lora(preview.model, lora)[0])

    def _stages(self, lora: dict[str, Tensor]) -> Stages:
        own_model, _ = with_lora(self.model, lora)
        if self.partner is None or self.boundary is None:
            return Stages(own_model)
        other = self.partner.model
        if self.partner.lora:
            other, _ = with_lora(other, convert(self.partner.lora))
        high, low = (other, own_model) if self.partner.side == HIGH else (own_model, other)
        return Stages(high, low, self.boundary)

    def summary(self, run: RunView) -> dict[str, Any]:
        """Return the preview files, relative to the run's folder, and the graphs that sampling compiled."""
        if not self.shots:
            return {}
        files = [f"{FOLDER}/{shot.file}" for shot in self.shots]
        graphs = self._graphs() - self.graphs_before
        return {"previews": {"sheet": f"{FOLDER}/{SHEET}", "files": files, "graphs_compiled": graphs}}

    def _graphs(self) -> int:
        """Count the graphs that Compile Model has compiled so far for the trained MODEL and those of previews."""
        attached = [compiled_model_of(model) for model in (self.model, *self.other_models)]
        compiled = {id(compiled_model): compiled_model for compiled_model in attached if compiled_model is not None}
        return sum(compiled_model.report().counts().graphs for compiled_model in compiled.values())


def _part(due: list[Row], rank: int, size: int) -> list[Row]:
    """Return the rows of a rank: a contiguous slice, in an order in which each model is loaded once."""
    keys = list(dict.fromkeys(map(_sampled_by, due)))
    due = sorted(due, key=lambda row: keys.index(_sampled_by(row)))
    return due[len(due) * rank // size : len(due) * (rank + 1) // size]


def _failure_text(error: Exception) -> str:
    if comfy.model_management.is_oom(error):
        return "out of memory; make the previews smaller"
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _sampled_by(row: Row) -> tuple[int, bool]:
    """Return the key of the MODEL and the weights that a row is sampled with; rows of one key share a loaded model."""
    return id(row.preview.model), row.preview.use_ema
