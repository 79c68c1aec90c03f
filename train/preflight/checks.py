"""Preflight checks: MODEL, data and settings are checked against each other before any weight is loaded."""

from dataclasses import dataclass, replace
from math import prod

from comfy.model_patcher import ModelPatcher

from ...common.text import shortlist
from ...data.encode.clip_vision import hidden_states
from ...data.samples import SampleTensors, SampleVariant, TrainingData, check_training_samples
from ...lora.base import apply_base_lora, apply_training_adapter
from ...lora.plan import choose_targets, network_notes
from ...lora.warm_start import WarmStart, read_warm_start
from ...memory.weights.formats.gguf_reader import held_in_full_notes
from ...memory.weights.frozen import dequantised_notes
from ...models.catalogue.registry import family_of
from ...models.family import Family
from ...models.layers.attention import attention_function, attention_notes
from ...models.model_patches import trainable_model
from ..config.settings import TrainSettings
from ..objective.batch import strata_sizes
from ..objective.flow_options import check_schedule_options
from ..objective.guidance_loss import check_guidance_loss
from ..objective.notes import objective_notes
from ..objective.preservation import check_preservation
from ..objective.timestep_sampling import check_range
from ..optim.checks import check_optimizer
from ..optim.schedule import lr_factor
from .concept_checks import check_concept
from .notes import guidance_notes, masked_text_notes, memory_notes, rare_notes, saving_notes
from .validation_split import hold_out, validation_notes


@dataclass(frozen=True)
class CheckedRun:
    """Result of the preflight checks.

    family: family of the model.
    patcher: clone of the MODEL to train on.
    data: training samples, without the held-out ones.
    targets: names of the Linears that get an adapter.
    notes: sentences for the user.
    start: LoRA to initialise from, None without one.
    validation: validation samples, None without validation.
    full_data_fingerprint: fingerprint of the data before the split.
    """

    family: Family
    patcher: ModelPatcher
    data: TrainingData
    targets: list[str]
    notes: tuple[str, ...]
    start: WarmStart | None = None
    validation: TrainingData | None = None
    full_data_fingerprint: str = ""


