"""Comparison of LoRAs: images or videos of several LoRAs from the same noise, on one contact sheet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from comfy.model_patcher import ModelPatcher
from PIL import Image
from torch import Tensor

from ...common.core import held_models
from ...common.text import quantity, shortlist
from ...lora.files.comfyui_loader import read_otherwise
from ...lora.files.coverage import check_finite, reading_notes
from ...lora.files.patches import DoesNotFit
from ...lora.files.reader import read_patches
from ...memory.host.flat_weights import restore_inference_mode
from ...memory.weights.frozen import unload
from ...models.catalogue.registry import known_family, names_of_model
from ..config.expert_pair import SAME_WEIGHTS, meeting_sigma
from .contact_sheet import Cell, render_frames, render_sheet
from .sampling import (
    Sampling,
    Stages,
    check_fits,
    check_text,
    decode,
    sample_latents,
    titled,
    with_lora,
)
from .scores import Scores

Score = Callable[[Mapping[Cell, Tensor], Sequence[str], Callable[[], None]], Sequence[Scores]]
"""Scores of the columns in the order in which they are shown, of the pictures by (row, column), the titles of the
columns and a check that may raise."""


@dataclass(frozen=True)
class AppliedLora:
    """LoRA at a strength.

    name: name in messages.
    strength: strength of the patches.
    read: reads the tensors from disk; called again for each use, so that one column's LoRA is in memory at a time.
    """

    name: str
    strength: float
    read: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Column:
    """Column of the sheet.

    title: its heading.
    lora: LoRA on the model, None for the bare model.
    low_noise: LoRA on the low noise expert, None for the bare one.
    """

    title: str
    lora: AppliedLora | None = None
    low_noise: AppliedLora | None = None


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    grid: the contact sheet; one image per moment if it is animated.
    pictures: samples row by row, each (frames, H, W, 3), 0 to 1.
    notes: sentences on LoRAs that were not read as a whole, or that ComfyUI's own loaders read otherwise.
    scores: of the columns in their order; empty if they were not asked for.
    """

    grid: list[Image.Image]
    pictures: list[Tensor]
    notes: list[str]
    scores: Sequence[Scores] = ()


def compare(
    stages: Stages,
    samplings: Sequence[Sampling],
    columns: Sequence[Column],
    tell: Callable[[], None],
    check: Callable[[], None],
    frames_shown: int = 1,
    score: Score | None = None,
) -> Comparison:
    """Sample every prompt and seed with every LoRA, as core's Load LoRA, KSampler and VAE Decode do with a LoRA that
    core reads as a whole.

    Two experts are sampled like two KSampler (Advanced) that share the steps. On return and on error the models are
    unloaded with their own weights. Call it under inference mode.

    tell: called after each sampler step; may raise.
    check: called between images; may raise.
    frames_shown: frames of a video on the sheet, see `contact_sheet.render_frames`.
    score: scores the columns, and orders them.

    Raises ValueError, before anything is sampled, for invalid sampling settings and a LoRA that changes no weight.
    """
    _check(stages, samplings)
    models = [model for model in (stages.model, stages.low_noise) if model is not None]
    for model in models:
        if not any(patcher.model is model.model for _, patcher in held_models()):
            restore_inference_mode(model.model)
    for column in columns:
        check()
        _with_loras(stages, column)
    notes = _notes(stages, columns)
    rows = titled(samplings)
    # Column by column, so that each LoRA is patched once; the VAE last, so that it is loaded once.
    latents: dict[Cell, Tensor] = {}
    try:
        for number, column in enumerate(columns):
            column_latents = sample_latents(_with_loras(stages, column), [row[1:] for row in rows], tell, check)
            latents |= {(row, number): latent for row, latent in enumerate(column_latents)}
    finally:
        unload(models)
    pictures = dict(_decoded(rows, len(columns), latents, check))
    titles = [column.title for column in columns]
    scores = [] if score is None else list(score(pictures, titles, check))
    if scores:
        order = [scored.column for scored in scores]
        pictures = {(row, place): pictures[row, n] for row in range(len(rows)) for place, n in enumerate(order)}
        titles = [scored.heading for scored in scores]
    sheets = []
    for cells in render_frames(pictures, frames_shown):
        check()
        sheets.append(render_sheet([row[0] for row in rows], titles, *cells))
    return Comparison(sheets, list(pictures.values()), notes, scores)


