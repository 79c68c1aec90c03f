"""Checks of the training forward over ComfyUI's modules, on the first batches of a run."""

import logging
from collections.abc import Iterable, Iterator

import comfy.model_management
import torch

from ....common.core import version
from ....common.text import joined
from ...family import ForwardChecks, ModelInputs, Transformer
from ..forward.kernels import AttentionCalls, watched_calls
from ..forward.transformer import NativeTransformer
from ..writes.out_of_place import blocks_to_leave_eager
from .comparison import ForwardComparison, OnDevice

log = logging.getLogger(__name__)

# The largest relative difference between our run of a forward and ComfyUI's own, due to rounding in other kernels. If
# this model's rounding error in the run's dtype can be measured, ROUNDINGS times that is the bound.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
ROUNDINGS, LEAST_NOISE = 3.0, 5e-3
EXACT = 2e-3  # in fp32, in which correct forwards differ by 1e-5
# The largest influence of a sample on another of its batch. Independent samples are bit-identical; experts that a
# router gives other tokens add in another order.
INFLUENCE = 1e-5

HIDDEN = "Its code assigns to parts of tensors that it writes in place, which the compiler does not follow."


class NativeChecks(ForwardChecks):
    """Checks of one model's forward.

    title: of the model, for messages.
    batches: whether samples may share a forward at all.
    """

    def __init__(self, title: str, batches: bool):
        self.title, self.batches = title, batches
        self._calls = AttentionCalls()

    def check_forward(
        self, transformer: Transformer, on_device: OnDevice, inputs: ModelInputs, small: ModelInputs | None
    ) -> dict[str, str]:
        assert isinstance(transformer, NativeTransformer)
        if (mismatch := transformer.shadow.mismatch()) is not None:
            raise ValueError(
                f"model is a {self.title} whose {mismatch.name} is read {mismatch.difference:.1%} differently than "
                "ComfyUI reads it, so its LoRA would be wrong; nothing was trained. Please report this model."
            )
        comparison, bound = ForwardComparison(transformer, on_device), TOLERANCE[transformer.dtype]
        with blocks_to_leave_eager() as eager_blocks, watched_calls() as calls:
            difference = comparison.difference(inputs)
            if small is not None and difference <= bound:
                bound = self._check_precisely(comparison, small)
        if not difference <= bound:
            raise ValueError(self._differs(difference, calls.unread))
        self._calls = calls
        return {name: HIDDEN for name, block in transformer.blocks() if block.name in eager_blocks}

    def _check_precisely(self, comparison: ForwardComparison, small: ModelInputs) -> float:
        """Compare in fp32. Returns the bound for the run's dtype from its measured rounding error."""
        largest = TOLERANCE[comparison.transformer.dtype]
        try:
            difference, noise = comparison.precise_difference(small)
        except Exception as error:  # from core, which may cast to a dtype of its own or need a larger grid
            if comfy.model_management.is_oom(error):
                raise
            log.debug("%s does not run in fp32: %s", self.title, error)
            return largest
        if not difference <= EXACT:
            raise ValueError(self._differs(difference))
        return min(largest, max(ROUNDINGS * noise, LEAST_NOISE))

    def _differs(self, difference: float, unread: Iterable[str] = ()) -> str:
        names = ", ".join(sorted(unread))
        unread_note = f" It hands {names} to its attention, which training doesn't know." if names else ""
        return (
            f"model is a {self.title} whose output is {difference:.1%} different when it runs for training in ComfyUI "
            f"{version()}, so its LoRA would be wrong; nothing was trained.{unread_note} Please report this model."
        )

    def kernel_notes(self) -> Iterator[str]:
        if self._calls.preferred:
            names = joined(sorted(self._calls.preferred))
            yield (
                f"{self.title} asks for {names} in ComfyUI, which can't be used for training: torch's attention runs "
                "in its place."
            )
        if self._calls.torch_only:
            yield (
                f"{self.title} masks or scales some of its attention, which the attention chosen on Training Memory "
                "can't do: torch's runs in its place."
            )

    def check_batch(self, transformer: Transformer, on_device: OnDevice, inputs: ModelInputs) -> str | None:
        assert isinstance(transformer, NativeTransformer)
        if transformer.record.apart or not self.batches:
            return None
        influence = ForwardComparison(transformer, on_device).influence(inputs)
        log.debug("One sample of a batch changes another by %.2g in %s.", influence, self.title)
        if influence <= INFLUENCE:
            return None
        transformer.record.separate()
        return f"Samples of one batch change each other in {self.title}, so each runs by itself."

    def check_outside(self, transformer: Transformer, on_device: OnDevice, inputs: ModelInputs) -> None:
        assert isinstance(transformer, NativeTransformer)
        ForwardComparison(transformer, on_device).check_outside(inputs)
