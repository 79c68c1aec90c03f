"""Certificate of a run: checks of its model's training before the first step.

    forward     equal to ComfyUI's own forward, in the run's dtype and in fp32
    gradients   equal to central differences, of two layers in a block of each kind
    targets     each gets a gradient
    blocks      checkpointed, swapped and compiled ones equal to plain ones
    file        ComfyUI's loader takes every layer of the LoRA file, which changes the output as the LoRA does

Made for a model that no test of ours covers by name, or if `verify` is on. It takes about thirty forwards of a few
dozen tokens, one forward of the first batch, and the memory of a step; never a second copy of the weights.

A check ends the run only by its result. One that can't be made, such as where ComfyUI's code of a model does not run in
fp32, or that is not over after LIMIT seconds, is left out, and the certificate says so. Several ranks make the same
checks, each on its device, and agree on every result.
"""

import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import comfy.model_management
from comfy.model_management import InterruptProcessingException

from ...common.text import cut, joined, quantity, shortlist
from ...data.samples import Sample
from ...lora.files.formats import save_lora
from ...memory.swap.sharded import ShardedSwap
from ...models.family import ModelInputs
from ..config.environment import memory_peak
from ..placement.placed_model import PlacedModel
from ..report.errors import CannotContinue, error_sentence, log_error
from ..report.observer import Observer
from ..verify.forward import small_inputs
from ..verify.sample import check_sample, inputs_of, smallest
from .adapters import perturbed
from .execution import check_execution
from .gradients import NOISES, UNMEASURABLE, GradientCheck, check_gradients
from .lora_file import FileCheck, check_file, loaded_by_core
from .reach import effect_difference, targets_without_gradient

log = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V")

SIDES = (4, 8)  # tokens a side of the grids to try before the whole one
SAME_EFFECT = 0.01
LIMIT = 600.0  # seconds for all checks
LATE = f"{LIMIT / 60:.0f} minutes were over"
HIDDEN = "the model's own rounding hides the differences"


class CheckFailed(ValueError):
    """Result of a check: this run would train a wrong LoRA."""


class OutOfTime(Exception):
    """End of a check that took too long."""


