"""The first check of a run: our forward gives what ComfyUI's own does, on the same weights and the same sample.

    in the run's dtype    a whole grid of the data by both, with the attention of the run: as close as rounding lets it
    in fp32               a small piece of it by both, over the same stored weights: equal in 1e-3 of the output

16-bit arithmetic alone moves an output by a percent or so, in which a block that is 2 % too strong does not show. How
much that is for this model is measured, by ComfyUI's own forward in both dtypes; fp32 shows the rest.
"""

import logging
import math
from collections.abc import Callable, Sequence

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ...common.core import features
from ...data.samples import Sample
from ...models.family import Family, ModelInputs, RunBlock, Transformer
from ...models.registry import core_forward
from .sample import SMALL, SMALL_FRAMES, check_sample, cut_to, inputs_of, sigmas, smallest

log = logging.getLogger(__name__)

EXACT = 1e-3
# The run's dtype: this many times the rounding error that was measured, within these.
ROUNDINGS, LEAST, MOST = 4.0, 1e-2, 0.2
DEPTH = {torch.float16: LEAST, torch.bfloat16: 2 * LEAST}


class FirstChecks:
    """Checks of a run's forward, each made once: of the forward on the first batch, and of the samples of a batch on
    the first one that has several; the certificate and validation may bring batches of one before.

    forward_done: True once the forward was compared.
    """

    def __init__(self, family: Family, samples: Sequence[Sample], guidance: float):
        self.family, self.samples, self.guidance = family, samples, guidance
        self.forward_done, self._batch_done = False, family.own_forward  # ours runs each sample for itself

    def due(self, inputs: ModelInputs) -> bool:
        """True where this batch is to be looked at."""
        return not self.forward_done or self._batch_due(inputs)

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
        """Make the checks that are due. The adapters and low-bit matmuls are to be switched off.

        on_device: calls a function on a block and its arguments with the block's weights on the device.
        note: takes a sentence for the user.

        Returns the blocks that must not be compiled, each with the reason. Raises ValueError where the training forward
        and ComfyUI's differ.
        """
        eager: dict[str, str] = {}
        if not self.forward_done:
            eager = check_forward(self.family, patcher, transformer, on_device, inputs, self.samples, self.guidance)
            self.forward_done = True
        if self._batch_due(inputs):
            if (text := self.family.check_batch(transformer, on_device, inputs)) is not None:
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
    """Compare the training forward with ComfyUI's; the adapters and low-bit matmuls are to be switched off.

    on_device: calls a function on a block and its arguments with the block's weights on the device.
    inputs: the first batch, on which a forward over ComfyUI's own modules is compared; one of our own is on a sample.

    Returns the blocks that must not be compiled, each with the reason. Raises ValueError where they differ.
    """
    if family.own_forward:
        _check_own_forward(family, patcher, transformer, on_device, samples, guidance)
        return {}
    small = small_inputs(family, patcher, samples, guidance)
    return family.check_forward(transformer, on_device, inputs, small)


def small_inputs(
    family: Family, patcher: ModelPatcher, samples: Sequence[Sample], guidance: float, side: int = SMALL
) -> ModelInputs | None:
    """Give a small piece of a sample, of `side` tokens at most, None where the model doesn't take one."""
    sample = smallest(samples)
    whole, sigma = check_sample(family, patcher, sample)
    try:
        small = cut_to(whole, sample.grid, side, SMALL_FRAMES)
        return inputs_of(family, patcher, small, sigma, guidance)
    except Exception as error:  # of code of ComfyUI's that needs a larger grid
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

    It runs five forwards without a gradient, three of them on a few tokens, and holds the weights once. Raises
    ValueError where they differ.
    """
    core = core_forward(family, patcher, transformer, on_device)
    if (misread := core.misread()) is not None:
        raise ValueError(
            f"model is {family.title} whose {misread.name} is read {misread.difference:.1%} differently than ComfyUI "
            f"reads it, {CONSEQUENCE}"
        )
    dtype, sample = core.dtype, smallest(samples)
    whole, sigma = check_sample(family, patcher, sample)
    small, level = cut_to(whole, sample.grid, SMALL, SMALL_FRAMES), sigmas(sigma)
    exact = core.velocity(small, level, guidance, torch.float32)
    try:
        ours = core.own_velocity(transformer, small, level, guidance, torch.float32)
    except RuntimeError as error:  # kernels of flash-attn and cuDNN compute in 16 bits alone
        if dtype == torch.float32 or comfy.model_management.is_oom(error):
            raise
        log.debug("%s is not compared in fp32: %s", family.title, error)
    else:
        _check(family, relative(ours, exact), LEAST if _loses_by_rounding(patcher, dtype) else EXACT)
    if dtype == torch.float32 and small.tokens == whole.tokens:
        return
    noise = 0.0 if dtype == torch.float32 else relative(core.velocity(small, level, guidance, dtype), exact)
    own = core.own_velocity(transformer, whole, level, guidance, dtype)
    found = relative(own, core.velocity(whole, level, guidance, dtype))
    bound = EXACT if dtype == torch.float32 else min(max(ROUNDINGS * noise, DEPTH[dtype]), MOST)
    _check(family, found, bound)


def _loses_by_rounding(patcher: ModelPatcher, dtype: torch.dtype) -> bool:
    """Test for fp32 matrices in a run of 16 bits which are not of 16 bits already.

    Ours are rounded to the run's dtype on the device, ComfyUI's are not, so that in fp32 the two differ by that.
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


def relative(found: Tensor, expected: Tensor) -> float:
    """Compute ‖found − expected‖ / ‖expected‖; NaN is infinite."""
    error = float((found.double() - expected.double()).norm()) / max(float(expected.double().norm()), 1e-30)
    return error if error >= 0 else math.inf
