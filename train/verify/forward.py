"""First check of a run: compare the training forward with ComfyUI's, on the same weights and the same sample.

    in the run's dtype    a whole grid of the data, with the attention of the run: equal within rounding error
    in fp32               a small crop of it, over the same stored weights: equal within 1e-3 of the output

16-bit rounding alone changes an output by about one percent, which hides a block that is 2 % too strong. The rounding
error of this model is measured with ComfyUI's forward in both dtypes; the comparison in fp32 shows smaller differences.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.core import features
from ...data.samples import Sample
from ...models.catalogue.registry import core_forward
from ...models.family import Family, ModelInputs, RunBlock, Transformer
from ..report.errors import CannotContinue
from .sample import SMALL, SMALL_FRAMES, check_sample, cut_to, inputs_of, sigmas, smallest

log = logging.getLogger(__name__)

EXACT = 1e-3
# Bound in the run's dtype: ROUNDINGS times the measured rounding error, at least DEPTH and at most MOST.
ROUNDINGS = 4.0
LEAST = 1e-2
MOST = 0.2
DEPTH = {torch.float16: LEAST, torch.bfloat16: 2 * LEAST}


class FirstChecks:
    """Checks of a run's forward, each made once: the forward on the first batch, and the samples of a batch on the
    first batch of several; the certificate and validation may run batches of one before it.

    forward_done: True once the forward was compared.
    """

    _outside_due = False

    def __init__(self, family: Family, samples: Sequence[Sample], guidance: float):
        self.family = family
        self.samples = samples
        self.guidance = guidance
        self.forward_done, self._batch_done = False, family.own_forward  # ours runs each sample separately

    def due(self, inputs: ModelInputs) -> bool:
        """Return whether this batch is to be checked."""
        return not self.forward_done or self._outside_due or self._batch_due(inputs)

    def note_first_swap(self) -> None:
        """Check on the next batch that no block's tensors are read outside of it: blocks swap since the last check."""
        self._outside_due = not self.family.own_forward

    def _batch_due(self, inputs: ModelInputs) -> bool:
        return not self._batch_done and len(inputs.timestep) > 1

    def run(
        self,
        patcher: ModelPatcher,
        transformer: Transformer,
        on_device: RunBlock,
        inputs: ModelInputs,
        note: Callable[[str], None],
    ) -> dict[str, str]:
        """Make the checks that are due. The adapters and low-bit matmuls must be switched off.

        on_device: calls a function on a block and its arguments with the block's weights on the device.
        note: takes a sentence for the user.

        Returns the blocks that must not be compiled, each with the reason. Raises ValueError if the training forward
        and ComfyUI's differ, CannotContinue if blocks have begun to swap in a model that doesn't allow it.
        """
        eager: dict[str, str] = {}
        if not self.forward_done:
            eager = check_forward(self.family, patcher, transformer, on_device, inputs, self.samples, self.guidance)
            self.forward_done = True
            for sentence in self.family.checks.kernel_notes():
                note(sentence)
        elif self._outside_due:
            try:
                self.family.checks.check_outside(transformer, on_device, inputs)
            except ValueError as error:
                raise CannotContinue(str(error).rstrip(".")) from error
        self._outside_due = False
        if self._batch_due(inputs):
            if (text := self.family.checks.check_batch(transformer, on_device, inputs)) is not None:
                note(text)
            self._batch_done = True
        return eager


def check_forward(
    family: Family,
    patcher: ModelPatcher,
    transformer: Transformer,
    on_device: RunBlock,
    inputs: ModelInputs,
    samples: Sequence[Sample],
    guidance: float,
) -> dict[str, str]:
    """Compare the training forward with ComfyUI's; the adapters and low-bit matmuls must be switched off.

    on_device: calls a function on a block and its arguments with the block's weights on the device.
    inputs: the first batch, to compare a forward over ComfyUI's own modules; one of our own is compared on a sample.

    Returns the blocks that must not be compiled, each with the reason. Raises ValueError if they differ.
    """
    if family.own_forward:
        _check_own_forward(family, patcher, transformer, on_device, samples, guidance)
        return {}
    small = small_inputs(family, patcher, samples, guidance)
    return family.checks.check_forward(transformer, on_device, inputs, small)