@dataclass(frozen=True)
class Certificate:
    """Results of the checks, all passed; None for a check that could not be made.

    title: title of the model.
    gradients: gradients of some layers against central differences.
    blocks: largest relative difference between blocks as the run computes them and plain ones.
    unreached: targets without an effect on the output, which get no gradient.
    file: LoRA file as ComfyUI's loader reads it.
    effect: relative difference between the effects of LoRA and file on the output.
    unchecked: checks that could not be made, each with the reason.
    is_transient: True if a reason was want of memory or disk.
    seconds: that the checks took.
    peak_mib: the largest memory of the process, or of the GPU, up to their end.
    """

    title: str
    gradients: GradientCheck | None
    blocks: float | None
    unreached: tuple[str, ...]
    file: FileCheck | None
    effect: float | None
    unchecked: Mapping[str, str]
    is_transient: bool
    seconds: float
    peak_mib: int

    @property
    def text(self) -> str:
        """Line for the node."""
        parts = ["forward equal"]
        if self.gradients is not None:
            parts.append(self.gradients.text)
        if self.blocks is not None:
            parts.append("blocks equal to plain ones")
        if self.file is not None:
            loaded = self.file.layers - len(self.file.missing)
            layers = quantity(self.file.layers, "layer")
            parts.append(f"{quantity(loaded, f'of {layers} loads', f'of {layers} load')} in ComfyUI")
        text = f"{self.title}: {', '.join(parts)}."
        if self.unreached:
            count = quantity(len(self.unreached), "layer has", "layers have")
            text += f" {count} no effect on the output ({shortlist(self.unreached)})."
        if self.unchecked:
            checks: dict[str, list[str]] = {}
            for check, reason in self.unchecked.items():
                checks.setdefault(reason, []).append(check)
            text += f" Not checked: {'; '.join(f'{joined(names)} ({reason})' for reason, names in checks.items())}."
        return text

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json: finite numbers and text only."""
        gradients = {} if self.gradients is None else self.gradients.measured
        return {
            "text": self.text,
            "seconds": round(self.seconds, 1),
            "peak_memory_mib": self.peak_mib,
            "gradients": {name: float(f"{error:.3g}") for name, error in gradients.items()},
            **({} if self.blocks is None else {"blocks": float(f"{self.blocks:.3g}")}),
            "without_effect": list(self.unreached),
            **({} if self.file is None else {"file": self.file.summary()}),
            **({} if self.effect is None else {"effect_difference": float(f"{self.effect:.3g}")}),
            **({"not_checked": dict(self.unchecked)} if self.unchecked else {}),
        }


class _Checks:
    """Checks of one run in turn; those that can't be made are collected, with the reason."""

    def __init__(self, placed: PlacedModel, observer: Observer):
        self.placed, self.observer = placed, observer
        self.unchecked: dict[str, str] = {}
        self.is_transient = False
        self._start = time.monotonic()
        # The ranks of a sharded model run each block together, so that none may end a check alone.
        self.run_together = isinstance(placed.weights.swap, ShardedSwap)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def phase(self, text: str) -> None:
        self.observer.check_interrupted()
        self.observer.phase(f"Checking {self.placed.family.title}: {text}")

    def make(self, name: str, check: Callable[[], T]) -> T | None:
        """Make a check on every rank; None if it can't be made on one of them, for want of memory or time too.

        Raises CheckFailed if it fails on one, CannotContinue for a rank that has left, and what an interrupt raises.
        """
        self.phase(name)
        if any(self._gather(f"{name}, late", self.seconds > LIMIT)):
            self.unchecked[name] = LATE
            return None
        result = None
        reason = ""
        failure = ""
        try:
            with self.placed.weights.before_blocks(self._check_time):
                result = check()
        except CheckFailed as failed:
            failure = str(failed)
        except (CannotContinue, InterruptProcessingException):
            raise
        except OutOfTime:
            reason = LATE
        except Exception as error:  # such as from code of ComfyUI's that does not run in fp32
            is_oom = comfy.model_management.is_oom(error)
            if is_oom and self.run_together:
                raise
            log_error(f"{self.placed.family.title}: the check of {name} could not be made", error)
            reason = cut(error_sentence(error).rstrip("."))
            self.is_transient |= isinstance(error, OSError) or is_oom
        outcomes = self._gather(name, [reason, failure])
        if failures := [failure for _, failure in outcomes if failure]:
            raise CheckFailed(failures[0])
        if reasons := [reason for reason, _ in outcomes if reason]:
            self.unchecked[name], result = reasons[0], None
            comfy.model_management.soft_empty_cache()  # once the error no longer holds the tensors of its frames
        return result

    def agree(self, name: str, condition: bool) -> bool:
        """Return whether a condition holds on every rank."""
        return all(self._gather(name, condition))

    def _gather(self, name: str, value: V) -> list[V]:
        return self.placed.world.all_gather(f"certificate: {name}", value)

    def _check_time(self) -> None:
        self.observer.check_interrupted()
        if self.seconds > LIMIT and not self.run_together:
            raise OutOfTime


