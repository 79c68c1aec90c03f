"""Notes on settings that a run reads otherwise than a user may expect, before anything is loaded."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from ...common.text import quantity, shortlist
from ...data.samples import Sample, showings_by_key
from ...memory.swap.selection import all_on_device
from ...models.family import Family
from ..config.settings import MemoryOptions, TrainSettings
from ..objective.options import ObjectiveOptions
from ..objective.timestep_sampling import Strata


def memory_notes(options: MemoryOptions) -> Iterator[str]:
    if options.blocks_to_swap > 0 and (note := all_on_device(options.prefetch_blocks, options.blocks_to_swap)):
        yield note


def saving_notes(settings: TrainSettings, strata: Strata) -> Iterator[str]:
    """strata: numbers of samples in a step and an epoch."""
    steps = settings.steps
    epochs = settings.save_every_epochs
    validation = settings.validation
    if epochs:
        saves = (steps - 1) * strata.step // (strata.epoch * epochs)
    else:
        saves = (steps - 1) // settings.save_every if settings.save_every else 0
    # With keep_best, the best LoRA exists before the end.
    best = validation is not None and validation.keep_best and validation.every_n_steps < steps
    if epochs and not saves:
        run_epochs = steps * strata.step / strata.epoch
        yield (
            f"save_every_epochs is {epochs} and the run has {run_epochs:.3g} epoch{'s' * (run_epochs != 1)}, "
            f"so nothing {'but the best LoRA ' if best else ''}is saved before its end."
        )
    if settings.save_every and not saves:
        subject, consequence = ("its state", "leaves the best LoRA only") if best else ("it", "loses it")
        yield (
            f"save_every is {settings.save_every} and the run has {quantity(steps, 'step')}, so {subject} is saved "
            f"only at the end, at Cancel and at an error, and a crash {consequence}; lower save_every to save on the "
            "way."
        )
    if validation is not None and validation.keep_best and validation.every_n_steps >= steps:
        yield (
            f"keep_best has nothing to compare: every_n_steps of Validation is {validation.every_n_steps} and the run "
            f"has {quantity(steps, 'step')}, so only the finished LoRA is measured; lower every_n_steps."
        )


def rare_notes(batch_size: int, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a note on the samples whose graph key has too few showings in an epoch to fill a batch.

    samples: with the text lengths of the model's sequence.
    """
    showings = showings_by_key(samples)
    rare = {key: count for key, count in showings.items() if count < batch_size}
    if not rare or len(showings) == 1:
        return
    names = list(dict.fromkeys(sample.file or sample.name for sample in samples if sample.graph_key in rare))
    # The same number of tokens, but with captions of another length.
    usual = {key[:2] for key in showings.keys() - rare.keys()}
    by_caption, by_shape = (any((key[:2] in usual) is is_usual for key in rare) for is_usual in (True, False))
    fixes = ["lower max_graphs or add pictures of their shape"] * by_shape
    fixes += ["make their captions about as long as the others"] * by_caption
    later = quantity(math.ceil(batch_size / min(rare.values())), "epoch")
    yield (
        f"Few pictures share a shape and caption length with these, so each step with them shows them several times "
        f"and the next one comes up to {later} later: {shortlist(names)}; "
        f"{', '.join(fixes)}, or set batch_size to 1."
    )


def masked_text_notes(attention: str, family: Family, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a note on captions for which the chosen attention can't be used. samples: as in `rare_notes`."""
    if attention not in ("flash-attn", "cudnn") or not family.own_forward:
        return
    names = [sample.name for sample in samples if family.text.masks(sample.text_length)]
    if names:
        yield (
            f"attention is {attention!r}, which takes no mask, so PyTorch's runs in its place for long captions: "
            f"{shortlist(names)}."
        )


def guidance_notes(family: Family, model: Any, options: ObjectiveOptions, samples: Sequence[Sample]) -> Iterator[str]:
    if not family.conditioning.takes_guidance(model):
        return
    carries = next((sample for sample in samples if "guidance" in sample.conditioning), None)
    data_guidance = None if carries is None else _number(carries.load().conditioning["guidance"])
    if data_guidance is not None and data_guidance != options.guidance:
        yield (
            f"positive has a guidance of {data_guidance:g}, but training uses {options.guidance:g}, as guidance on "
            "Training Objective says."
        )


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value.flatten()[0]) if value.numel() else None
    return float(value) if isinstance(value, int | float) else None
