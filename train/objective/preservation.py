"""Differential output preservation: what the class's own word calls stays as it was while a trigger word is learnt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...common.text import shortlist
from ...data.samples import Sample, SampleVariant
from ...memory.host.to_device import to_device
from ...models.family import ModelInputs
from .loss import velocity_loss
from .options import ObjectiveOptions


@dataclass(frozen=True)
class Preserved:
    """What a batch is to keep. inputs: of the batch, noise and all, with class captions in place of its own; samples:
    (B,), 1 where a sample has a class caption, 0 where it has none and is no part of it; weights: (B, N), 0 for the
    tokens of clean frames, which no sampler reads, or None where all count."""

    inputs: ModelInputs
    samples: Tensor
    weights: Tensor | None

    def to(self, device: torch.device) -> "Preserved":
        weights = None if self.weights is None else to_device(self.weights, device)
        return replace(self, inputs=self.inputs.to(device), samples=to_device(self.samples, device), weights=weights)


def preservation_loss(velocity: Tensor, without: Tensor, kept: Preserved) -> Tensor:
    """mean over the batch of mean over tokens and channels of (velocity − without)², 0 for samples that are no part of
    it: what the model says of the class caption with the adapter, against what it says without (ostris/ai-toolkit,
    SDTrainer.py, `diff_output_preservation`, whose multiplier is preservation_weight). Both are (B, N, C·patch)."""
    return (velocity_loss(velocity, without, weights=kept.weights) * kept.samples).mean()


def with_class_caption(choice: SampleVariant, sample: Sample, options: ObjectiveOptions) -> SampleVariant:
    """The choice, with the class caption where it is asked for and there is one."""
    wanted = options.preservation_weight > 0 and sample.class_caption
    return replace(choice, class_caption=True) if wanted else choice


def check_preservation(options: ObjectiveOptions, samples: Sequence[Sample]) -> tuple[str, ...]:
    """What of it has no effect, a sentence each. ValueError where it is asked for and no sample has a class caption."""
    there = any(sample.class_caption for sample in samples)
    if not options.preservation_weight:
        told = "class_word (or blank_prompt_preservation) has no effect: Training Objective has preservation_weight 0."
        return (told,) if there else ()
    if not there:
        raise ValueError(
            f"preservation_weight is {options.preservation_weight:g} and no caption has a class word to preserve; set "
            f"class_word on Training Images or Training Clips (such as man, for a trigger word that calls one man) or "
            f"blank_prompt_preservation, or preservation_weight to 0."
        )
    without = [sample.name for sample in samples if not sample.class_caption and not sample.regularisation]
    if not without:
        return ()
    return (f"Nothing is preserved by showing these, whose captions hold no word of the class: {shortlist(without)}.",)