def two_experts(high: ModelPatcher, low: ModelPatcher, boundary: float = 0.0, switch_step: int = 0) -> Stages:
    """Make the stages of Wan 2.2's two experts.

    boundary: sigma at which the low noise expert takes over.
    switch_step: number of steps of the high noise expert. With both at 0 the model's own boundary applies.

    Raises ValueError if the MODELs are not a pair of experts, or no boundary is known.
    """
    if not 0 <= boundary < 1:
        raise ValueError(f"expert_boundary is {boundary:g}; set it to 0 (the model's own) or below 1.")
    if switch_step < 0:
        raise ValueError(f"switch_step is {switch_step}; set it to 0 (by expert_boundary) or more.")
    if boundary and switch_step:
        raise ValueError(
            f"expert_boundary is {boundary:g} and switch_step is {switch_step}; set one of them to 0; the other says "
            "where the experts switch."
        )
    if high.is_clone(low):
        raise ValueError(SAME_WEIGHTS)
    kinds = [type(expert.model).__name__ for expert in (high, low)]
    if known_family(high.model) is not None:
        model_boundary = meeting_sigma(high, low)
        boundary = boundary or model_boundary
    elif kinds[0] != kinds[1]:
        raise ValueError(
            f"model is a {kinds[0]} and model_low_noise a {kinds[1]}; connect the two experts of one Wan 2.2 model."
        )
    elif not boundary and not switch_step:
        raise ValueError(
            f"model is a {kinds[0]}, and it's not known where its two experts switch; set switch_step, as on your "
            "KSampler (Advanced), or expert_boundary."
        )
    return Stages(high, low, boundary, switch_step)


def _check(stages: Stages, samplings: Sequence[Sampling]) -> None:
    family = known_family(stages.model.model)
    for number, sampling in enumerate(samplings, 1):
        check_fits(sampling, stages.model)
        if family is not None:
            check_text(sampling, family.conditioning.text_width(stages.model.model), number)
        if stages.switch_step >= sampling.steps:
            raise ValueError(
                f"switch_step is {stages.switch_step}, and prompt {number} has {quantity(sampling.steps, 'step')}, "
                "which leaves no steps for the low noise expert; lower it, or set it to 0."
            )


def _decoded(
    rows: Sequence[tuple[str, Sampling, int]], columns: int, latents: dict[Cell, Tensor], check: Callable[[], None]
) -> Iterator[tuple[Cell, Tensor]]:
    for row, (_, sampling, _) in enumerate(rows):
        for column in range(columns):
            check()
            yield (row, column), decode(sampling.vae, latents.pop((row, column)))


def _with_loras(stages: Stages, column: Column) -> Stages:
    low = stages.low_noise if stages.low_noise is None else _model_of(stages.low_noise, column.low_noise)
    return replace(stages, model=_model_of(stages.model, column.lora), low_noise=low)


def _model_of(model: ModelPatcher, lora: AppliedLora | None) -> ModelPatcher:
    if lora is None:
        return model
    try:
        patched, changed = with_lora(model, lora.read(), lora.strength)
    except DoesNotFit as error:
        raise ValueError(f"loras: {lora.name} does not fit this model ({error}); take it out.") from error
    if not changed:
        raise ValueError(
            f"loras: {lora.name} doesn't change this model, because none of its layers is in it; take it out, or "
            "connect the model that it was trained on."
        )
    return patched


def _notes(stages: Stages, columns: Sequence[Column]) -> list[str]:
    """Return a sentence for each part of a LoRA that was left out or that ComfyUI's own loaders read otherwise."""
    applied: dict[str, tuple[ModelPatcher, AppliedLora]] = {}
    for column in columns:
        for model, lora in ((stages.model, column.lora), (stages.low_noise, column.low_noise)):
            if model is not None and lora is not None:
                applied.setdefault(lora.name, (model, lora))
    notes: list[str] = []
    for name, (model, lora) in applied.items():
        tensors = lora.read()
        check_finite(tensors, f"loras: {name}")
        read = read_patches(tensors, names_of_model(model.model), model.model)
        notes += reading_notes(name, read)
        if differing := read_otherwise(tensors, read, model.model):
            notes.append(
                f"ComfyUI's LoRA loaders read {name} otherwise ({shortlist(differing)}); this grid shows all of it. "
                "Convert it by Load LoRA File and Save LoRA."
            )
    return notes
