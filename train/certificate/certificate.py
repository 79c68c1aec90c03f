"""Certificate of a run: checks of its model's training before the first step.

    forward     equal to ComfyUI's own forward, in the run's dtype and in fp32
    gradients   equal to central differences, of two layers in a block of each kind
    targets     each gets a gradient
    blocks      checkpointed, swapped and compiled ones equal to plain ones
    file        ComfyUI's loader takes every layer of the LoRA file, which changes the output as the LoRA does

Made for a model that no test of ours covers by name, or if `verify` is on. It takes about thirty forwards of a few
dozen tokens, one forward of the first batch, and the memory of a step; never a second copy of the weights.
"""

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management

from ...common.text import shortlist
from ...data.samples import Sample
from ...lora.files.formats import save_lora
from ...models.family import ModelInputs
from ..observer import Observer
from ..placement.placed_model import PlacedModel
from ..verify.forward import small_inputs
from ..verify.sample import check_sample, inputs_of, smallest
from .adapters import perturbed
from .execution import check_execution
from .gradients import GradientCheck, check_gradients
from .lora_file import FileCheck, check_file, loaded_by_core
from .reach import effect_difference, targets_without_gradient

SIDES = (4, 8, 10**6)  # tokens a side of the grids to try, the smallest first
SAME_EFFECT = 0.01


@dataclass(frozen=True)
class Certificate:
    """Results of the checks, all passed.

    title: title of the model.
    unreached: targets without an effect on the output, which get no gradient.
    """

    title: str
    gradients: GradientCheck
    blocks: float
    unreached: tuple[str, ...]
    file: FileCheck
    effect: float

    @property
    def text(self) -> str:
        """Line for the node."""
        worst = max(self.gradients.worst, 1e-4)
        file = self.file.layers - len(self.file.missing)
        text = (
            f"{self.title}: forward equal, gradients within {worst:.2%}, blocks equal to plain ones, {file} of "
            f"{self.file.layers} layers load in ComfyUI."
        )
        if self.unreached:
            text += f" {len(self.unreached)} layers have no effect on the output ({shortlist(self.unreached)})."
        return text

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: finite numbers and text only."""
        return {
            "text": self.text,
            "gradients": {name: float(f"{error:.3g}") for name, error in self.gradients.errors.items()},
            "blocks": float(f"{self.blocks:.3g}"),
            "without_effect": list(self.unreached),
            "file": self.file.summary(),
            "effect_difference": float(f"{self.effect:.3g}"),
        }


def make_certificate(
    placed: PlacedModel, targets: Sequence[str], samples: Sequence[Sample], guidance: float, observer: Observer
) -> Certificate:
    """Run all checks before the first step. Raises ValueError, which names check and block, if one fails."""
    title = placed.family.title
    placed.ensure()
    sample = smallest(samples)

    def phase(text: str) -> None:
        observer.check_interrupted()
        observer.phase(f"Checking {title}: {text}")

    whole, sigma = check_sample(placed.family, placed.patcher, sample)
    inputs = inputs_of(placed.family, placed.patcher, whole, sigma, guidance)
    phase("forward")
    placed.check_forward(inputs)
    with off_the_record(placed), placed.products.switched_off(placed.transformer.blocks()):
        phase("gradients")
        small, gradients = _on_smallest_grid(placed, targets, samples, guidance, inputs)
        _passed("gradients", gradients.fault)
        phase("targets")
        wrong, unreached = targets_without_gradient(placed, small)
        _passed("targets", f"{shortlist(wrong)} gets no gradient" if wrong else None)
    with off_the_record(placed), perturbed(placed):
        phase("blocks")
        fault, blocks = check_execution(placed, inputs)
        _passed("blocks", fault)
    with off_the_record(placed), placed.products.switched_off(placed.transformer.blocks()):
        phase("LoRA file")
        file, effect = _check_lora_file(placed, small)
        _passed("LoRA file", file.fault)
        _passed("LoRA file", None if effect <= SAME_EFFECT else f"it moves the output {effect:.1%} differently")
    return Certificate(title, gradients, blocks, tuple(unreached), file, effect)


def off_the_record(placed: PlacedModel) -> AbstractContextManager[None]:
    """Return a context whose block copies don't count."""
    return nullcontext() if placed.swap is None else placed.swap.ring.uncounted()


def _passed(check: str, fault: str | None) -> None:
    if fault is not None:
        raise ValueError(
            f"verify: the check of {check} failed: {fault.rstrip('.')}. The LoRA would be wrong, so nothing was "
            "trained; please report this model. To train in spite of it, set verify to off on Training Memory."
        )


def _on_smallest_grid(
    placed: PlacedModel, targets: Sequence[str], samples: Sequence[Sample], guidance: float, whole: ModelInputs
) -> tuple[ModelInputs, GradientCheck]:
    """Check the gradients on the smallest grid that the model takes; returns its inputs too."""
    for side in SIDES[:-1]:
        small = small_inputs(placed.family, placed.patcher, samples, guidance, side)
        if small is None:
            continue
        try:
            return small, check_gradients(placed, small, targets)
        except Exception as error:  # from code of ComfyUI's that needs a larger grid
            if comfy.model_management.is_oom(error):
                raise
    return whole, check_gradients(placed, whole, targets)


def _check_lora_file(placed: PlacedModel, inputs: ModelInputs) -> tuple[FileCheck, float]:
    """Write the LoRA, perturbed to have an effect, to a temporary file, and load it as ComfyUI does."""
    with perturbed(placed), tempfile.TemporaryDirectory(prefix="tessera-verify-") as folder:
        path = Path(folder) / "lora.safetensors"
        lora = placed.network.snapshot()
        save_lora(path, lora)
        linears = placed.transformer.linears()
        checked = check_file(path, lora, placed.patcher, placed.network, linears, placed.device)
        patches = loaded_by_core(path, placed.patcher)
        return checked, effect_difference(placed, inputs, patches)
