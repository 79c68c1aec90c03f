"""Targets of a concept, and the passes of the adapted model that are trained towards them.

v₀ is the frozen model, with the adapter switched off. A pass runs the model with the adapter at +1 or −1:

    prompts   Σ (weight ± direction)·v₀(x_t, c_k)                  `PromptTarget`, sums of `data.concepts.prompts`
    pictures  v₀(x±) ± ½·[(u⁺ − u⁻) − (v₀(x⁺) − v₀(x⁻))]           `PictureTarget`

The second compares two pictures that differ in one attribute, noised by the same noise to x⁺ and x⁻, with their own
targets u (noise − x0 in flow matching). u − v₀ is what the frozen model gets wrong. Both pictures share the half-sum of
it, their look; the target holds the half-difference alone, so that the look is not learnt. Trained at both strengths as
the visual sliders of Gandikota et al. 2023 (arXiv 2311.12092, section 4.2), which compare with u⁺ and u⁻ themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...memory.host.to_device import to_device
from ...models.family import ModelInputs

FrozenOutput = Callable[[ModelInputs], Tensor]


@dataclass(frozen=True)
class Pass:
    """One forward and backward of the model with the adapter.

    inputs: of the forward.
    target: of its output, (B, N, C·patch), fp32.
    is_negated: the adapter runs at a strength of −1.
    """

    inputs: ModelInputs
    target: Tensor
    is_negated: bool = False


@dataclass(frozen=True)
class PromptTerm:
    """Prediction of the frozen model that counts in a target.

    inputs: the batch's, with this prompt in each sample.
    weight: (B,) fp32, factor of the prediction in each sample, see `data.samples.TargetPrompt`.
    direction: (B,) fp32, further factor, negated at a strength of −1.
    """

    inputs: ModelInputs
    weight: Tensor
    direction: Tensor

    def to(self, device: torch.device) -> "PromptTerm":
        """Copy every tensor to `device`."""
        return PromptTerm(self.inputs.to(device), to_device(self.weight, device), to_device(self.direction, device))


@dataclass(frozen=True)
class PromptTarget:
    """Target that is a sum of the frozen model's predictions for other prompts.

    terms: of the sum.
    is_odd: train at a strength of −1 too, with negated directions.
    """

    terms: tuple[PromptTerm, ...]
    is_odd: bool

    def to(self, device: torch.device) -> "PromptTarget":
        """Copy every tensor to `device`."""
        return replace(self, terms=tuple(term.to(device) for term in self.terms))

    def passes(self, inputs: ModelInputs, target: Tensor, frozen_output: FrozenOutput) -> list[Pass]:
        """Compute the targets, (B, N, C·patch) fp32.

        inputs: with the prompts that are trained.
        target: (B, N, C·patch), not used, the pictures' own.
        """
        anchor, direction = torch.zeros_like(target), torch.zeros_like(target)
        for term in self.terms:
            output = frozen_output(term.inputs).float()
            anchor += _factors(term.weight) * output
            direction += _factors(term.direction) * output
        if not self.is_odd:
            return [Pass(inputs, anchor)]
        return [Pass(inputs, anchor + direction), Pass(inputs, anchor - direction, is_negated=True)]


@dataclass(frozen=True)
class PictureTarget:
    """Target of a pair of pictures.

    inputs: the batch's, with the other picture of each pair under the same noise.
    target: of the other pictures, (B, N, C·patch), fp32.
    """

    inputs: ModelInputs
    target: Tensor

    def to(self, device: torch.device) -> "PictureTarget":
        """Copy every tensor to `device`."""
        return PictureTarget(self.inputs.to(device), to_device(self.target, device))

    def passes(self, inputs: ModelInputs, target: Tensor, frozen_output: FrozenOutput) -> list[Pass]:
        """Compute the targets, (B, N, C·patch) fp32.

        inputs: of the pictures at the positive end.
        target: (B, N, C·patch) fp32, of the same pictures.
        """
        positive, negative = frozen_output(inputs).float(), frozen_output(self.inputs).float()
        half = ((target - self.target) - (positive - negative)) / 2
        return [Pass(inputs, positive + half), Pass(self.inputs, negative - half, is_negated=True)]


ConceptTarget = PromptTarget | PictureTarget


def _factors(numbers: Tensor) -> Tensor:
    return numbers.reshape(-1, 1, 1)