def small_inputs(
    family: Family, patcher: ModelPatcher, samples: Sequence[Sample], guidance: float, side: int = SMALL
) -> ModelInputs | None:
    """Make the inputs of a small crop of a sample, at most `side` tokens a side; None if the model doesn't take it."""
    sample = smallest(samples)
    whole, sigma = check_sample(family, patcher, sample)
    try:
        small = cut_to(whole, sample.grid, side, SMALL_FRAMES)
        return inputs_of(family, patcher, small, sigma, guidance)
    except Exception as error:  # from code of ComfyUI's that needs a larger grid
        log.debug("%s takes no grid of %d tokens a side: %s", family.title, side, error)
        return None


def _check_own_forward(
    family: Family,
    patcher: ModelPatcher,
    transformer: Transformer,
    on_device: RunBlock,
    samples: Sequence[Sample],
    guidance: float,
) -> None:
    """Compare a forward of our own with ComfyUI's.

    It runs five forwards without gradients, three of them on a few tokens, on one copy of the weights. Raises
    ValueError if they differ.
    """
    core = core_forward(family, patcher, transformer, on_device)
    if (mismatch := core.mismatch()) is not None:
        raise ValueError(
            f"model is {family.title} whose {mismatch.name} is read {mismatch.difference:.1%} differently than ComfyUI "
            f"reads it, {CONSEQUENCE}"
        )
    dtype, sample = core.dtype, smallest(samples)
    whole, sigma = check_sample(family, patcher, sample)
    small, level = cut_to(whole, sample.grid, SMALL, SMALL_FRAMES), sigmas(sigma)
    exact = core.velocity(small, level, guidance, torch.float32)
    small_output = core.own_velocity(transformer, small, level, guidance, torch.float32)
    _check(family, relative(small_output, exact), LEAST if _loses_by_rounding(patcher, dtype) else EXACT)
    if dtype == torch.float32 and small.tokens == whole.tokens:
        return
    noise = 0.0 if dtype == torch.float32 else relative(core.velocity(small, level, guidance, dtype), exact)
    own_output = core.own_velocity(transformer, whole, level, guidance, dtype)
    difference = relative(own_output, core.velocity(whole, level, guidance, dtype))
    bound = EXACT if dtype == torch.float32 else min(max(ROUNDINGS * noise, DEPTH[dtype]), MOST)
    _check(family, difference, bound)


def _loses_by_rounding(patcher: ModelPatcher, dtype: torch.dtype) -> bool:
    """Return whether a 16-bit run has fp32 matrices that change when rounded to its dtype.

    Ours are rounded to the run's dtype on the device and ComfyUI's are not, so the two differ by that in fp32.
    """
    matrices = (weight for weight in patcher.model.diffusion_model.parameters() if weight.ndim == 2)
    return dtype != torch.float32 and any(
        weight.dtype == torch.float32 and not torch.equal(weight, weight.to(dtype).float()) for weight in matrices
    )


CONSEQUENCE = "so its LoRA would be wrong; nothing was trained. Please report this model."


def _check(family: Family, difference: float, bound: float) -> None:
    if difference <= bound:
        return
    version = features()["version"]
    amount = f"{difference:.1%} different" if math.isfinite(difference) else "not finite"
    raise ValueError(
        f"model is {family.title}, whose training forward gives an output that is {amount} from that of ComfyUI "
        f"{version} on the same weights, {CONSEQUENCE}"
    )


def relative(actual: Tensor, expected: Tensor) -> float:
    """Compute ‖actual − expected‖ / ‖expected‖; NaN becomes infinity."""
    error = float((actual.double() - expected.double()).norm()) / max(float(expected.double().norm()), 1e-30)
    return error if error >= 0 else math.inf
