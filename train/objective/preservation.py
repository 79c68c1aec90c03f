"""Differential output preservation: the output for a class word stays unchanged while a trigger word is learnt."""

import math
from collections.abc import Iterable, Sequence
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
class PreservationInputs:
    """Inputs of the preservation loss of a batch.

    inputs: the batch's model inputs (same latents, noise and sigma) with class captions.
    samples: (B,), 1 for a sample with a class caption, 0 for one without, which does not count.
    weights: weights of the tokens, (B, N), 0 for clean frames, which samplers do not read; None if all are 1.
    """

    inputs: ModelInputs
    samples: Tensor
    weights: Tensor | None

    def to(self, device: torch.device) -> "PreservationInputs":
        """Copy every tensor to `device`."""
        weights = None if self.weights is None else to_device(self.weights, device)
        return replace(self, inputs=self.inputs.to(device), samples=to_device(self.samples, device), weights=weights)


def preservation_loss(velocity: Tensor, frozen_output: Tensor, preserved: PreservationInputs) -> Tensor:
    """Compute the preservation loss, a scalar: mean square of velocity − frozen_output, 0 for samples without a class.

    velocity: output for the class caption with the adapter, (B, N, C·patch).
    frozen_output: output for the class caption without the adapter, (B, N, C·patch).

    Source: ostris/ai-toolkit, SDTrainer.py, `diff_output_preservation`; its multiplier is preservation_weight here.
    """
    return (velocity_loss(velocity, frozen_output, weights=preserved.weights) * preserved.samples).mean()


def preservation_facts(losses: Iterable[Tensor]) -> dict[str, float]:
    """Return the mean of the last batches' losses for the summary; empty without preservation."""
    # The last entry is NaN if the run ended with a NaN loss.
    finite = [value for value in map(float, losses) if math.isfinite(value)]
    return {"preservation_loss": sum(finite) / len(finite)} if finite else {}


def with_class_caption(choice: SampleVariant, sample: Sample, options: ObjectiveOptions) -> SampleVariant:
    """Request the class caption of a sample, if preservation is on and the sample has one."""
    uses_class_caption = options.preservation_weight > 0 and sample.class_caption
    return replace(choice, class_caption=True) if uses_class_caption else choice


def check_preservation(options: ObjectiveOptions, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Make a note on samples that preserve nothing.

    Raises ValueError if preservation is on and no sample has a class caption.
    """
    if not options.preservation_weight:
        return ()
    if not any(sample.class_caption for sample in samples):
        raise ValueError(
            f"preservation_weight is {options.preservation_weight:g} and no caption has a class word to preserve; set "
            f"class_word on Training Images or Training Clips (such as man, if the trigger word names a man) or "
            f"blank_prompt_preservation, or preservation_weight to 0."
        )
    missing = [sample.name for sample in samples if not sample.class_caption and not sample.regularisation]
    if not missing:
        return ()
    return (f"These captions don't contain the class word, so they preserve nothing: {shortlist(missing)}.",)