def check_run(model: ModelPatcher, data: TrainingData, settings: TrainSettings) -> CheckedRun:
    """Check a run without loading weights. Raises ValueError, in one sentence, for errors that would come later."""
    concept_notes = check_concept(settings, data.samples)
    family = family_of(model)
    patcher, patch_notes = trainable_model(model, family.own_forward)
    targets = choose_targets(family, patcher.model, settings.network)
    beneath_notes = apply_base_lora(patcher, settings.network, family)
    beneath_notes += apply_training_adapter(patcher, settings.network, family)
    start, start_notes = read_warm_start(settings.network, family, patcher.model, targets)
    is_flow = family.sampling.objective(patcher).is_flow
    schedule_notes = () if is_flow else check_schedule_options(settings.objective, family.title)
    lr_factor(settings.optimizer, settings.steps)
    optimizer_notes = check_optimizer(settings.optimizer, patcher.load_device, settings.network)
    attention = settings.memory.attention
    device = patcher.load_device
    dtype = patcher.model.get_dtype_inference()
    attention_function(attention, device, dtype)
    measured: TrainingData | None = None
    full_data_fingerprint = data.fingerprint
    if settings.validation is not None:
        data, measured = hold_out(data, settings.validation)
        _check_validation(family, patcher, measured)
        measured = _with_text_lengths(family, patcher, measured)
    _check_data(family, patcher, data)
    for size in sorted({sample.tokens // sample.grid[0] for sample in data.samples}):
        check_range(settings.objective, size, family.sampling.shift(patcher.model, size))
    strata = strata_sizes(settings.samples_per_step, data.samples)
    notes = (
        *patch_notes,
        *concept_notes,
        *check_preservation(settings.objective, data.samples),
        *check_guidance_loss(
            settings.objective,
            data.samples,
            family.title,
            family.conditioning.takes_guidance(patcher.model),
            settings.network.training_adapter.name if settings.network.training_adapter else "",
        ),
        *optimizer_notes,
        *beneath_notes,
        *start_notes,
        *network_notes(settings.network, family, patcher.model, targets),
        *objective_notes(settings.objective),
        *schedule_notes,
        *guidance_notes(family, patcher.model, settings.objective, data.samples),
        *saving_notes(settings, strata),
        *memory_notes(settings.memory),
        *attention_notes(attention, device, dtype),
        *dequantised_notes(patcher.model.diffusion_model, dtype),
        *held_in_full_notes(patcher.model.diffusion_model, patcher.patches, dtype),
    )
    notes += tuple(family.notes(patcher.model, [sample.facts() for sample in data.samples]))
    if settings.network.training_adapter is None and not settings.objective.guidance_loss_scale:
        notes += tuple(family.distillation_notes(patcher.model))
    padded = _with_text_lengths(family, patcher, data)
    notes += tuple(rare_notes(settings.batch_size, padded.samples))
    notes += tuple(masked_text_notes(attention, family, padded.samples))
    if settings.validation is not None and measured is not None:
        notes += tuple(validation_notes(padded, measured, settings.validation))
    return CheckedRun(family, patcher, padded, targets, notes, start, measured, full_data_fingerprint)


def _with_text_lengths(family: Family, patcher: ModelPatcher, data: TrainingData) -> TrainingData:
    """Replace the caption lengths by the text lengths of this model's sequence, padding included."""

    def length(encoded: int) -> int:
        return family.conditioning.text_length(patcher.model, encoded)

    samples = (
        replace(
            s,
            text_length=length(s.text_length),
            empty_length=s.empty_length and length(s.empty_length),
            text_lengths=tuple(sorted(set(map(length, s.text_lengths)))),
        )
        for s in data.samples
    )
    return replace(data, samples=tuple(samples))


def _check_validation(family: Family, patcher: ModelPatcher, data: TrainingData) -> None:
    """Check the held-out data as `_check_data` does, and name the input that holds them out in its error."""
    try:
        _check_data(family, patcher, data)
    except ValueError as error:
        raise ValueError(f"validation: {error}") from error


def _check_data(family: Family, patcher: ModelPatcher, data: TrainingData) -> None:
    """Check the data's family, sizes, channels and widths against the model.

    Reads one sample, so that data of other text encoders or another VAE fails here and not in the first step.

    Raises ValueError if they do not match.
    """
    if not data.samples:
        raise ValueError("data is empty; connect Prepare Dataset with at least one picture.")
    if not family.fits_data(data.family):  # by name: FLUX.1 and Wan share channels and widths
        raise ValueError(
            f"data was prepared for {data.family}, but the model is {family.title}; prepare it with the VAE and text "
            f"encoders of this model, or load a {data.family} model."
        )
    cut_short = [sample.name for sample in data.samples if sample.tokens < prod(sample.grid)]
    if family.whole_grids and cut_short:
        raise ValueError(
            f"data has grids with a ragged edge ({shortlist(cut_short)}), which {family.title} doesn't support; set "
            "fit to whole grids on Prepare Dataset, or max_graphs on Latents to Training Data to the number of sizes."
        )
    check_training_samples(sample.regularisation for sample in data.samples)
    for sample in data.samples:
        family.check(patcher.model, sample.facts())
    first = data.samples[0]
    tensors = first.load(SampleVariant(empty_caption=True)) if first.empty_length else first.load()
    _check_widths(family, patcher, tensors)


def _check_widths(family: Family, patcher: ModelPatcher, tensors: SampleTensors) -> None:
    """Check the channels and widths of a sample against those of the model."""
    channels = family.sampling.latents(patcher.model).channels
    if tensors.latent.shape[0] != channels:
        raise ValueError(
            f"data has latents of {tensors.latent.shape[0]} channels, but the model takes {channels}; prepare the "
            "data with the model's own VAE."
        )
    pooled = tensors.conditioning.get("pooled_output")
    pooled_width = family.conditioning.pooled_width(patcher.model)
    if pooled is not None and pooled.shape[-1] < pooled_width:
        raise ValueError(
            f"data has pooled text of width {pooled.shape[-1]} but the model takes {pooled_width}; prepare the "
            "data with the model's own text encoders."
        )
    vision_output = tensors.conditioning.get("clip_vision_output")
    vision_width = family.conditioning.vision_width(patcher.model)
    if vision_output is not None and vision_width and hidden_states(vision_output).shape[-1] != vision_width:
        raise ValueError(
            f"data has CLIP vision output of width {hidden_states(vision_output).shape[-1]} but the model takes "
            f"{vision_width}; prepare the data with clip_vision_h.safetensors as the CLIP vision model."
        )
    text_width = family.conditioning.text_width(patcher.model)
    if text_width and tensors.empty_prompt is not None and (other := tensors.empty_prompt.text.shape[-1]) != text_width:
        raise ValueError(
            f"empty has text of width {other} but the model takes {text_width}; encode the empty caption with the "
            "model's own text encoders."
        )
    if text_width and tensors.text.shape[-1] != text_width:
        raise ValueError(
            f"data has text of width {tensors.text.shape[-1]} but the model takes {text_width}; prepare the data with "
            "the model's own text encoders."
        )