def make_certificate(
    placed: PlacedModel, targets: Sequence[str], samples: Sequence[Sample], guidance: float, observer: Observer
) -> Certificate:
    """Run all checks before the first step; all ranks of a run must call it. Raises ValueError, which names check and
    block, if one fails."""
    placed.weights.ensure()
    sample = smallest(samples)
    checks = _Checks(placed, observer)
    whole, sigma = check_sample(placed.family, placed.patcher, sample)
    inputs = inputs_of(placed.family, placed.patcher, whole, sigma, guidance)
    checks.phase("forward")
    placed.check_forward(inputs)
    with off_the_record(placed), placed.low_bit.switched_off(placed.weights.transformer.blocks()):
        checked = checks.make("gradients", lambda: _on_smallest_grid(placed, targets, samples, guidance, inputs))
        small, gradients = checked or (inputs, None)
        if gradients is not None and not gradients.measured:
            gradients, checks.unchecked["gradients"] = None, HIDDEN
        unreached = checks.make("targets", lambda: _check_targets(placed, small))
    with off_the_record(placed), perturbed(placed):
        blocks = checks.make("blocks", lambda: _check_blocks(placed, inputs))
    with off_the_record(placed), placed.low_bit.switched_off(placed.weights.transformer.blocks()), perturbed(placed):
        with tempfile.TemporaryDirectory(prefix="tessera-verify-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "lora.safetensors"
            file = checks.make("LoRA file", lambda: _check_lora_file(placed, path))
            effect = None
            if file is None or checked is None:
                checks.unchecked["effect of the file"] = checks.unchecked["LoRA file" if file is None else "gradients"]
            elif not checks.agree("noise", all(noise <= UNMEASURABLE for noise in checked[1].noise.values())):
                checks.unchecked["effect of the file"] = HIDDEN
            else:
                bound = max([SAME_EFFECT, *(NOISES * noise for noise in checked[1].noise.values())])
                effect = checks.make("effect of the file", lambda: _check_effect(placed, small, path, bound))
    return Certificate(
        placed.family.title,
        gradients,
        blocks,
        tuple(unreached or ()),
        file,
        effect,
        checks.unchecked,
        checks.is_transient,
        checks.seconds,
        memory_peak(placed.weights.device)["peak_memory_mib"],
    )


def off_the_record(placed: PlacedModel) -> AbstractContextManager[None]:
    """Return a context whose block copies don't count."""
    return nullcontext() if placed.weights.swap is None else placed.weights.swap.ring.uncounted()


def _passed(check: str, fault: str | None) -> None:
    if fault is not None:
        raise CheckFailed(
            f"verify: the check of {check} failed: {fault.rstrip('.')}. The LoRA would be wrong, so nothing was "
            "trained; please report this model. To train in spite of it, set verify to off on Training Memory."
        )


def _on_smallest_grid(
    placed: PlacedModel, targets: Sequence[str], samples: Sequence[Sample], guidance: float, whole: ModelInputs
) -> tuple[ModelInputs, GradientCheck]:
    """Check the gradients on the smallest grid that the model takes; returns its inputs too."""
    for side in SIDES:
        small = small_inputs(placed.family, placed.patcher, samples, guidance, side)
        if small is None:
            continue
        try:
            gradients = check_gradients(placed, small, targets)
        except (CheckFailed, CannotContinue, InterruptProcessingException, OutOfTime):
            raise
        except Exception as error:  # from code of ComfyUI's that needs a larger grid
            if comfy.model_management.is_oom(error):
                raise
            log.debug("%s fails on a grid of %d tokens a side: %s", placed.family.title, side, error)
        else:
            _passed("gradients", gradients.fault)
            return small, gradients
    gradients = check_gradients(placed, whole, targets)
    _passed("gradients", gradients.fault)
    return whole, gradients


def _check_targets(placed: PlacedModel, inputs: ModelInputs) -> list[str]:
    """Check that each target gets a gradient. Returns those without an effect on the output."""
    wrong, unreached = targets_without_gradient(placed, inputs)
    _passed("targets", f"{shortlist(wrong)} gets no gradient" if wrong else None)
    return unreached


def _check_blocks(placed: PlacedModel, inputs: ModelInputs) -> float:
    """Compare blocks as run with plain ones. Returns the largest difference."""
    fault, difference = check_execution(placed, inputs)
    _passed("blocks", fault)
    return difference


def _check_lora_file(placed: PlacedModel, path: Path) -> FileCheck:
    """Write the LoRA, which must have an effect, to a temporary file, and load it as ComfyUI does."""
    lora = placed.network.snapshot()
    save_lora(path, lora)
    checked = check_file(
        path, lora, placed.patcher, placed.network, placed.weights.transformer.linears(), placed.weights.device
    )
    _passed("LoRA file", checked.fault)
    return checked


def _check_effect(placed: PlacedModel, inputs: ModelInputs, path: Path, bound: float) -> float:
    """Compare the effects of a file, as ComfyUI patches it, and of the LoRA on the output. Returns the difference."""
    effect = effect_difference(placed, inputs, loaded_by_core(path, placed.patcher))
    _passed("LoRA file", None if effect <= bound else f"it moves the output {effect:.1%} differently")
    return effect
